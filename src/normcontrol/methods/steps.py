r"""Methods that compare a norm, or the length of a step, with the norm before that step.

Each function states the exact rule of a method and constructs its optimizer, as settings of
``AdamWN`` or ``NormControl`` with ``start="every step"``. It contains no arithmetic. In the rules,
:math:`\rho` is the norm before a step, :math:`\rho'` the norm after it, :math:`\alpha_t` the
learning rate and u the direction of the base optimizer's step.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Adam
from torch.optim.optimizer import ParamsT

from normcontrol.adamwn import AdamWN
from normcontrol.control import NormControl
from normcontrol.methods.registry import BETAS, Betas, method
from normcontrol.schedule import lr_times

PREVIOUS: dict[str, Any] = {"ratio": 1.0, "start": "every step"}
"""The target is the norm before the step."""


@method(
    "radial-brake",
    scope="tensor",
    target="rho before the step",
    law="upper, k = 1 - s",
    reference="modded-nanogpt 2026; Emerging-Optimizers",
    hidden=True,
)
def radial_brake(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, keep: float = 0.5, **adam: Any
) -> AdamWN:
    r"""Radial brake: a norm that grows in a step keeps a fraction s of its growth,
    :math:`\rho' \leftarrow \rho + s\, (\rho' - \rho)` if :math:`\rho' > \rho`.

    ``keep`` is s. The rule does not change a norm that shrinks. This is the rule of NVIDIA's
    Emerging-Optimizers. The record of modded-nanogpt that introduced the brake computes the growth
    to first order, from the component of the update along the weights.
    """
    return AdamWN(
        params, lr, betas, law="upper", rate=1.0 - keep, scope="tensor", **PREVIOUS, **adam
    )


@method(
    "relative-update",
    scope="tensor",
    target="none",
    law="none: steps lr * rho",
    reference="Emerging-Optimizers 2026",
    hidden=True,
)
def relative_update(
    params: ParamsT, lr: float = 1e-2, betas: Betas = BETAS, relative: float = 1.0, **adam: Any
) -> NormControl:
    r"""Relative update: :math:`W \leftarrow W - \alpha_t \rho\, \mathrm{unit}(u)`.

    The learning rate is the length of a step relative to the weights, as in Hyperball, but the norm
    is left alone. ``relative`` multiplies :math:`\alpha_t`, as in :func:`adamh`.
    """
    return NormControl(
        Adam(params, lr, betas, **adam),
        rate=0.0,
        scope="tensor",
        relative_step=lr_times(relative),
        **PREVIOUS,
    )


@method(
    "update-floor",
    scope="row",
    target="none",
    law="none: steps at least lr * f * rho",
    reference="modded-nanogpt 2026 (u/w floor)",
    hidden=True,
)
def update_floor(
    params: ParamsT, lr: float = 1e-2, betas: Betas = BETAS, floor: float = 0.3825, **adam: Any
) -> NormControl:
    r"""Relative update with a floor: for every row :math:`w \leftarrow w - \alpha_t\,
    \mathrm{unit}(u) \max(\|u\|, f \rho)`.

    ``floor`` is f. Longer steps stay as they are, and so does the norm. In modded-nanogpt u is
    Muon's direction; this function uses Adam's. For another optimizer give the settings of this
    one to ``NormControl``.
    """
    return NormControl(
        Adam(params, lr, betas, **adam),
        rate=0.0,
        scope="row",
        min_relative_step=lr_times(floor),
        **PREVIOUS,
    )
