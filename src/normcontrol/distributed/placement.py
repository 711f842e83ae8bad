"""Where the shards of a DTensor lie: which mesh dimensions split it, and which indices are local.

Everything here reads meshes and placements. Nothing communicates, except that a process group may
be created once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from normcontrol.distributed.ranks import is_dtensor, local
from normcontrol.scope import Scope
from normcontrol.weights.rounding import DROPPED_BITS


def split_dims(param: Any) -> list[int]:
    """Return the mesh dimensions that split a DTensor."""
    placements = param.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"A parameter of shape {tuple(param.shape)} is a DTensor with placements {placements}: "
            "its values are partial sums, so they have no norm. Redistribute it to Shard or "
            "Replicate placements."
        )
    # FSDP2 with tensor parallelism uses _StridedShard, which is not a Shard but has a dim too.
    return [
        i
        for i, placement in enumerate(placements)
        if hasattr(placement, "dim") and param.device_mesh.size(i) > 1
    ]


def coordinate_of(mesh: Any) -> Sequence[int]:
    """Return this rank's coordinate in the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(
            f"Rank {dist.get_rank()} has an optimizer for DTensors on {mesh}, but is not one of "
            "its ranks, so it cannot know their norms. Construct the optimizer only on the ranks "
            "of the mesh."
        )
    return coordinate


def ranks_along(mesh: Any, dims: set[int]) -> frozenset[int]:
    """Return the ranks that differ from this one along the given mesh dimensions only."""
    index = tuple(slice(None) if i in dims else c for i, c in enumerate(coordinate_of(mesh)))
    return frozenset(mesh.mesh[index].flatten().tolist())


_created: dict[frozenset[int], tuple[Any, Any]] = {}


def process_group(mesh: Any, dims: set[int], ranks: frozenset[int]) -> Any:
    """Return a process group of exactly these ranks.

    It is the mesh's own, the default group, or one that is created once and kept.
    """
    if len(dims) == 1:
        return mesh.get_group(next(iter(dims)))
    world = dist.group.WORLD
    if len(ranks) == dist.get_world_size():
        return world
    if ranks not in _created or _created[ranks][0] is not world:
        _created[ranks] = world, dist.new_group(sorted(ranks), use_local_synchronization=True)
    return _created[ranks][1]


def local_parts(param: Any, scope: Scope) -> tuple[int, Tensor]:
    """Return how many parts a tensor has, and which of them this rank stores elements of."""
    if scope.axes is None:
        return 1, torch.arange(1)
    part_axes = sorted({a % param.dim() for a in scope.axes})
    shape = [param.shape[d] for d in part_axes]
    grid = torch.arange(math.prod(shape)).view(shape)
    size = grid.numel()
    if is_dtensor(param) and split_dims(param):
        indices = local_indices(param)
        if indices is None:
            raise ValueError(
                f"A DTensor of shape {tuple(param.shape)} with placements {param.placements} has a "
                f"shard of shape {tuple(local(param).shape)} on rank {dist.get_rank()}, which is "
                "not how torch.chunk splits it, so the parts that "
                f"scope={scope.name!r} needs the norms of cannot be identified. Distribute it "
                "with distribute_tensor, or use another scope."
            )
        for axis, d in enumerate(part_axes):
            grid = grid.index_select(axis, indices[d])
    return size, grid.flatten()


def local_indices(param: Any) -> list[Tensor] | None:
    """Return for every axis of a DTensor the indices on this rank.

    None if the shard has another shape than these would give.
    """
    indices = [torch.arange(n) for n in param.shape]
    coordinate = coordinate_of(param.device_mesh)
    for i in split_dims(param):
        placement, n = param.placements[i], param.device_mesh.size(i)
        # _StridedShard: as if the dimensions to its right had split the axis first, into
        # split_factor pieces.
        pieces = indices[placement.dim].chunk(getattr(placement, "split_factor", 1))
        indices[placement.dim] = torch.cat([_chunk(piece, n, coordinate[i]) for piece in pieces])
    return indices if [len(x) for x in indices] == list(local(param).shape) else None


def _chunk(index: Tensor, n: int, i: int) -> Tensor:
    chunks = index.chunk(n)
    return chunks[i] if i < len(chunks) else index[:0]


def rounding_positions(param: Any) -> list[Tensor] | None:
    """Return where a low-precision shard lies in the whole tensor, so that both round alike."""
    if param.dtype not in DROPPED_BITS or not is_dtensor(param) or not split_dims(param):
        return None
    indices = local_indices(param)
    if indices is None:
        return None
    strides = [math.prod(param.shape[d + 1 :]) for d in range(param.dim())]
    return [
        (x * stride).to(local(param).device, torch.int32)
        for x, stride in zip(indices, strides, strict=True)
    ]
