"""Layouts whose shards are plain tensors: FSDP1, ZeRO, Megatron, ZeroRedundancyOptimizer.

The norm of such a shard could be taken for the norm of the whole tensor. Where a layout can be
recognised, it is refused with a sentence that says what to do. This file measures nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from normcontrol.distributed.ranks import is_dtensor
from normcontrol.distributed.sharing import Sharing
from normcontrol.scope import Scope

MARKS = {
    "_fsdp_flattened": "FSDP1's flat parameters",
    "tensor_model_parallel": "a tensor that Megatron splits",
}
"""Attributes by which layouts mark their shards, and what these are."""

ADVICE = "Give the process group that shares the norm, norm_group=dist.group.WORLD for one"


def has_several_ranks() -> bool:
    """Return whether torch.distributed runs with more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_recognised(
    names: Sequence[str],
    params: Sequence[Tensor],
    scope: Scope,
    sharing: Sharing,
    captured: Tensor | None = None,
) -> None:
    """Refuse shards whose norm would be taken for the norm of the whole tensor.

    ``captured`` are the reference norms that were stored before, one for every part.
    """
    if not has_several_ranks():
        return
    if sharing.norm_group is None:
        _check_marks(names, params)
        if captured is not None and not any(map(is_dtensor, params)):
            _check_count(len(captured), sum(scope.sizes(params)))
    elif not scope.joint:
        _check_whole(names, params, scope)


def _check_marks(names: Sequence[str], params: Sequence[Tensor]) -> None:
    for mark, kind in MARKS.items():
        for name, p in zip(names, params, strict=True):
            if getattr(p, mark, False):
                raise ValueError(
                    f"{name} is this rank's shard of {kind}, and its norm is not that of the "
                    f"whole. {ADVICE}."
                )


def _check_count(before: int, now: int) -> None:
    if before != now:
        raise ValueError(
            f"The optimizer was constructed with {before} norms to control in a group, and now "
            f"finds {now}: its tensors were replaced, as ZeRO replaces them by this rank's shards. "
            f"{ADVICE}; with flat shards, also controlled=True."
        )


def _check_whole(names: Sequence[str], params: Sequence[Tensor], scope: Scope) -> None:
    for name, p in zip(names, params, strict=True):
        if p.dim() < 2 or getattr(p, "_fsdp_flattened", False):
            raise ValueError(
                f"scope={scope.name!r} needs whole tensors, but under norm_group {name} is flat, "
                "like the shards of FSDP1 and ZeRO, in which the bounds of tensors and rows are "
                "not known. Use scope='global' or 'group', or FSDP2, whose DTensors know them."
            )


def refuse_zero_redundancy(optimizer: Optimizer) -> Any:
    """Refuse ``optimizer`` at its first step if it is inside a ZeroRedundancyOptimizer.

    ZeroRedundancyOptimizer gives the optimizer of each rank some of the tensors only, and marks
    neither. A hook on all optimizers sees the outer one before its step. Returns the handle to
    remove the hook with, or None if there is nothing to look for.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not has_several_ranks():
        return None
    inner = weakref.ref(optimizer)

    def check(stepping: Optimizer, *_: Any) -> None:
        inside = isinstance(stepping, module.ZeroRedundancyOptimizer)
        if inside and getattr(stepping, "optim", None) is inner():
            raise ValueError(
                "ZeroRedundancyOptimizer gives each rank's optimizer some of the tensors only, and "
                f"their norm is not that of all. {ADVICE}, or put NormControl around the "
                "ZeroRedundancyOptimizer."
            )

    return register_optimizer_step_pre_hook(check)
