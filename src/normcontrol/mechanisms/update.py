"""Mechanisms that use the optimizer's own update: its length, or its sign (the settings
``relative_step=`` and ``cautious=``).

They compare the weights with a copy from before the step. Only weights that use one of the two
settings are copied. This file knows nothing about targets, laws or schedules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normcontrol.scope import Scope, Weights, apply_, join, measure


@torch.no_grad()
def resize_(
    params: Sequence[Tensor], before: Sequence[Tensor], scope: Scope, length: Tensor, step: Tensor
) -> None:
    """Give the update from ``before`` to ``params`` this length, and keep its direction.

    An update of length zero stays zero.
    """
    updates = torch._foreach_sub(list(params), list(before))
    norm = join(measure(updates, scope), scope)
    apply_(updates, scope, torch.where(norm > 0, length / norm, 1.0), step)
    torch._foreach_copy_(list(params), torch._foreach_add(list(before), updates))


class CautiousWeights(Weights):
    """Weights of which only those are scaled that the optimizer's update moved towards zero.

    ``before`` is a copy of the weights from before the update; set it at every step. ``scale - 1``
    times that value is added to each of these weights.
    """

    before: list[Tensor]

    def apply_(self, scale: Tensor, step: Tensor) -> None:
        """Scale the weights that moved towards zero, in place."""
        towards_zero = [
            (old - p) * old >= 0 for p, old in zip(self.params, self.before, strict=True)
        ]
        scaled = [old * mask for old, mask in zip(self.before, towards_zero, strict=True)]
        apply_(scaled, self.scope, scale - 1, step)
        torch._foreach_add_(self.params, scaled)
