"""What the optimizer's own step does to the weights, for methods that change it or ask which way it
went.

They need the weights as they were before the step: a copy of what is controlled, made at every
step, which is why no other method pays for it.
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
    """Give the step from ``before`` to ``params`` the length asked for, in its own direction."""
    steps = torch._foreach_sub(list(params), list(before))
    norm = join(measure(steps, scope), scope)
    apply_(steps, scope, torch.where(norm > 0, length / norm, 1.0), step)
    torch._foreach_copy_(list(params), torch._foreach_add(list(before), steps))


class CautiousWeights(Weights):
    """Weights of which only those are scaled that the optimizer's step moved towards zero, by a
    part of what they were before it."""

    before: list[Tensor]

    def apply_(self, scale: Tensor, step: Tensor) -> None:
        towards_zero = [
            (old - p) * old >= 0 for p, old in zip(self.params, self.before, strict=True)
        ]
        pulled = [old * where for old, where in zip(self.before, towards_zero, strict=True)]
        apply_(pulled, self.scope, scale - 1, step)
        torch._foreach_add_(self.params, pulled)
