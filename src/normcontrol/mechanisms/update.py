"""Mechanisms that use the optimizer's own update: its length, or its sign (the settings
``relative_step=``, ``min_relative_step=`` and ``cautious=``).

They compare the weights with a copy from before the step. Only weights that use one of these
settings are copied. This file knows nothing about targets, laws or schedules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normcontrol.scope import Scope
from normcontrol.weights.passes import measure, multiply_


def resize_(
    params: Sequence[Tensor],
    before: Sequence[Tensor],
    scope: Scope,
    length: Tensor,
    step: Tensor,
    at_least: bool = False,
) -> None:
    """Give the update from ``before`` to ``params`` this length, and keep its direction.

    With ``at_least``, a longer update stays as it is. An update of length zero stays zero.
    """
    differentiable = torch.is_grad_enabled()
    now = [p.clone() for p in params] if differentiable else list(params)
    updates = torch._foreach_sub(now, list(before))
    norm = scope.join(measure(updates, scope))
    if at_least:
        length = torch.maximum(length, norm)
    multiply_(updates, scope, torch.where(norm > 0, length / norm, 1.0), step)
    resized = torch._foreach_add(list(before), updates)
    if differentiable:  # torch has no derivative of the other copy
        for p, new in zip(params, resized, strict=True):
            p.copy_(new)
    else:
        torch._foreach_copy_(list(params), resized)


def multiply_cautiously_(
    params: Sequence[Tensor], before: Sequence[Tensor], scope: Scope, scale: Tensor, step: Tensor
) -> None:
    """Scale only the weights that the update moved towards zero.

    ``scale - 1`` times their value before the update is added to them.
    """
    changes = [old * ((old - p) * old >= 0) for p, old in zip(params, before, strict=True)]
    multiply_(changes, scope, scale - 1, step)
    torch._foreach_add_(list(params), changes)
