"""Layouts whose shards are plain tensors: FSDP1, ZeRO, Megatron, ZeroRedundancyOptimizer.

The norm of such a shard could be taken for the norm of the whole tensor. Where a layout can be
recognised, it is refused with a sentence that says what to do. This file measures nothing.
"""

from __future__ import annotations

import math
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
    "ds_id": "a tensor that DeepSpeed's ZeRO-3 splits",
}
"""Attributes by which layouts mark their shards, and what these are."""

ADVICE = "Give the process group that shares the norm, norm_group=dist.group.WORLD for one"


class ShardError(ValueError):
    """A shard was given whose norm would be taken for that of the whole tensor.

    Args:
        fact: what was given, as a sentence.
        advice: what to do instead, where norms are controlled.
    """

    def __init__(self, fact: str, advice: str) -> None:
        super().__init__(f"{fact} {advice}")
        self.fact = fact


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
    if sharing.norm_group is not None:
        if not scope.joint:
            _check_whole(names, params, scope)
        return
    check_marks(names, params)
    if captured is not None and not any(map(is_dtensor, params)):
        _check_replaced(len(captured), params, scope)


def check_marks(names: Sequence[str], params: Sequence[Tensor]) -> None:
    """Refuse tensors that are marked as shards, if there are several ranks."""
    if not has_several_ranks():
        return
    for mark, kind in MARKS.items():
        for name, p in zip(names, params, strict=True):
            if getattr(p, mark, False) is not False:  # the first ds_id is 0
                fact = f"{name} is this rank's shard of {kind}, and its norm is not that of the"
                raise ShardError(f"{fact} whole.", f"{ADVICE}.")


def is_flat_shard(param: Any) -> bool:
    """Return whether this is a parameter of FSDP1: of one dimension, whatever weights it has."""
    return getattr(param, "_fsdp_flattened", False) is True


def refuse_flat_shard(name: str) -> None:
    """Refuse a flat shard that the rule for matrices would leave alone."""
    raise ShardError(
        f"{name} is a flat parameter of FSDP1. It has one dimension, also where its weights are "
        "matrices, so by controlled='matrices' nothing would be controlled in it.",
        "Put the weights to control into a group with controlled=True, give norm_group, and set "
        "controlled=False in the other groups; or use FSDP2, whose DTensors keep their shapes.",
    )


def refuse_whole_beside_shards(name: str) -> None:
    """Refuse a tensor that every rank has whole, where the norms of shards are summed."""
    raise ValueError(
        f"{name} is outside of FSDP1's wrapping: every rank has it whole, and norm_group would "
        "count it once for each rank. Wrap the whole model in FSDP1, or give this tensor a group "
        "with scope='tensor' or controlled=False."
    )


def _check_replaced(before: int, params: Sequence[Tensor], scope: Scope) -> None:
    axes = scope.axes or ()  # tensors without them are refused by name later
    now = sum(scope.sizes([p for p in params if all(-p.dim() <= a < p.dim() for a in axes)]))
    is_flat = len(params) == 1 and params[0].dim() == 1
    # On one process a vector of all weights has the norm of all weights, but no parts.
    may_differ = not has_several_ranks() and now > 0 and (scope.joint or not is_flat)
    if before != now and not may_differ:
        raise ValueError(
            f"The optimizer was constructed with {before} norms to control in a group, and now "
            f"finds {now}: its tensors were replaced, as ZeRO replaces them by this rank's shards, "
            f"or removed. {ADVICE}; with flat shards, also controlled=True, and scope='global' or "
            "'group'. After a removal, construct the optimizer again."
        )


def is_partitioned(param: Any) -> bool:
    """Return whether this is a parameter of DeepSpeed's ZeRO-3 whose values are elsewhere.

    Its own data is empty, and ``ds_tensor`` has this rank's shard. The optimizer gets the shards of
    a group as one vector, in its first step.
    """
    return hasattr(param, "ds_shape") and param.numel() == 0 and math.prod(param.ds_shape) > 0


def check_partitioned(
    names: Sequence[str] | None,
    params: Sequence[Tensor],
    rule: Any,
    scope: Scope,
    sharing: Sharing,
) -> None:
    """Refuse parameters of ZeRO unless their shards can be controlled from the first step on.

    ``params`` are all tensors of a group, ``names`` their names if they have some, and ``rule`` is
    the group's ``controlled``.
    """
    if names and isinstance(rule, tuple) and len(names) != len(params):
        raise ValueError(
            f"controlled selects {', '.join(rule[:3])} by name, but the {len(names)} tensors of "
            f"the group were replaced by {len(params)}, as ZeRO replaces them by this rank's "
            "shards. Put the weights to control into a group with controlled=True, and set "
            "controlled=False in the others."
        )
    index = next((i for i, p in enumerate(params) if is_partitioned(p)), None)
    if rule is False or index is None:
        return
    name = names[index] if names else f"tensor {index}"
    if sharing.norm_group is None or rule is not True or not scope.joint:
        raise ShardError(
            f"{name} is a parameter of DeepSpeed's ZeRO-3: it is empty, and the optimizer gets the "
            "shards of a group as one vector. Which of them are matrices, and where a tensor or "
            "row begins, cannot be seen then.",
            "Give norm_group, the data-parallel process group; put the weights to control into one "
            "group with controlled=True and scope='global' or 'group', and set controlled=False in "
            "the others.",
        )


def _check_whole(names: Sequence[str], params: Sequence[Tensor], scope: Scope) -> None:
    for name, p in zip(names, params, strict=True):
        if p.dim() < 2 or is_flat_shard(p):
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
