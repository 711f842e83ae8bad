"""Which weights stand under one setting: the members of each group, sorted into sets that share a
target and a rate."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normcontrol.distributed.sharding import Shards, Spread, is_dtensor, shards_of
from normcontrol.groups.clock import Clock
from normcontrol.groups.members import is_controlled
from normcontrol.groups.settings import PLAIN, Group, check_sharded, check_shared, target_kind
from normcontrol.law import Integral, Law, law_of
from normcontrol.mechanisms.size import size_of
from normcontrol.mechanisms.start import ROWS, AtInflection, AtStep
from normcontrol.mechanisms.update import CautiousWeights
from normcontrol.schedule import Schedule, custom, lr_times, trace
from normcontrol.scope import Weights, join, parse_scope


class Reading(NamedTuple):
    """What the controller saw and did at its last step: tensors, so that nothing waits until you
    read one."""

    norm: Tensor
    target: Tensor
    ratio: Tensor
    scale: Tensor

    def decay(self, lr: Tensor | float) -> Tensor:
        """The effective weight decay of the last step, ``(1 - scale) / lr``: AdamW with this decay
        would have scaled by as much. ``lr`` is the learning rate of that step. It is negative while
        the norm is lengthened."""
        return (1 - self.scale) / lr


class Members(NamedTuple):
    """The controlled tensors of a group and their names."""

    names: list[str]
    params: list[Tensor]


class WeightSet:
    """Weights under one setting: those of one group, or of all groups that share the global
    norm."""

    def __init__(
        self,
        groups: list[Group],
        names: list[str],
        params: list[Tensor],
        initial: list[Tensor],
        home: Tensor,
        shards: Shards | None = None,
    ) -> None:
        self.groups = groups
        self.settings = groups[0]
        self.names = names
        self.params = params
        self.shards = shards  # None: the weights are whole, and this process's own
        self._stored = initial  # where the groups keep what follows
        whole = torch.cat([parts.to(home.device) for parts in initial]) if initial else home[:0]
        self.initial = (
            whole if shards is None else shards.held(whole)
        )  # the norm of every part at theta_0
        self.scope = parse_scope(self.settings["scope"])
        self.weights: Weights = shards or self.own_weights()
        self.kind = target_kind(self.settings)
        self.reference = self._reference()
        self.law, self.start = self._law(), self._start()
        self.before: list[
            Tensor
        ] = []  # the weights before the optimizer's step, where a method needs them
        self.last: tuple[Tensor, Tensor, Tensor] | None = (
            None  # parts, target and scale of the last step
        )

    def own_weights(self) -> Weights:
        """The weights, measured and multiplied in passes of their own."""
        kind = CautiousWeights if self.settings["cautious"] else Weights
        return kind(self.params, self.scope, size_of(self.settings["size"]))

    @property
    def is_plain(self) -> bool:
        """Whether all there is to it is measuring norms and multiplying weights."""
        return all(self.settings[name] == value for name, value in PLAIN.items() if name != "start")

    def _law(self) -> Law:
        law = law_of(self.settings["law"])
        return law or Integral(
            self._memory()[0].reshape(self.reference.shape), self._unit_norms().square()
        )

    def _start(self) -> AtStep | AtInflection | None:
        start = self.settings["start"]
        return (
            AtInflection(self._memory()[1:])
            if start == "inflection"
            else AtStep(start)
            if start
            else None
        )

    def _memory(self) -> Tensor:
        """What laws and starts remember of every norm, in the group and so in checkpoints."""
        shape = (1 + ROWS, self.reference.numel())
        memory = self.settings.get("memory")
        if memory is None or memory.shape != shape:
            memory = self.reference.new_zeros(shape)
        self.settings["memory"] = memory.to(self.reference.device)
        return self.settings["memory"]

    def take_reference(self, parts: Tensor, now: Tensor) -> None:
        """Let the norms of this step be the reference where it is time, here and in the groups."""
        self.initial.copy_(torch.where(now, parts, self.initial))
        self.reference.copy_(join(self.initial, self.scope))
        for stored, taken in zip(
            self._stored, self.initial.split([len(s) for s in self._stored]), strict=True
        ):
            stored.copy_(taken)

    def _reference(self) -> Tensor:
        """What the scheduled number is a multiple of: the initial norm, 1, or the norm of weights
        of rms 1."""
        initial = join(self.initial, self.scope)
        if self.kind == "ratio":
            return initial
        return torch.ones_like(initial) if self.kind == "norm" else self._unit_norms()

    def _unit_norms(self) -> Tensor:
        """The norms of weights of rms 1: the roots of how many there are."""
        if self.shards is not None and self.shards.told:
            return join(self.shards.unit_norms(), self.scope)
        sizes = self.scope.sizes(self.params)
        counts = [
            math.sqrt(p.numel() / n)
            for p, n in zip(self.params, sizes, strict=True)
            for _ in range(n)
        ]
        units = torch.tensor(counts, dtype=self.initial.dtype, device=self.initial.device)
        return join(units if self.shards is None else self.shards.held(units), self.scope)

    def value(
        self, name: str, low: float, high: float, clock: Clock, step: Tensor
    ) -> Tensor | float:
        """A setting's value at this step, refused where it can be seen, without waiting for a
        device, to be wrong."""
        schedule = self.settings[name]
        if callable(schedule) and not isinstance(schedule, Schedule):  # put into the group by hand
            schedule = self.settings[name] = custom(schedule)
        if isinstance(schedule, lr_times) and any(
            g["lr"] is not self.settings["lr"] and g["lr"] != self.settings["lr"]
            for g in self.groups
        ):
            raise ValueError(
                f"rate={schedule!r} follows the learning rate, but the groups that share the "
                "global norm have different ones: "
                f"{[float(g['lr']) for g in self.groups]}. Use scope='group', so that each group "
                "has a norm and a rate of its own."
            )
        value = (
            schedule.at(clock.now(step, self.initial.dtype), self.settings)
            if isinstance(schedule, Schedule)
            else schedule
        )
        if not clock.knows:
            return value
        if isinstance(schedule, trace):
            schedule.note_end(clock.calls)
        if isinstance(value, Tensor):
            if not value.is_cpu:  # a learning rate that lives on the device
                return value
            value = value.item()
        if not low <= value <= high:
            raise ValueError(
                f"{name}={schedule!r} is {value:g} at step {clock.calls}: it must stay within "
                f"[{low:g}, {high:g}]. "
                "Mend the schedule; the weights were not scaled at this step."
            )
        return value

    def reading(self, ratio: Tensor | float) -> Reading:
        """The last step's numbers; before the first, the initial norms and the target for
        ``ratio``."""
        initial = join(self.initial, self.scope)
        if self.last is None:
            return Reading(
                initial, ratio * self.reference, torch.ones_like(initial), torch.ones_like(initial)
            )
        parts, target, scale = self.last
        norm = scale * join(
            parts, self.scope
        )  # no law's scale is negative, for rates within [0, 1]
        return Reading(norm, target, norm / initial, scale)

    def parts(self) -> Tensor:
        """The norm of every part now, even where the control joins them."""
        return self.initial if self.last is None else self.last[2] * self.last[0]

    def whole(self, values: Tensor) -> Tensor:
        """Numbers for the parts whose norms this process knows, made into numbers for all the parts
        there are."""
        return values if self.shards is None else self.shards.whole(values)


def members_of(groups: list[Group]) -> list[Members]:
    """The tensors of each group that are controlled, each once even if it is tied to another."""
    seen: set[Any] = set()
    found = []
    for index, group in enumerate(groups):
        members = Members([], [])
        names = group.get("param_names")
        for j, p in enumerate(group["params"]):
            if not is_controlled(group, p):
                continue
            # A DTensor has no memory of its own to know it by, and its piece here may be empty.
            memory = (
                id(p)
                if p.is_meta or is_dtensor(p)
                else (p.device, p.data_ptr(), p.shape, p.stride())
            )
            if memory not in seen:
                members.names.append(names[j] if names else f"group{index}.tensor{j}")
                members.params.append(p)
            seen.add(memory)
        found.append(members)
    return found


def weight_sets(groups: list[Group], spread: Spread) -> list[WeightSet]:
    """One set for all groups of global scope, and one for each other group. Frozen tensors are left
    out."""
    members = members_of(groups)
    controlled = [
        i for i in range(len(groups)) if members[i].params or _is_elsewhere(groups[i], spread)
    ]
    shared = [i for i in controlled if groups[i]["scope"] == "global"]
    alone = [[i] for i in controlled if groups[i]["scope"] != "global"]
    if shared:
        check_shared(groups, shared)
    sets = [
        _weight_set(groups, members, indices, spread)
        for indices in ([shared] if shared else []) + alone
    ]
    # A rank that holds nothing of a shared norm is still asked for it; that nobody holds anything
    # shows in the norm alone.
    if not controlled or all(_is_told(s) and not bool(s.initial.any()) for s in sets):
        raise ValueError(
            "Nothing would be controlled: no tensor has two or more dimensions in a group that is "
            "not left alone. Say which are, "
            "with controlled=True in their group."
        )
    return [s for s in sets if s.params or _is_told(s)]


def _is_told(s: WeightSet) -> bool:
    return s.shards is not None and s.shards.told is not None


def _is_elsewhere(group: Group, spread: Spread) -> bool:
    """Whether other ranks may hold weights of a group whose norm this rank shares, even if this one
    holds none."""
    return (
        spread.told is not None
        and group["controlled"] is not False
        and parse_scope(group["scope"]).joint
    )


def _weight_set(
    groups: list[Group], members: list[Members], indices: list[int], spread: Spread
) -> WeightSet:
    names, params, initial, shares = [], [], [], []
    scope = parse_scope(groups[indices[0]]["scope"])
    told = spread.told is not None and scope.joint
    for index in indices:
        norm0 = groups[index]["norm0"]
        trained = [p.requires_grad for p in members[index].params]
        names += [name for name, kept in zip(members[index].names, trained, strict=True) if kept]
        params += [p for p, kept in zip(members[index].params, trained, strict=True) if kept]
        pieces = (
            []
            if told
            else zip(norm0.split(scope.sizes(members[index].params)), trained, strict=True)
        )
        initial += [norm0] if told else [parts for parts, kept in pieces if kept]
        shares.append(sum(trained))
    shards = shards_of(params, scope, spread, shares)
    if shards is not None:
        check_sharded(groups[indices[0]])
    return WeightSet(
        [groups[i] for i in indices], names, params, initial, groups[indices[0]]["norm0"], shards
    )
