r"""Constrained parameter regularisation (CPR): an upper bound for each tensor, with a multiplier.

Four rules for the bound :math:`\kappa` on R, the sum of squares of a tensor with n weights. Each
function constructs an optimizer; the law itself is ``law.Integral``::

    lambda <- max(0, lambda + (R - kappa) / n);  theta <- (1 - 2 lambda) theta

The authors do not apply CPR to embeddings: ``cpr(hidden(model), ...)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import ParamsT

from normcontrol.adamwn import AdamWN
from normcontrol.methods.registry import BETAS, Betas, method

CPR: dict[str, Any] = {"law": "integral", "rate": 1.0, "scope": "tensor"}
"""The settings that the four rules have in common."""


def _cpr(name: str, target: str) -> Callable[[Any], Any]:
    """Add one of the four rules to the registry."""
    return method(
        name,
        scope="tensor",
        target=target,
        law="integral",
        reference="Franke et al. 2023, arXiv:2311.09058",
        hidden=True,
    )


@_cpr("CPR-kI0", "at most sqrt(k) * rho_0")
def cpr(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, kappa: float = 1.0, **adam: Any
) -> AdamWN:
    r"""CPR with the bound kI0, a multiple of the initial sum of squares: :math:`\kappa = k
    R(\theta_0)`. ``kappa`` is k."""
    return AdamWN(params, lr, betas, ratio=kappa**0.5, **CPR, **adam)


@_cpr("CPR-uniform", "at most rms")
def cpr_uniform(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, mean_square: float = 1e-3, **adam: Any
) -> AdamWN:
    r"""CPR with the same mean square as the bound of every tensor: :math:`\kappa = n \cdot`
    ``mean_square``."""
    return AdamWN(params, lr, betas, rms=mean_square**0.5, **CPR, **adam)


@_cpr("CPR-WS", "at most rho at step s")
def cpr_warm_start(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, start: int = 1000, **adam: Any
) -> AdamWN:
    r"""CPR with a warm start: no bound until step s (``start``), then :math:`\kappa = R(\theta_s)`.

    The authors use twice the warm-up of the learning rate for s. The paper on weight norm control
    calls this rule Kappa-IS.
    """
    return AdamWN(params, lr, betas, ratio=1.0, start=start, **CPR, **adam)


@_cpr("CPR-IP", "at most rho at inflection")
def cpr_inflection(params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, **adam: Any) -> AdamWN:
    r"""CPR from the inflection point on: :math:`\kappa = R` at the first step at which the second
    difference of R is negative. R is a running mean that is sampled at every 200th step."""
    return AdamWN(params, lr, betas, ratio=1.0, start="inflection", **CPR, **adam)
