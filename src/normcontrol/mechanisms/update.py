"""The optimizer's own update of the weights, for methods that change it or ask for its direction.

They need the weights as they were before the step. The copy of the controlled weights is made at
every step, and only for the methods that use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normcontrol.scope import Scope
from normcontrol.weights.passes import measure, multiply_


@torch.no_grad()
def resize_(
    params: Sequence[Tensor], before: Sequence[Tensor], scope: Scope, length: Tensor, step: Tensor
) -> None:
    """Give the update from ``before`` to ``params`` the given length, in its own direction."""
    updates = torch._foreach_sub(list(params), list(before))
    norm = scope.join(measure(updates, scope))
    multiply_(updates, scope, torch.where(norm > 0, length / norm, 1.0), step)
    torch._foreach_copy_(list(params), torch._foreach_add(list(before), updates))


def multiply_cautiously_(
    params: Sequence[Tensor], before: Sequence[Tensor], scope: Scope, scale: Tensor, step: Tensor
) -> None:
    """Multiply only the weights that the update moved towards zero.

    What is added to them is ``scale - 1`` times their value before the update.
    """
    pulled = [old * ((old - p) * old >= 0) for p, old in zip(params, before, strict=True)]
    multiply_(pulled, scope, scale - 1, step)
    torch._foreach_add_(list(params), pulled)
