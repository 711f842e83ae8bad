"""Sorts the controlled tensors of all groups into sets, and measures their reference norms.

It runs at construction and when the groups change, not in every step. It knows groups, sets and
sharing, and nothing about laws, schedules or steppers.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import compress

import torch
from torch import Tensor
from torch.optim import Optimizer

from normcontrol.distributed.layouts import (
    check_partitioned,
    check_recognised,
    is_flat_shard,
    is_partitioned,
    refuse_whole_beside_shards,
)
from normcontrol.distributed.shards import shards_of, whole_norms
from normcontrol.distributed.sharing import Sharing
from normcontrol.groups.members import Members, members_of, refuse_flat_shards
from normcontrol.groups.outputs import check_outputs, is_known, outputs_of
from normcontrol.groups.sets import WeightSet
from normcontrol.groups.settings import (
    Group,
    Settings,
    check_references,
    check_sharded,
    check_shared,
    check_tensors,
    target_kind,
)
from normcontrol.groups.state import add_settings, state_of
from normcontrol.mechanisms.size import SPECTRAL, size_of
from normcontrol.scope import check_axes, parse_scope
from normcontrol.weights.passes import measure


def adopt(
    index: int, defaults: Settings, optimizer: Optimizer, sharing: Sharing, step: Tensor
) -> None:
    """Take over a new group: its settings, and the norms of its weights as the reference."""
    groups = optimizer.param_groups
    add_settings(index, groups[index], defaults, optimizer)
    members = members_of(groups[: index + 1])[index]
    state = state_of(groups[index])
    state["reference"] = reference_norms(groups[index], members, sharing)
    lr = groups[index].get("lr")  # a tensor may be changed in place
    state["first_lr"], state["step"] = lr.item() if isinstance(lr, Tensor) else lr, step


def measure_references(groups: list[Group], sharing: Sharing, are_known: bool = False) -> None:
    """Store the norms of the current weights as the reference in all groups.

    If the tensors ``are_known``, as those that were measured before, they may have another number
    of norms by new settings; other tensors may be shards.
    """
    for group, members in zip(groups, members_of(groups), strict=True):
        state_of(group)["reference"] = reference_norms(group, members, sharing, are_known)


def check_members(group: Group, members: Members) -> None:
    """Refuse tensors that have no norm yet, not the axes that scope and target need, or for which
    a mechanism is not defined."""
    axes, kind = state_of(group)["outputs"], target_kind(state_of(group))
    check_tensors(state_of(group), zip(*members, strict=True))
    for name, p in zip(members.names, members.params, strict=True):
        if p.is_meta:
            raise ValueError(
                f"{name} is on the meta device, so it has no norm yet. Materialise and initialise "
                "the model first, then construct the optimizer."
            )
        check_axes(parse_scope(state_of(group)["scope"]), name, p)
        if kind == "gain":
            outputs_of(name, p, axes)
        elif kind == "hold" and axes and p.dim() >= 2:
            check_outputs(name, p, axes)


@torch.no_grad()
def reference_norms(
    group: Group, members: Members, sharing: Sharing, are_known: bool = False
) -> Tensor:
    """Return the norm of every part of a group as it is now, to become the reference."""
    names, params = members
    control = state_of(group)
    scope, rule = parse_scope(control["scope"]), control["controlled"]
    check_partitioned(group.get("param_names"), group["params"], rule, scope, sharing)
    captured = None if rule is False or are_known else control.get("reference")
    check_recognised(names, params, scope, sharing, captured)
    check_members(group, members)
    if sharing.norm_group is not None and scope.joint:
        # The stored norm is one number, from which a frozen tensor could not be taken out later.
        params = [p for p in params if p.requires_grad]
    spectral = control["size"] in SPECTRAL and params and not sharing.is_shared
    size = size_of("spectral") if spectral else measure
    control.pop("vectors", None)  # they belong to the weights before
    return whole_norms(params, scope, sharing, size)


def weight_sets(groups: list[Group], sharing: Sharing) -> list[WeightSet]:
    """Return one set for all groups of global scope, and one for each other group.

    Frozen tensors are left out. The list is empty if no tensor is controlled now. Settings, tensors
    and references may all have changed since they were checked, so they are checked here.
    """
    members = members_of(groups)
    refuse_flat_shards(groups, members)
    for group, found in zip(groups, members, strict=True):
        check_members(group, found)
        check_ties(group, found, sharing)
        check_references(group, state_of(group).reference, *found)
    if sharing.norm_group is not None:
        check_whole_tensors(groups, members)
    controlled = [
        i for i in range(len(groups)) if members[i].params or _is_on_other_ranks(groups[i], sharing)
    ]
    shared = [i for i in controlled if state_of(groups[i])["scope"] == "global"]
    alone = [[i] for i in controlled if i not in shared]
    if shared:
        check_shared(groups, shared)
    together = ([shared] if shared else []) + alone
    members = with_unique_names(groups, members)
    sets = [_weight_set(groups, members, indices, sharing) for indices in together]
    # A rank without weights of a shared norm still takes part in the sum. That no rank has any such
    # weights can be seen from the norm alone.
    empty = all(s.is_joint_over_ranks and not bool(s.initial.any()) for s in sets)
    empty = empty and not any(is_partitioned(p) for group in groups for p in group["params"])
    for s in sets:
        refuse_zeros(s)
    if sharing.norm_group is not None and empty:
        raise ValueError(
            "norm_group was given, but nothing would be controlled: outside groups with "
            "controlled=False, no tensor has two or more dimensions. To control other tensors, set "
            "controlled=True in their group."
        )
    return [s for s in sets if s.params or s.is_joint_over_ranks]


def check_ties(group: Group, members: Members, sharing: Sharing) -> None:
    """Refuse weights that were tied or untied through ``.data``, which no step notices."""
    scope, reference = parse_scope(state_of(group)["scope"]), state_of(group).reference
    needed = sum(scope.sizes(members.params))
    one_number = sharing.norm_group is not None and scope.joint
    if needed not in (0, len(reference)) and not one_number:
        raise ValueError(
            f"A group has {len(reference)} reference norms, but {needed} norms to control now: "
            "since they were measured, tensors were given the memory of others or memory of their "
            "own, as p.data = q.data does. Tie weights before the first step, or construct the "
            "optimizer again."
        )


def refuse_zeros(s: WeightSet) -> None:
    """Refuse a ratio to a joint norm that is zero: its target is zero, which is decay."""
    if not s.params or s.shards is not None or not s.scope.joint or s.kind != "ratio":
        return
    if s.start is None and not bool(s.unit > 0) and not bool(torch.isnan(s.unit)):
        raise ValueError(
            f"{' and '.join(s.names[:2])} {'have' if len(s.names) > 1 else 'has'} an initial norm "
            f"of zero, and scope={s.scope.name!r} has no other weights, so there is no ratio to "
            "it. Give an absolute target (norm=, rms= or gain=), control the weights from a later "
            "step on (start=1), or leave them out with controlled=False."
        )


def with_unique_names(groups: list[Group], members: list[Members]) -> list[Members]:
    """Return the members; a name that several have tells their group, and the place in it if need
    be, as two models in one optimizer may have the same names."""
    known = Counter(name for names, _ in members for name in names)
    found = []
    for i, (names, params) in enumerate(members):
        here = Counter(names)
        place = {id(p): j for j, p in enumerate(groups[i]["params"])}
        unique = [
            name
            + (f", group {i}" if known[name] > 1 else "")
            + (f", tensor {place[id(p)]}" if here[name] > 1 else "")
            for name, p in zip(names, params, strict=True)
        ]
        found.append(Members(unique, params))
    return found


def check_whole_tensors(groups: list[Group], members: list[Members]) -> None:
    """Refuse whole tensors whose norm is summed over the ranks together with flat shards."""
    if not any(is_flat_shard(p) for _, params in members for p in params):
        return
    for group, (names, params) in zip(groups, members, strict=True):
        whole = [name for name, p in zip(names, params, strict=True) if not is_flat_shard(p)]
        if whole and parse_scope(state_of(group)["scope"]).joint:
            refuse_whole_beside_shards(whole[0])


def _is_on_other_ranks(group: Group, sharing: Sharing) -> bool:
    """Return whether other ranks may have weights of a group whose norm this rank shares."""
    control = state_of(group)
    may = sharing.norm_group is not None and control["controlled"] is not False
    return may and parse_scope(control["scope"]).joint


def without_zeros(outputs: list[float], references: list[Tensor]) -> list[float]:
    """Return the outputs of the tensors: 0 for those that start at zero, if others do not.

    The factor of an adapter that starts at zero must not raise the norm of the other factor.
    """
    start = [bool(norms.any()) for norms in references]
    return (
        [n if some else 0.0 for n, some in zip(outputs, start, strict=True)]
        if any(start)
        else outputs
    )


def _weight_set(
    groups: list[Group], members: list[Members], indices: list[int], sharing: Sharing
) -> WeightSet:
    names: list[str] = []
    params: list[Tensor] = []
    stored: list[Tensor] = []
    shares: list[int] = []
    columns: list[Tensor] = []
    outputs: list[float] = []
    scope = parse_scope(state_of(groups[indices[0]])["scope"])
    one_number = sharing.norm_group is not None and scope.joint
    for index in indices:
        reference = state_of(groups[index]).reference
        trained = [p.requires_grad for p in members[index].params]
        pairs = zip(*members[index], trained, strict=True)
        unfrozen = [(name, p) for name, p, is_trained in pairs if is_trained]
        axes = state_of(groups[index])["outputs"]
        outputs += [
            outputs_of(name, p, axes) if is_known(p, axes) else math.nan for name, p in unfrozen
        ]
        names += [name for name, _ in unfrozen]
        params += [p for _, p in unfrozen]
        if one_number:
            stored.append(reference)
        else:
            sizes = scope.sizes(members[index].params)
            stored += list(compress(reference.split(sizes), trained))
            every = torch.arange(len(reference), device="cpu")
            columns += compress(every.split(sizes), trained)
        shares.append(sum(trained))
    if target_kind(state_of(groups[indices[0]])) == "hold" and not one_number:
        outputs = without_zeros(outputs, stored)
    shards = shards_of(params, scope, sharing, shares)
    if shards is not None:
        check_sharded(groups[indices[0]])
    all_trained = scope.joint or len(params) == len(members[indices[0]].params)
    return WeightSet(
        [groups[i] for i in indices],
        names,
        params,
        outputs,
        stored,
        shards,
        None if all_trained or not columns else torch.cat(columns),
    )
