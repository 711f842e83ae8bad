"""Ranks that share norms: sums over them, and what this rank stores of a tensor.

This file knows process groups and DTensors in general. Where the shards of a tensor lie is the
subject of ``placement``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor


class Ranks(NamedTuple):
    """Ranks that share norms, and the process group in which they are summed."""

    group: Any
    ranks: frozenset[int]


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether this is a DTensor."""
    # Importing the module is slow. If it has not been imported, no tensor is a DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_tensors(tensors: Sequence[Any]) -> Sequence[Tensor]:
    """Return the stored tensors of this rank: those whose address and version can be compared.

    ``to_local`` makes a new tensor object each time, which does not tell the version.
    """
    module = sys.modules.get("torch.distributed.tensor")  # looked up once: this runs at every step
    if module is None:
        return tensors
    return [t._local_tensor if isinstance(t, module.DTensor) else t for t in tensors]


def is_mixed(params: Iterable[Any]) -> bool:
    """Return whether there are DTensors and other tensors, or DTensors on several meshes."""
    return len({p.device_mesh if is_dtensor(p) else None for p in params}) > 1


def devices_of(group: Any) -> list[str]:
    """Return the types of the devices whose tensors a process group can sum.

    The list is empty for a group that was made without torch.distributed's own functions.
    """
    try:
        backends = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    except (TypeError, ValueError):
        return []
    return [backend.partition(":")[0] for backend in backends.split(",")]


def sum_over_ranks(values: Tensor, ranks: Ranks) -> Tensor:
    """Return the sums over the ranks; ``values`` may be overwritten.

    On an accelerator the host does not wait for them.
    """
    devices = devices_of(ranks.group)
    # CPU-offloaded weights under NCCL are summed on the accelerator.
    sent = values.to(devices[0]) if devices and values.device.type not in devices else values
    try:
        dist.all_reduce(sent, group=ranks.group)
    except RuntimeError as error:
        raise RuntimeError(
            f"The norms could not be summed over the ranks {sorted(ranks.ranks)}: one of them has "
            "died, hangs, or did not reach this step. Look at the first rank that failed, and "
            "resume from the last checkpoint, on fewer ranks if necessary."
        ) from error
    return sent.to(values.device)
