r"""Weight decay: the target is zero, and the methods differ in the rate.

Each function states the exact rule of a method and constructs its optimizer, as settings of
``AdamWN`` or ``NormControl``. It contains no arithmetic. In the rules, :math:`\alpha_t` is the
learning rate, :math:`\lambda` the decay and u the direction of the base optimizer's step.
"""

from __future__ import annotations

from typing import Any

from torch.optim import SGD, Adam
from torch.optim.optimizer import ParamsT

from normcontrol.adamwn import AdamWN
from normcontrol.control import NormControl
from normcontrol.methods.registry import BETAS, Betas, method
from normcontrol.schedule import eta_times, lr_squared_times, lr_times


@method(
    "Hanson-Pratt", scope="global", target="0", law="k = decay", reference="Hanson & Pratt 1988"
)
def hanson_pratt(
    params: ParamsT, lr: float = 0.1, weight_decay: float = 1e-4, momentum: float = 0.0
) -> NormControl:
    r"""Weight decay with SGD (Hanson and Pratt, 1988): :math:`\theta \leftarrow (1 - \lambda)\theta
    - \alpha g`."""
    return NormControl(SGD(params, lr, momentum), ratio=0.0, rate=weight_decay, order="before")


@method(
    "AdamW-13a",
    scope="global",
    target="0",
    law="k = lr * decay",
    reference="Loshchilov & Hutter 2019 (torch)",
)
def adamw(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, weight_decay: float = 0.1, **adam: Any
) -> AdamWN:
    r"""AdamW as torch implements it, line 13.a of Algorithm 1: :math:`\theta \leftarrow \theta -
    \alpha_t \lambda \theta`."""
    return AdamWN(params, lr, betas, ratio=0.0, rate=lr_times(weight_decay), order="before", **adam)


@method(
    "AdamW-13b",
    scope="global",
    target="0",
    law="k = lr / lr_0 * decay",
    reference="Loshchilov & Hutter 2019",
)
def adamw_decoupled(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, weight_decay: float = 1e-4, **adam: Any
) -> AdamWN:
    r"""AdamW as in its paper, line 13.b of Algorithm 1: :math:`\theta \leftarrow \theta - \eta_t
    \lambda \theta`, :math:`\eta_t = \alpha_t / \alpha_0`."""
    return AdamWN(
        params, lr, betas, ratio=0.0, rate=eta_times(weight_decay), order="before", **adam
    )


@method(
    "AdamC",
    scope="global",
    target="0",
    law="k = decay * lr^2 / lr_max",
    reference="Defazio 2025, arXiv:2506.02285",
)
def adamc(
    params: ParamsT,
    lr: float = 1e-3,
    betas: Betas = BETAS,
    weight_decay: float = 0.1,
    lr_max: float | None = None,
    **adam: Any,
) -> AdamWN:
    r"""AdamC: :math:`\theta \leftarrow \theta - \lambda (\alpha_t^2 / \alpha_{max}) \theta`.

    For weights that are followed by a normalisation layer, this keeps the norm constant while the
    learning rate falls. ``lr_max`` is the peak of the learning rate schedule; the default is
    ``lr``.
    """
    return AdamWN(
        params,
        lr,
        betas,
        ratio=0.0,
        rate=lr_squared_times(weight_decay, lr_max or lr),
        order="before",
        **adam,
    )


@method(
    "AdamW-lr2",
    scope="global",
    target="0",
    law="k = decay * lr^2",
    reference="PaLM 2022, arXiv:2204.02311",
)
def adamw_lr_squared(
    params: ParamsT,
    lr: float = 1e-3,
    betas: Betas = BETAS,
    weight_decay: float = 100.0,
    **adam: Any,
) -> AdamWN:
    r"""Decay proportional to the square of the learning rate: :math:`\theta \leftarrow \theta -
    \lambda \alpha_t^2 \theta`.

    PaLM decayed by :math:`\alpha_t^2` itself, :math:`\lambda = 1`. AdamC is the same rule with
    :math:`\lambda / \alpha_{max}`: the decay of AdamW at the peak of the schedule.
    """
    return AdamWN(
        params, lr, betas, ratio=0.0, rate=lr_squared_times(weight_decay), order="before", **adam
    )


@method(
    "cautious",
    scope="element",
    target="0",
    law="k = lr * decay, where the step moves towards 0",
    reference="Chen et al. 2025, arXiv:2510.12402",
)
def cautious(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, weight_decay: float = 0.1, **adam: Any
) -> NormControl:
    r"""Cautious weight decay: :math:`\theta \leftarrow \theta - \alpha_t (u + \lambda\, [u \theta
    \geq 0]\, \theta)`. Only the weights that the step moves towards zero decay."""
    return NormControl(
        Adam(params, lr, betas, **adam), ratio=0.0, rate=lr_times(weight_decay), cautious=True
    )


@method(
    "Adam-L2",
    scope="element",
    target="none",
    law="none: decay in the gradient",
    reference="Loshchilov & Hutter 2019 (for comparison)",
)
def adam_l2(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, weight_decay: float = 1e-4, **adam: Any
) -> Adam:
    r"""L2 regularisation: :math:`g \leftarrow g + \lambda \theta`, before Adam divides the gradient
    by its root mean square.

    This is torch's own Adam. It does not control a norm, and is included for comparison.
    """
    return Adam(params, lr, betas, weight_decay=weight_decay, **adam)
