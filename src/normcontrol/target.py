"""Targets: what the scheduled number of a setting is a multiple of.

The target norm is ``value * unit``, where ``value`` is the setting (r_t in the paper) and ``unit``
depends on the kind of target. Add a kind by adding a function to :data:`TARGETS`; its name is then
a setting of every group. A target knows nothing about laws, schedules or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Unit = Callable[[Tensor, Tensor], Tensor]
"""A function of (reference norm, norm of weights whose root-mean-square is 1), element-wise."""


def ratio(reference: Tensor, unit_rms: Tensor) -> Tensor:
    """The target is a multiple of the reference norm ``||theta_0||``, as in the paper."""
    return reference


def norm(reference: Tensor, unit_rms: Tensor) -> Tensor:
    """The target is the norm itself."""
    return torch.ones_like(reference)


def rms(reference: Tensor, unit_rms: Tensor) -> Tensor:
    """The target is the root-mean-square of the weights.

    >>> rms(torch.tensor(7.0), torch.tensor(10.0))  # 100 weights of rms 1 have a norm of 10
    tensor(10.)
    """
    return unit_rms


TARGETS: dict[str, Unit] = {"ratio": ratio, "norm": norm, "rms": rms}
"""The kinds of target, by the name of the setting."""
