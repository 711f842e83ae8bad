"""Targets: what the scheduled number of a setting is a multiple of.

The target norm is ``value * unit``, where ``value`` is the setting (r_t in the paper) and ``unit``
depends on the kind of target. Add a kind by adding a function to :data:`TARGETS`; its name is then
a setting of every group. A target knows nothing about laws, schedules or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Units(NamedTuple):
    """Norms that a target can be a multiple of, each of the same shape."""

    reference: Tensor
    """The reference norm, ``||theta_0||``."""
    rms: Tensor
    """The norm of weights whose root-mean-square is 1: the root of their number."""
    gain: Tensor
    """The norm of weights whose gain is 1: the root of their number of outputs."""


def ratio(units: Units) -> Tensor:
    """The target is a multiple of the reference norm ``||theta_0||``, as in the paper."""
    return units.reference


def norm(units: Units) -> Tensor:
    """The target is the norm itself."""
    return torch.ones_like(units.reference)


def rms(units: Units) -> Tensor:
    """The target is the root-mean-square of the weights."""
    return units.rms


def gain(units: Units) -> Tensor:
    """The target is the gain: the norm of the rows of a matrix, on average.

    >>> gain(Units(torch.tensor(7.0), rms=torch.tensor(24.0), gain=torch.tensor(3.0)))
    tensor(3.)
    """
    return units.gain


HELD_GAIN = 0.8
"""The gain below which weights are not held: see :func:`hold`."""


def hold(units: Units) -> Tensor:
    """The target is a multiple of the reference norm, or of the norm of gain 0.8 if that is larger.

    ``hold=1.0`` is the default target: weights keep the norm that they have, unless it is below the
    norm of gain 0.8. Where the number of outputs is not known, the target is a multiple of the
    reference norm.

    >>> known, unknown = torch.tensor(3.0), torch.tensor(torch.nan)
    >>> [hold(Units(torch.tensor(2.0), known, gain)) for gain in (known, unknown)]
    [tensor(2.4000), tensor(2.)]
    """
    return torch.fmax(units.reference, HELD_GAIN * units.gain)


TARGETS: dict[str, Callable[[Units], Tensor]] = {
    "ratio": ratio,
    "norm": norm,
    "rms": rms,
    "gain": gain,
    "hold": hold,
}
"""The kinds of target, by the name of the setting."""

RELATIVE = ("ratio", "hold")
"""The kinds of target that refer to the reference norm."""
