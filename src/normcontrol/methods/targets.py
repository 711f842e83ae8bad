r"""Methods that keep a norm at a target, below a bound, or inside a band.

Each function states the exact rule of a method and constructs its optimizer, as settings of
``AdamWN`` or ``NormControl``. It contains no arithmetic. In the rules, :math:`\rho` is the norm of
the weights that share one.
"""

from __future__ import annotations

from typing import Any

from torch.optim import SGD, Adam
from torch.optim.optimizer import ParamsT

from normcontrol.adamwn import AdamWN
from normcontrol.control import NormControl
from normcontrol.methods.registry import BETAS, Betas, method
from normcontrol.schedule import Value, every, paper_ratio
from normcontrol.target import TARGETS


@method(
    "AdamWN",
    scope="global",
    target="r_t * rho_0",
    law="k = 0.01",
    reference="Loshchilov 2023, arXiv:2311.11446",
)
def adamwn(
    params: ParamsT,
    lr: float = 1e-3,
    betas: Betas = BETAS,
    ratio: Value | None = None,
    rate: Value = 1e-2,
    scope: Any = "global",
    gain: Value | None = None,
    **adam: Any,
) -> AdamWN:
    r"""Weight norm control, line 13.c of Algorithm 1: :math:`\theta \leftarrow \theta - k_t (1 -
    r_t \|\theta_0\| / \|\theta\|) \theta`.

    Without a target, :math:`r_t` is the paper's, 1 to 2 over 2,500 steps. With ``gain`` (or
    ``norm``, ``rms`` or ``hold``) the target is that instead.
    """
    if all(target is None for target in (ratio, gain, *map(adam.get, TARGETS))):
        ratio = paper_ratio()
    return AdamWN(params, lr, betas, ratio=ratio, gain=gain, rate=rate, scope=scope, **adam)


@method(
    "max-norm",
    scope="row",
    target="at most c",
    law="upper, k = 1",
    reference="Srivastava et al. 2014",
)
def max_norm(
    params: ParamsT, lr: float = 0.1, norm: float = 3.0, momentum: float = 0.0
) -> NormControl:
    r"""Max-norm (Srivastava et al., 2014): after each step, the incoming weights of every unit are
    :math:`w \leftarrow w \min(1, c / \rho)`."""
    return NormControl(SGD(params, lr, momentum), norm=norm, law="upper", rate=1.0, scope="row")


@method(
    "MinMaxNorm", scope="axis", target="[low, high]", law="band, k = rate", reference="Keras 2017"
)
def min_max_norm(
    params: ParamsT,
    lr: float = 1e-3,
    low: float = 0.0,
    high: float = 1.0,
    rate: float = 1.0,
    scope: Any = "row",
    betas: Betas = BETAS,
    **adam: Any,
) -> NormControl:
    r"""Keras' MinMaxNorm: :math:`\rho \leftarrow (1 - k) \rho + k\, \mathrm{clip}(\rho, low,
    high)`.

    This is the law of weight norm control for a band, published before that paper. Kernels of
    Keras' Dense are transposed: ``axis=0`` of Keras is ``scope="row"``.
    """
    if not (0 <= low <= high and high > 0):
        raise ValueError(
            f"low={low} and high={high}: no norm can be kept between them. Give 0 <= low <= high, "
            "and high above 0."
        )
    return NormControl(
        Adam(params, lr, betas, **adam),
        norm=high,
        law=f"band({low / high!r})",
        rate=rate,
        scope=scope,
    )


@method(
    "NaP",
    scope="tensor",
    target="rho_0",
    law="k = 1 at every n-th step",
    reference="Lyle et al. 2024, arXiv:2407.01800",
)
def nap(params: ParamsT, lr: float = 1e-3, n: int = 1, betas: Betas = BETAS, **adam: Any) -> AdamWN:
    r"""Normalize-and-Project: at every n-th step :math:`\theta_l \leftarrow \theta_l\, \rho_{l,0} /
    \rho_l`. The normalisation layers of the method are part of the model, not of the optimizer."""
    return AdamWN(params, lr, betas, ratio=1.0, rate=every(n), scope="tensor", **adam)


@method(
    "LAWN",
    scope="tensor",
    target="rho at the switch",
    law="free, then k = 1",
    reference="Gupta et al. 2021, arXiv:2108.05839",
)
def lawn(
    params: ParamsT, lr: float = 1e-3, switch: int = 1000, betas: Betas = BETAS, **adam: Any
) -> AdamWN:
    r"""LAWN: no control for ``switch`` steps. Then the norm of every tensor is kept at its value of
    that step: :math:`\theta_l \leftarrow \theta_l\, \rho_{l,s} / \rho_l`."""
    return AdamWN(params, lr, betas, ratio=1.0, rate=1.0, scope="tensor", start=switch, **adam)


@method(
    "nGPT",
    scope="row or col",
    target="1",
    law="projection",
    reference="nGPT 2024, arXiv:2410.01131",
)
def ngpt(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, scope: Any = "row", **adam: Any
) -> AdamWN:
    r"""The weights of nGPT: after each step :math:`w \leftarrow w / \|w\|` for every row.

    For output projections it is every column: put them into a group with ``scope="col"``. nGPT's
    architecture is part of the model, not of the optimizer.
    """
    return AdamWN(params, lr, betas, norm=1.0, law="projection", scope=scope, **adam)


@method(
    "EDM2",
    scope="row",
    target="rms 1",
    law="projection",
    reference="Karras et al. 2024, arXiv:2312.02696",
)
def edm2(params: ParamsT, lr: float = 1e-2, betas: Betas = BETAS, **adam: Any) -> AdamWN:
    r"""EDM2's forced weight normalisation: :math:`w \leftarrow w \sqrt{n} / \|w\|` for the weights
    of every output.

    EDM2 normalises at the beginning of each forward pass, and this optimizer at the end of each
    step. From the second step on, gradients are computed at the same weights in both.
    """
    return AdamWN(params, lr, betas, rms=1.0, law="projection", scope="row", **adam)
