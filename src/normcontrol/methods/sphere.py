r"""Methods that keep a norm constant and set the angle of every step: Hyperball, rotational AdamW.

Each function states the exact rule of a method and constructs its optimizer, as settings of
``NormControl`` with ``relative_step``. It contains no arithmetic. In the rules, :math:`\alpha_t` is
the learning rate and u the direction of the base optimizer's step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Adam, Optimizer
from torch.optim.optimizer import ParamsT

from normcontrol.control import NormControl
from normcontrol.methods.registry import BETAS, Betas, method
from normcontrol.schedule import lr_times, sqrt_lr_times


@method(
    "AdamH",
    scope="tensor",
    target="rho_0",
    law="projection, steps lr * rho_0",
    reference="Wen et al. 2026, arXiv:2606.16899",
    hidden=True,
)
def adamh(
    params: ParamsT, lr: float = 1e-2, betas: Betas = BETAS, relative: float = 1.0, **adam: Any
) -> NormControl:
    r"""Hyperball with Adam: :math:`W \leftarrow R\, \mathrm{unit}(W - \alpha_t R\,
    \mathrm{unit}(u))`, :math:`R = \|W_0\|_F`.

    It is meant for hidden matrices, ``adamh(hidden(model), ...)``. The other parameters are trained
    by Adam with the learning rate of their group. If all groups have the same learning rate, use
    ``relative`` to make the steps of hidden matrices longer: it multiplies :math:`\alpha_t`.
    """
    return NormControl(
        Adam(params, lr, betas, **adam),
        ratio=1.0,
        law="projection",
        scope="tensor",
        relative_step=lr_times(relative),
    )


@method(
    "MuonH",
    scope="tensor",
    target="rho_0",
    law="projection, steps lr * rho_0",
    reference="Wen et al. 2026, arXiv:2606.16899",
    hidden=True,
)
def muonh(
    groups: list[dict[str, Any]],
    lr: float = 1e-2,
    momentum: float = 0.95,
    adam_lr: float = 1e-3,
    betas: Betas = BETAS,
    relative: float = 1.0,
) -> list[Optimizer]:
    r"""Hyperball with Muon for the controlled groups, and Adam for the other groups.

    Use it as ``muonh(hidden(model))``, and step both optimizers of the returned list. Controlled
    tensors must be matrices. ``relative`` is the same as in :func:`adamh`.
    """
    controlled, rest = _split(groups)
    if not hasattr(torch.optim, "Muon"):
        raise ImportError(
            f"MuonH uses torch.optim.Muon, which torch {torch.__version__} does not have. Use "
            "torch 2.9 or later."
        )
    muon = NormControl(
        torch.optim.Muon(controlled, lr=lr, weight_decay=0.0, momentum=momentum),
        ratio=1.0,
        law="projection",
        scope="tensor",
        relative_step=lr_times(relative),
    )
    return [muon, *([Adam(rest, adam_lr, betas)] if rest else [])]


def _split(groups: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the controlled groups and the other groups. Raise an error if Muon cannot train the
    controlled ones."""
    controlled: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for group in groups:
        if not isinstance(group, dict) or "controlled" not in group:
            raise TypeError(
                "MuonH takes the groups that hidden(model) returns, so that it knows which tensors "
                "Muon trains: muonh(hidden(model))."
            )
        (controlled if group["controlled"] else rest).append(group)
    for item in (item for group in controlled for item in group["params"]):
        name, p = item if isinstance(item, tuple) else ("a tensor", item)
        if p.dim() != 2:
            raise ValueError(
                f"MuonH controls matrices, but {name} has shape {tuple(p.shape)}. Put it into a "
                "group with controlled=False, which Adam trains."
            )
    return controlled, rest


@method(
    "rotational",
    scope="row",
    target="rho_0",
    law="projection, steps of one angle",
    reference="Kosson et al. 2023, arXiv:2305.17212",
)
def rotational(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, weight_decay: float = 0.1, **adam: Any
) -> NormControl:
    r"""Rotational AdamW: every row keeps its norm, and turns by the angle that an AdamW step
    converges to, :math:`\|\Delta w\| / \|w\| = \sqrt{2 \alpha_t \lambda (1 - \beta_1) / (1 +
    \beta_1)}`."""
    turn = sqrt_lr_times(2 * weight_decay * (1 - betas[0]) / (1 + betas[0]))
    return NormControl(
        Adam(params, lr, betas, **adam),
        ratio=1.0,
        law="projection",
        scope="row",
        relative_step=turn,
    )
