"""Which weights stand under one setting: the members of each group, sorted into sets that share a target and a rate."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normcontrol.policy import is_controlled
from normcontrol.scope import Weights, join, parse_scope
from normcontrol.settings import Group, check_shared, target_kind


class Reading(NamedTuple):
    """What the controller saw and did at its last step: tensors, so that nothing waits until you read one."""

    norm: Tensor
    target: Tensor
    ratio: Tensor
    scale: Tensor


class Members(NamedTuple):
    """The controlled tensors of a group and their names."""

    names: list[str]
    params: list[Tensor]


class WeightSet:
    """Weights under one setting: those of one group, or of all groups that share the global norm."""

    def __init__(self, groups: list[Group], names: list[str], params: list[Tensor], initial: Tensor) -> None:
        self.groups = groups
        self.settings = groups[0]
        self.names = names
        self.params = params
        self.initial = initial  # the norm of every part at theta_0
        self.scope = parse_scope(self.settings["scope"])
        self.weights = Weights(params, self.scope)
        self.kind = target_kind(self.settings)
        self.reference = self._reference()
        self.last: tuple[Tensor, Tensor, Tensor] | None = None  # parts, target and scale of the last step

    def _reference(self) -> Tensor:
        """What the scheduled number is a multiple of: the initial norm, 1, or the norm of weights of rms 1."""
        initial = join(self.initial, self.scope)
        if self.kind == "ratio":
            return initial
        if self.kind == "norm":
            return torch.ones_like(initial)
        sizes = self.scope.sizes(self.params)
        counts = [math.sqrt(p.numel() / n) for p, n in zip(self.params, sizes, strict=True) for _ in range(n)]
        return join(torch.tensor(counts, dtype=initial.dtype, device=initial.device), self.scope)

    def reading(self, ratio: Tensor | float) -> Reading:
        """The last step's numbers; before the first, the initial norms and the target for ``ratio``."""
        initial = join(self.initial, self.scope)
        if self.last is None:
            return Reading(initial, ratio * self.reference, torch.ones_like(initial), torch.ones_like(initial))
        parts, target, scale = self.last
        norm = scale * join(parts, self.scope)  # no law's scale is negative, for rates within [0, 1]
        return Reading(norm, target, norm / initial, scale)

    def parts(self) -> Tensor:
        """The norm of every part now, even where the control joins them."""
        return self.initial if self.last is None else self.last[2] * self.last[0]


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
            memory = id(p) if p.is_meta else (p.device, p.data_ptr(), p.shape, p.stride())
            if memory not in seen:
                members.names.append(names[j] if names else f"group{index}.tensor{j}")
                members.params.append(p)
            seen.add(memory)
        found.append(members)
    return found


def weight_sets(groups: list[Group]) -> list[WeightSet]:
    """One set for all groups of global scope, and one for each other group. Frozen tensors are left out."""
    members = members_of(groups)
    shared = [i for i, group in enumerate(groups) if members[i].params and group["scope"] == "global"]
    alone = [[i] for i, group in enumerate(groups) if members[i].params and group["scope"] != "global"]
    if not shared and not alone:
        raise ValueError(
            "Nothing would be controlled: no tensor has two or more dimensions in a group that is not left alone. Say which are, "
            "with controlled=True in their group."
        )
    if shared:
        check_shared(groups, shared)
    sets = [_weight_set(groups, members, indices) for indices in ([shared] if shared else []) + alone]
    return [s for s in sets if s.params]


def _weight_set(groups: list[Group], members: list[Members], indices: list[int]) -> WeightSet:
    names, params, initial = [], [], []
    for index in indices:
        sizes = parse_scope(groups[index]["scope"]).sizes(members[index].params)
        for name, p, parts in zip(*members[index], groups[index]["norm0"].split(sizes), strict=True):
            if p.requires_grad:
                names.append(name)
                params.append(p)
                initial.append(parts)
    home = groups[indices[0]]["norm0"]
    whole = torch.cat([parts.to(home.device) for parts in initial]) if initial else home[:0]
    return WeightSet([groups[i] for i in indices], names, params, whole)
