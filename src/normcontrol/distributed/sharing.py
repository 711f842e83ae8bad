"""Finds out which ranks share the norms of an optimizer's weights.

The ranks come from the meshes of DTensors, or from the process group that the user gives. This file
knows nothing about scopes, targets or laws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from normcontrol.distributed.placement import (
    coordinate_of,
    process_group,
    ranks_along,
    split_dims,
)
from normcontrol.distributed.ranks import Ranks, is_dtensor, local, sum_over_ranks

NORM_GROUP_LOST = (
    "This optimizer was pickled or copied, and its norm_group is lost: a process group cannot be "
    "copied. Set opt.norm_group to the group again."
)


class Sharing:
    """The ranks that share norms: read from the meshes of DTensors, or given as ``norm_group``.

    The ranks along all the mesh dimensions that split some tensor form one group, so that one
    collective serves all tensors. If those ranks store a tensor several times, because fewer
    dimensions split it, the copy that includes the lowest rank is counted.
    """

    def __init__(self, params: Iterable[Tensor] = (), norm_group: Any = None) -> None:
        meshes: dict[Any, set[int]] = {}
        for p in params:
            if is_dtensor(p):
                mesh = p.device_mesh  # type: ignore[attr-defined]
                meshes.setdefault(mesh, set()).update(split_dims(p))
        self._meshes = {frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes}
        self.groups: list[Ranks] = []
        for mesh, dims in sorted(meshes.items(), key=lambda item: -len(ranks_along(*item))):
            ranks = ranks_along(mesh, dims)
            if len(ranks) > 1 and not any(ranks <= other.ranks for other in self.groups):
                self.groups.append(Ranks(process_group(mesh, dims, ranks), ranks))
        self.norm_group = None if norm_group is None else self._check_given(norm_group)
        self.is_shared = self.norm_group is not None or bool(self.groups)
        """Whether any norm is summed over ranks."""

    def of(self, param: Any) -> tuple[Ranks, bool]:
        """Return the ranks that sum this tensor's norms, and whether this copy is counted."""
        ranks = ranks_along(param.device_mesh, set(split_dims(param)))
        shared = next(group for group in self.groups if ranks <= group.ranks)
        return shared, min(shared.ranks) in ranks

    def counts_in_norm_group(self, param: Any) -> bool:
        """Return whether this rank's shard is counted in the norm of ``norm_group``.

        Of replicas within a mesh the first is counted. Other tensors beside DTensors are taken for
        replicas on their mesh; without DTensors every rank's tensors are its own.
        """
        if is_dtensor(param):
            split = split_dims(param)
            coordinate = coordinate_of(param.device_mesh)
            return all(i in split or c == 0 for i, c in enumerate(coordinate))
        return not self._meshes or dist.get_rank() == min(next(iter(self._meshes)))

    def all_zero(self, params: Sequence[Tensor]) -> bool:
        """Return whether there are gradients and all are zero, on every rank that shares a norm.

        It waits for the other ranks.
        """
        grads = [local(p.grad) for p in params if p.grad is not None]
        flag = bool(grads or not params) and not any(bool(g.any()) for g in grads)
        for ranks in [self.norm_group] if self.norm_group is not None else self.groups:
            flag = bool(sum_over_ranks(torch.tensor(float(not flag)), ranks) == 0)
        return flag

    def _check_given(self, norm_group: Any) -> Ranks:
        if not isinstance(norm_group, dist.ProcessGroup):
            raise TypeError(
                f"norm_group is a {type(norm_group).__name__}, but it must be a process group: "
                "give torch.distributed.group.WORLD, or that of a mesh, mesh.get_group()."
            )
        ranks = frozenset(dist.get_process_group_ranks(norm_group))
        for mesh in self._meshes:
            if len(self._meshes) > 1 or not mesh <= ranks:
                raise ValueError(
                    f"norm_group is the ranks {sorted(ranks)}, but there are DTensors on the mesh "
                    f"of ranks {sorted(mesh)}: all DTensors must lie on one mesh within "
                    "norm_group, or some would be counted twice or not at all. Give a group that "
                    "includes the mesh, with tensors that are not split along one of its "
                    "dimensions as Replicate() there."
                )
        return Ranks(norm_group, ranks)
