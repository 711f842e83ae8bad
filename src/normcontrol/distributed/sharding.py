"""Weights spread over processes: what this rank holds of each tensor, and how the norms of pieces
become true norms.

A norm is a global quantity, and its square is a sum: every rank sums the squares it holds, replicas
counting once, and one all-reduce adds up all the norms of a step. Nothing here knows of targets,
laws or optimizers; nothing elsewhere knows of meshes and placements.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from normcontrol.scope import SCOPES, Scope, Weights, join, measure
from normcontrol.steppers.rounding import DROPPED_BITS


class Ranks(NamedTuple):
    """Ranks that share norms, and the process group in which they add them up."""

    group: Any
    ranks: frozenset[int]


def is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get(
        "torch.distributed.tensor"
    )  # importing it is slow; where nobody has, nothing is a DTensor
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def held(tensors: Sequence[Any]) -> Sequence[Tensor]:
    """What this rank holds of several tensors: the very tensors, whose memory and versions can be
    looked at."""
    module = sys.modules.get(
        "torch.distributed.tensor"
    )  # looked up once for all of them: this is called at every step
    return (
        tensors
        if module is None
        else [t._local_tensor if isinstance(t, module.DTensor) else t for t in tensors]
    )


def is_mixed(params: Iterable[Any]) -> bool:
    """Whether DTensors stand beside plain tensors, or beside DTensors on another mesh."""
    return len({p.device_mesh if is_dtensor(p) else None for p in params}) > 1


class Spread:
    """Which ranks share the norms of an optimizer's weights: seen from the meshes of its DTensors,
    or told by the user.

    The ranks along all the mesh dimensions that split some tensor form one group, so that one
    collective serves them all. A tensor that those ranks hold several times over, because fewer
    dimensions split it, is counted by the copy that includes the lowest rank.
    """

    def __init__(self, params: Iterable[Tensor], norm_group: Any = None) -> None:
        meshes: dict[Any, set[int]] = {}
        for p in params:
            if is_dtensor(p):
                meshes.setdefault(p.device_mesh, set()).update(_split_by(p))  # type: ignore[attr-defined]
        self._told_meshes = {frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes}
        self.together: list[Ranks] = []
        for mesh, dims in sorted(meshes.items(), key=lambda item: -len(_ranks(*item))):
            ranks = _ranks(mesh, dims)
            if len(ranks) > 1 and not any(ranks <= other.ranks for other in self.together):
                self.together.append(Ranks(_process_group(mesh, dims, ranks), ranks))
        self.told = None if norm_group is None else self._check_told(norm_group)

    @property
    def is_shared(self) -> bool:
        """Whether there are other ranks to add anything up with."""
        return self.told is not None or bool(self.together)

    def of(self, param: Any) -> tuple[Ranks, bool]:
        """The ranks that add up this tensor's norms, and whether the copy this rank has a piece of
        is the one to count."""
        ranks = _ranks(param.device_mesh, set(_split_by(param)))
        shared = next(t for t in self.together if ranks <= t.ranks)
        return shared, min(shared.ranks) in ranks

    def counts_when_told(self, param: Any) -> bool:
        """Whether this rank's piece counts in the norm of ``norm_group``: of a replica within a
        mesh, the first does.

        Plain tensors beside DTensors are taken for replicas on their mesh; where all are plain,
        each rank's are its own.
        """
        if is_dtensor(param):
            split = _split_by(param)
            return all(i in split or c == 0 for i, c in enumerate(_coordinate(param.device_mesh)))
        return not self._told_meshes or dist.get_rank() == min(next(iter(self._told_meshes)))

    def _check_told(self, norm_group: Any) -> Ranks:
        ranks = frozenset(dist.get_process_group_ranks(norm_group))
        for mesh in self._told_meshes:
            if len(self._told_meshes) > 1 or not mesh <= ranks:
                raise ValueError(
                    f"norm_group is the ranks {sorted(ranks)}, but there are DTensors on the mesh "
                    f"of ranks {sorted(mesh)}: all DTensors "
                    "must lie on one mesh within norm_group, or some would be counted twice or not "
                    "at all. Give a group that includes "
                    "the mesh, with tensors that are not split along one of its dimensions as "
                    "Replicate() there."
                )
        return Ranks(norm_group, ranks)


class Shards(Weights):
    """How one set of weights lies on this rank.

    Norms come in two layouts. *Whole* has every part of every tensor and is the same on all ranks:
    it is what is stored. *Held* has the parts whose norm this rank knows after a step: those of a
    tensor whose parts all lie on one rank each (rows, where rows are sharded) never leave that
    rank, and need no communication. Under ``norm_group`` ranks need not hold the same tensors, and
    a part is the share of one parameter group: ``shares`` says how many tensors each has.
    """

    parts: Tensor  # as measure_together last found them

    def __init__(
        self, params: Sequence[Tensor], scope: Scope, spread: Spread, shares: Sequence[int]
    ) -> None:
        super().__init__(list(params), scope)
        self._places = [_places_to_round(p) for p in self.params]
        self.unfuse()
        self.told = spread.told if scope.joint else None
        self.device = local(self.params[0]).device if self.params else torch.device("cpu")
        slots, held, counted = (
            [],
            [],
            [],
        )  # of each local part: its place among the held; of each held: its place in the whole
        sums: dict[Ranks, list[Tensor]] = {}
        gathers: dict[Ranks, list[tuple[Tensor, bool]]] = {}
        n_held = n_whole = 0
        for p in self.params:
            size, here = _parts_here(p, scope)
            kept = {a % p.dim() for a in scope.axes or ()}
            split = {p.placements[i].dim for i in _split_by(p)} if is_dtensor(p) else set()  # type: ignore[attr-defined]
            counts = True
            known = torch.arange(size)
            if self.told is not None:
                counts = spread.counts_when_told(p)
            elif split - kept:
                ranks, counts = spread.of(p)
                sums.setdefault(ranks, []).append(n_held + known)
            elif split:
                ranks, owned = spread.of(p)
                gathers.setdefault(ranks, []).append((n_whole + known, owned))
                known = here
            slots.append(n_held + (here if len(known) == size else torch.arange(len(here))))
            held.append(n_whole + known)
            counted.append(torch.full((len(here),), float(counts)))
            n_held, n_whole = n_held + len(known), n_whole + size
        self.n_held, self.n_whole = n_held, n_whole
        self.shares = list(shares)
        self._slots = self._index(slots, n_held)
        self._held = self._index(held, n_whole)
        factors = torch.cat(counted) if counted else torch.zeros(0)
        self._counted = None if bool(factors.all()) else factors.to(self.device, torch.float64)
        self.sums = {ranks: self._index(places, n_held) for ranks, places in sums.items()}
        self._gathers = {
            ranks: (
                torch.cat([places for places, _ in found]).to(self.device),
                torch.cat([torch.full((len(places),), owned) for places, owned in found]).to(
                    self.device
                ),
            )
            for ranks, found in gathers.items()
        }
        if self.told is not None:
            self.sums = {self.told: None}

    def _index(self, places: list[Tensor], size: int) -> Tensor | None:
        """The places on the device, or None where they are 0, 1, 2, ... up to ``size`` and nothing
        need be moved."""
        index = torch.cat(places) if places else torch.arange(0)
        return (
            None
            if len(index) == size and bool((index == torch.arange(size)).all())
            else index.to(self.device)
        )

    def unfuse(self) -> None:
        """Let this rank's pieces be measured and multiplied in passes of their own."""
        self.pieces = Weights([local(p) for p in self.params], self.scope)
        self.pieces.places = self._places

    def squares(self) -> Tensor:
        """The sums of squares of the held parts, as far as this rank's pieces go."""
        if torch.is_grad_enabled():
            raise ValueError(
                "differentiable=True cannot see through the sum over ranks: use it on one process, "
                "with plain tensors."
            )
        self.pieces.params = [local(p) for p in self.params]
        squares = self.pieces.measure().square()
        if self._counted is not None:
            squares = squares * self._counted
        if self.told is not None:
            return torch.stack([share.sum() for share in squares.split(self.shares)])
        return (
            squares
            if self._slots is None
            else squares.new_zeros(self.n_held).index_copy_(0, self._slots, squares)
        )

    def measure(self) -> Tensor:
        """The norms of the held parts, as they were last measured together with those of other
        sets."""
        return self.parts

    def apply_(self, scale: Tensor, step: Tensor) -> None:
        """Multiply this rank's pieces by the factors of the held parts."""
        if not self.scope.joint and self._slots is not None:
            scale = scale.index_select(0, self._slots)
        if self.params:
            self.pieces.apply_(scale, step)

    def held(self, whole: Tensor) -> Tensor:
        """Out of a number for every part, those of the held parts."""
        return (
            whole
            if self._held is None or self.told is not None
            else whole.index_select(-1, self._held.to(whole.device))
        )

    def whole(self, held: Tensor) -> Tensor:
        """The reverse: a number for every part, the same on all ranks. It communicates where this
        rank does not know all."""
        if not self._gathers:
            return held
        places = torch.arange(self.n_held, device=held.device) if self._held is None else self._held
        whole = held.new_zeros(*held.shape[:-1], self.n_whole).index_copy_(-1, places, held)
        for ranks, (places, owned) in self._gathers.items():
            mine = torch.where(owned, whole.index_select(-1, places), 0.0)
            whole.index_copy_(-1, places, add_up(mine, ranks))
        return whole

    def unit_norms(self) -> Tensor:
        """The norms that weights of root-mean-square 1 would have, for the shares of a told
        group."""
        assert self.told is not None
        elements = torch.tensor(
            [float(local(p).numel()) for p in self.params], dtype=torch.float64, device=self.device
        )
        if self._counted is not None:
            elements = elements * self._counted
        return add_up(
            torch.stack([share.sum() for share in elements.split(self.shares)]), self.told
        ).sqrt()


def shards_of(
    params: Sequence[Tensor], scope: Scope, spread: Spread, shares: Sequence[int]
) -> Shards | None:
    """How the weights lie on this rank, or None where they are whole and its own."""
    told = spread.told is not None and scope.joint
    return Shards(params, scope, spread, shares) if told or any(map(is_dtensor, params)) else None


def measure_together(several: Iterable[Shards | None]) -> None:
    """Measure several sets, with one collective for all of them: ``parts`` then holds the true
    norms of each."""
    users: dict[Ranks, list[tuple[Shards, Tensor | None]]] = {}
    sets = [s for s in several if s is not None]
    for s in sets:
        s.parts = s.squares()
        for ranks, places in s.sums.items():
            users.setdefault(ranks, []).append((s, places))
    for ranks, using in users.items():
        sent = [
            s.parts if places is None else s.parts.index_select(0, places) for s, places in using
        ]
        total = add_up(torch.cat([x.to(sent[0].device) for x in sent]), ranks)
        for (s, places), part in zip(using, total.split([len(x) for x in sent]), strict=True):
            s.parts = (
                part.to(s.device)
                if places is None
                else s.parts.index_copy(0, places, part.to(s.device))
            )
    for s in sets:
        s.parts = s.parts.sqrt()


def whole_norms(params: Sequence[Tensor], scope: Scope, spread: Spread) -> Tensor:
    """The norm of every part of every tensor, the same on all ranks; with a told group, the norm of
    all of them."""
    shards = shards_of(params, scope, spread, [len(params)])
    if shards is None:
        return measure(params, scope)
    measure_together([shards])
    return shards.whole(shards.parts)


class Gradients:
    """The joint norm of the gradients of parameters; how they lie is found out once, for as long as
    the same ones have any."""

    def __init__(self, spread: Spread) -> None:
        self.spread = spread
        self._known: list[int] | None = None
        self._shards: Shards | None = None

    def norm(self, params: list[Any]) -> Tensor:
        scope = SCOPES["global"]
        if self._known != (ids := [id(p) for p in params]):
            self._known, self._shards = ids, shards_of(params, scope, self.spread, [len(params)])
        grads = [p.grad for p in params]
        if self._shards is None:
            return join(measure(grads, scope), scope)
        # The gradient of a replicated parameter may still be a sum to be made over the ranks.
        whole = [
            g.redistribute(p.device_mesh, p.placements)
            if is_dtensor(g) and g.placements != p.placements
            else g
            for p, g in zip(params, grads, strict=True)
        ]
        self._shards.params = whole
        measure_together([self._shards])
        return join(self._shards.parts, scope)


def add_up(values: Tensor, ranks: Ranks) -> Tensor:
    """The sums over the ranks; ``values`` is used up. On an accelerator nothing waits for them."""
    devices = [device.type for device in ranks.group._device_types]
    sent = (
        values if values.device.type in devices else values.to(devices[0])
    )  # CPU-offloaded weights under NCCL
    try:
        dist.all_reduce(sent, group=ranks.group)
    except RuntimeError as error:
        raise RuntimeError(
            f"The norms could not be added up over the ranks {sorted(ranks.ranks)}: one of them "
            "has died, hangs, or did not come to this "
            "step. Look at the first rank that failed, and resume from the last checkpoint, on "
            "fewer ranks if need be."
        ) from error
    return sent.to(values.device)


def all_agree(flag: bool, spread: Spread) -> bool:
    """Whether the flag is set on every rank that shares a norm with this one. It waits for them."""
    for ranks in [spread.told] if spread.told is not None else spread.together:
        flag = bool(add_up(torch.tensor(float(not flag)), ranks) == 0)
    return flag


def _split_by(param: Any) -> list[int]:
    """The mesh dimensions that split a DTensor."""
    placements = param.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"A parameter of shape {tuple(param.shape)} is a DTensor with placements {placements}: "
            "its values are sums still to be made, "
            "and have no norm. Redistribute it to Shard or Replicate placements."
        )
    # FSDP2 with tensor parallelism splits by _StridedShard, which is no Shard, but has a dim like
    # one.
    return [
        i
        for i, placement in enumerate(placements)
        if hasattr(placement, "dim") and param.device_mesh.size(i) > 1
    ]


def _coordinate(mesh: Any) -> Sequence[int]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(
            f"Rank {dist.get_rank()} has an optimizer for DTensors on {mesh}, of which it is no "
            "part, so it would never learn their norms. "
            "Construct the optimizer only on the ranks of the mesh."
        )
    return coordinate


def _ranks(mesh: Any, dims: set[int]) -> frozenset[int]:
    """The ranks that differ from this one along the given mesh dimensions only."""
    index = tuple(slice(None) if i in dims else c for i, c in enumerate(_coordinate(mesh)))
    return frozenset(mesh.mesh[index].flatten().tolist())


_made: dict[frozenset[int], tuple[Any, Any]] = {}


def _process_group(mesh: Any, dims: set[int], ranks: frozenset[int]) -> Any:
    """A process group of exactly these ranks: the mesh's own, everybody's, or one made once and
    kept."""
    if len(dims) == 1:
        return mesh.get_group(next(iter(dims)))
    world = dist.group.WORLD
    if len(ranks) == dist.get_world_size():
        return world
    if ranks not in _made or _made[ranks][0] is not world:
        _made[ranks] = world, dist.new_group(sorted(ranks), use_local_synchronization=True)
    return _made[ranks][1]


def _parts_here(param: Tensor, scope: Scope) -> tuple[int, Tensor]:
    """How many parts a tensor has, and which of them this rank holds a piece of."""
    if scope.axes is None:
        return 1, torch.arange(1)
    kept = sorted({a % param.dim() for a in scope.axes})
    grid = torch.arange(math.prod([param.shape[d] for d in kept])).view(
        [param.shape[d] for d in kept]
    )
    size = grid.numel()
    if is_dtensor(param) and _split_by(param):
        places = _places(param)
        if places is None:
            raise ValueError(
                f"A DTensor of shape {tuple(param.shape)} with placements {param.placements} has a "
                "piece of shape "  # type: ignore[attr-defined]
                f"{tuple(local(param).shape)} on rank {dist.get_rank()}, which is not how "
                "torch.chunk splits it, so nobody can tell which "
                f"parts they are that scope={scope.name!r} wants the norms of. Distribute it with "
                "distribute_tensor, or use another scope."
            )
        for axis, d in enumerate(kept):
            grid = grid.index_select(axis, places[d])
    return size, grid.flatten()


def _places(param: Any) -> list[Tensor] | None:
    """For each axis of a DTensor, which of its indices lie on this rank; None if the piece is not
    of that shape."""
    places = [torch.arange(n) for n in param.shape]
    coordinate = _coordinate(param.device_mesh)
    for i in _split_by(param):
        placement, n = param.placements[i], param.device_mesh.size(i)
        # _StridedShard: as if the dimensions to its right had split the axis first, into
        # split_factor pieces.
        pieces = places[placement.dim].chunk(getattr(placement, "split_factor", 1))
        places[placement.dim] = torch.cat([_chunk(piece, n, coordinate[i]) for piece in pieces])
    return places if [len(x) for x in places] == list(local(param).shape) else None


def _chunk(index: Tensor, n: int, i: int) -> Tensor:
    chunks = index.chunk(n)
    return chunks[i] if i < len(chunks) else index[:0]


def _places_to_round(param: Any) -> list[Tensor] | None:
    """Where each index of a low-precision piece lies in the whole tensor, so that it rounds as the
    whole tensor would."""
    if param.dtype not in DROPPED_BITS or not is_dtensor(param) or not _split_by(param):
        return None
    places = _places(param)
    if places is None:
        return None
    strides = [math.prod(param.shape[d + 1 :]) for d in range(param.dim())]
    return [
        (x * stride).to(local(param).device, torch.int32)
        for x, stride in zip(places, strides, strict=True)
    ]
