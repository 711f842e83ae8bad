"""Norms of weights that are spread over processes.

The square of a norm is a sum. Every rank sums the squares of its shards, counts replicas once, and
one all-reduce adds the sums of all sets. Nothing here knows targets, laws or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normcontrol.distributed.placement import local_parts, rounding_positions, split_dims
from normcontrol.distributed.ranks import Ranks, is_dtensor, local, sum_over_ranks
from normcontrol.distributed.sharing import Sharing
from normcontrol.scope import SCOPES, Scope
from normcontrol.weights.passes import measure


class Shards:
    """How one set of weights lies on this rank.

    There are two layouts of the norms of parts. *Whole*: all parts of all tensors, the same on
    every rank; this is what is stored. *Known*: the parts whose norm this rank knows after a step.
    A part that lies on one rank only (a row, where rows are sharded) is known there alone and needs
    no communication. With ``norm_group`` the ranks may have different tensors, and a part is the
    share of one parameter group: ``shares`` is the number of tensors in each.
    """

    parts: Tensor
    """The norms of the known parts, as :func:`measure_shards` last computed them."""

    def __init__(
        self, params: Sequence[Any], scope: Scope, sharing: Sharing, shares: Sequence[int]
    ) -> None:
        self.params, self.scope, self.shares = list(params), scope, list(shares)
        self.positions = [rounding_positions(p) for p in self.params]
        self.norm_group = sharing.norm_group if scope.joint else None
        self.device = local(self.params[0]).device if self.params else torch.device("cpu")
        # Of each local part: its place among the known. Of each known part: its place in the whole.
        slots: list[Tensor] = []
        known_in_whole: list[Tensor] = []
        counted: list[Tensor] = []
        sums: dict[Ranks, list[Tensor]] = {}
        gathers: dict[Ranks, list[tuple[Tensor, bool]]] = {}
        n_known = n_whole = 0
        for p in self.params:
            size, here = local_parts(p, scope)
            part_axes = {a % p.dim() for a in scope.axes or ()}
            split = {p.placements[i].dim for i in split_dims(p)} if is_dtensor(p) else set()
            counts = True
            known = torch.arange(size)
            if self.norm_group is not None:
                counts = sharing.counts_in_norm_group(p)
            elif split - part_axes:
                ranks, counts = sharing.of(p)
                sums.setdefault(ranks, []).append(n_known + known)
            elif split:
                ranks, owned = sharing.of(p)
                gathers.setdefault(ranks, []).append((n_whole + known, owned))
                known = here
            slots.append(n_known + (here if len(known) == size else torch.arange(len(here))))
            known_in_whole.append(n_whole + known)
            counted.append(torch.full((len(here),), float(counts)))
            n_known, n_whole = n_known + len(known), n_whole + size
        self.n_known, self.n_whole = n_known, n_whole
        self._slots = self._index(slots, n_known)
        self._known_in_whole = self._index(known_in_whole, n_whole)
        factors = torch.cat(counted) if counted else torch.zeros(0)
        self._counted = None if bool(factors.all()) else factors.to(self.device, torch.float64)
        self.sums = {ranks: self._index(places, n_known) for ranks, places in sums.items()}
        self._gathers = {
            ranks: (
                torch.cat([places for places, _ in found]).to(self.device),
                torch.cat([torch.full((len(p),), owned) for p, owned in found]).to(self.device),
            )
            for ranks, found in gathers.items()
        }
        if self.norm_group is not None:
            self.sums = {self.norm_group: None}

    def _index(self, places: list[Tensor], size: int) -> Tensor | None:
        """Return the places on the device, or None if they are 0, 1, 2, ... up to ``size``."""
        index = torch.cat(places) if places else torch.arange(0)
        identical = len(index) == size and bool((index == torch.arange(size)).all())
        return None if identical else index.to(self.device)

    def squares(self, norms: Tensor) -> Tensor:
        """Return this rank's contribution to the squares of the known parts.

        ``norms`` are the norms of this rank's shards, part by part.
        """
        if torch.is_grad_enabled():
            raise ValueError(
                "differentiable=True does not work through the sum over ranks: use it on one "
                "process, with plain tensors."
            )
        squares = norms.square()
        if self._counted is not None:
            squares = squares * self._counted
        if self.norm_group is not None:
            return torch.stack([share.sum() for share in squares.split(self.shares)])
        if self._slots is None:
            return squares
        return squares.new_zeros(self.n_known).index_copy_(0, self._slots, squares)

    def local_scale(self, scale: Tensor) -> Tensor:
        """Return the factors of this rank's shards, from those of the known parts."""
        if self.scope.joint or self._slots is None:
            return scale
        return scale.index_select(0, self._slots)

    def known(self, whole: Tensor) -> Tensor:
        """Return the values of the known parts, from a value for every part."""
        if self._known_in_whole is None or self.norm_group is not None:
            return whole
        return whole.index_select(-1, self._known_in_whole.to(whole.device))

    def whole(self, known: Tensor) -> Tensor:
        """Return a value for every part, the same on all ranks.

        It communicates if this rank does not know all parts.
        """
        if not self._gathers:
            return known
        places = self._known_in_whole
        if places is None:
            places = torch.arange(self.n_known, device=known.device)
        whole = known.new_zeros(*known.shape[:-1], self.n_whole).index_copy_(-1, places, known)
        for ranks, (places, owned) in self._gathers.items():
            mine = torch.where(owned, whole.index_select(-1, places), 0.0)
            whole.index_copy_(-1, places, sum_over_ranks(mine, ranks))
        return whole

    @property
    def is_gathered(self) -> bool:
        """Whether :meth:`whole` communicates: some parts are known to other ranks only."""
        return bool(self._gathers)

    def unit_norms(self, amounts: Sequence[float]) -> Tensor:
        """Return the roots of what the whole tensors have, for the shares of ``norm_group``.

        A rank has of the amount of a tensor the part that it has of its elements.
        """
        assert self.norm_group is not None
        pairs = zip(amounts, self.params, strict=True)
        counts = [amount * local(p).numel() / max(p.numel(), 1) for amount, p in pairs]
        elements = torch.tensor(counts, dtype=torch.float64, device=self.device)
        if self._counted is not None:
            elements = elements * self._counted
        shares = torch.stack([share.sum() for share in elements.split(self.shares)])
        return sum_over_ranks(shares, self.norm_group).sqrt()


def shards_of(
    params: Sequence[Tensor], scope: Scope, sharing: Sharing, shares: Sequence[int]
) -> Shards | None:
    """Return how the weights lie on this rank, or None if they are whole."""
    given = sharing.norm_group is not None and scope.joint
    if given or any(map(is_dtensor, params)):
        return Shards(params, scope, sharing, shares)
    return None


def measure_shards(several: Sequence[Shards], norms: Sequence[Tensor]) -> None:
    """Set ``parts`` of several sets, with one collective for all of them.

    ``norms`` are, for every set, the norms of this rank's shards.
    """
    users: dict[Ranks, list[tuple[Shards, Tensor | None]]] = {}
    for s, local_norms in zip(several, norms, strict=True):
        s.parts = s.squares(local_norms)
        for ranks, places in s.sums.items():
            users.setdefault(ranks, []).append((s, places))
    for ranks, using in users.items():
        sent = [s.parts if index is None else s.parts.index_select(0, index) for s, index in using]
        total = sum_over_ranks(torch.cat([x.to(sent[0].device) for x in sent]), ranks)
        pieces = total.split([len(x) for x in sent])
        for (s, index), piece in zip(using, pieces, strict=True):
            piece = piece.to(s.device)
            s.parts = piece if index is None else s.parts.index_copy(0, index, piece)
    for s in several:
        s.parts = s.parts.sqrt()


def whole_norms(
    params: Sequence[Tensor],
    scope: Scope,
    sharing: Sharing,
    size: Callable[[Sequence[Tensor], Scope], Tensor] = measure,
) -> Tensor:
    """Return the norm of every part of every tensor, the same on all ranks.

    With ``norm_group`` it is one norm, of all of them. ``size`` replaces the norm where the
    weights are not sharded.
    """
    shards = shards_of(params, scope, sharing, [len(params)])
    if shards is None:
        return size(params, scope)
    measure_shards([shards], [measure([local(p) for p in params], scope)])
    return shards.whole(shards.parts)


class GradientNorm:
    """The joint norm of the gradients of parameters.

    How the parameters are sharded is found once, and again when others have gradients.
    """

    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing
        self._known: list[int] | None = None
        self._shards: Shards | None = None

    def __call__(self, params: list[Any]) -> Tensor:
        """Return the norm of the gradients of these parameters, over all ranks."""
        scope = SCOPES["global"]
        if self._known != (ids := [id(p) for p in params]):
            self._known = ids
            self._shards = shards_of(params, scope, self.sharing, [len(params)])
        grads = [p.grad for p in params]
        if self._shards is None:
            return scope.join(measure(grads, scope))
        # The gradient of a replicated parameter may be a sum over ranks that was not made yet.
        whole = [
            g.redistribute(p.device_mesh, p.placements)
            if is_dtensor(g) and g.placements != p.placements
            else g
            for p, g in zip(params, grads, strict=True)
        ]
        measure_shards([self._shards], [measure([local(g) for g in whole], scope)])
        return scope.join(self._shards.parts)
