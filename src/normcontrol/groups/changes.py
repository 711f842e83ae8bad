"""What was changed in the groups by hand: their settings and their tensors.

Settings that were edited since they were last checked are checked, before the first step as later.

Code that grows or prunes a model writes new tensors into ``group["params"]``. This file notes which
tensors the reference norms belong to, and carries the norms over. The rule: a tensor that stays
keeps its reference. A tensor in the place of another one takes over the ratio that the other one
had reached. The reference of any other new tensor is its norm now.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from normcontrol.distributed.shards import whole_norms
from normcontrol.distributed.sharing import Sharing
from normcontrol.groups.build import measure_references, reference_norms
from normcontrol.groups.members import CONTROL, Members, members_of
from normcontrol.groups.moments import check_moments
from normcontrol.groups.sets import WeightSet
from normcontrol.groups.settings import (
    FIXED,
    STATE_NAMES,
    Group,
    Settings,
    check_group,
    entry_of,
    normalise,
)
from normcontrol.groups.state import (
    ControlState,
    change_settings,
    restored,
    settings_of,
    state_of,
)
from normcontrol.mechanisms.start import EVERY_STEP
from normcontrol.scope import parse_scope


class Layout(NamedTuple):
    """The tensors of all groups when the sets were built."""

    params: list[Tensor]
    looks: list[Any]
    """Where each group ends in ``params``; then the shape of every tensor, None if it is frozen;
    then the dtypes."""
    dicts: list[Any]
    """All groups, each followed by the controller's entry in it."""
    groups: list[GroupLayout]


class GroupLayout(NamedTuple):
    """The tensors of one group when the sets were built."""

    control: Any
    """The controller's entry of the group."""
    places: list[Tensor]
    """The tensors, by place."""
    sizes: list[Any]
    """The controlled tensors by their ids, and their sizes, or shapes if these tell the parts."""
    counts: list[int]
    """The number of reference norms of each of them."""
    trained: list[int]
    """The ids of those that are not frozen."""


def layout_of(groups: Sequence[Group]) -> Layout:
    """Return the tensors of the groups as they are now."""
    params = [p for group in groups for p in group["params"]]
    ends = list(accumulate(len(group["params"]) for group in groups))
    looks: list[Any] = [*ends, *(p.shape if p.requires_grad else None for p in params)]
    looks += [p.dtype for p in params]
    found = [
        GroupLayout(
            group[CONTROL],
            list(group["params"]),
            _sizes(group, members),
            parse_scope(state_of(group)["scope"]).sizes(members.params),
            _trained(members),
        )
        for group, members in zip(groups, members_of(groups), strict=True)
    ]
    dicts = [x for group in groups for x in (group, group[CONTROL])]
    return Layout(params, looks, dicts, found)


def checked_settings(
    groups: Sequence[Group], layout: Layout, checked: Sequence[Settings]
) -> list[Settings]:
    """Return the settings of every group as last checked: they may have been edited since.

    ``checked`` are those of the groups of the layout. Any other entry was checked when it was made.
    """
    known = {id(old.control): s for old, s in zip(layout.groups, checked, strict=False)}
    return [known.get(id(group[CONTROL])) or settings_of(group) for group in groups]


def take_over_edits(
    optimizer: Optimizer, layout: Layout, checked: Sequence[Settings], fresh: bool
) -> list[Settings]:
    """Check the settings that were edited since they were ``checked``, and return all of them.

    If the optimizer is ``fresh``, no step depends on its references yet: all settings may change.
    """
    groups, fixed = optimizer.param_groups, () if fresh else FIXED
    for index, before in enumerate(checked_settings(groups, layout, checked)):
        change_settings(index, groups[index], before, fixed, optimizer)
    return [settings_of(group) for group in groups]


def loaded_step(optimizer: Optimizer, layout: Layout) -> Tensor | None:
    """Return the number of steps in groups that were loaded by the wrapped optimizer itself.

    Its ``load_state_dict`` puts new groups in place of the old ones. Their entries are copies of
    the controller's, or plain dicts if the controller saved them. None if nothing was loaded.
    """
    known = {id(old.control) for old in layout.groups}
    step = None
    for index, (group, old) in enumerate(zip(optimizer.param_groups, layout.groups, strict=False)):
        control = entry_of(group)
        is_same = list(map(id, group["params"])) == list(map(id, old.places))
        if CONTROL not in group and is_same:
            raise ValueError(
                f"Group {index} of the wrapped optimizer was replaced by one without the settings "
                "of norm control, as its load_state_dict does with a state that was saved without "
                "them. Load the state into this optimizer instead, or construct it again after "
                "loading."
            )
        if is_same and not isinstance(control, ControlState):
            control = group[CONTROL] = _read(index, group, old.control, optimizer)
        if isinstance(control, ControlState) and id(control) not in known:
            step = control.step
    return step


def _read(index: int, group: Group, entry: ControlState, optimizer: Optimizer) -> ControlState:
    """Return the entry of a group that has a plain dict in its place.

    The dict has settings for the entry, which are then checked as edited ones; or it was saved by
    the controller, with a state.
    """
    given = group[CONTROL]
    if "reference" not in given or given.get("step") is entry.step:  # or it is a copy of the entry
        entry.update({name: x for name, x in given.items() if name not in STATE_NAMES})
        return entry
    loaded = restored(index, group, {CONTROL: entry})
    normalise(settings_of(loaded))
    check_group(index, loaded, optimizer)
    return state_of(loaded)


def has_entries(groups: Sequence[Group]) -> bool:
    """Return whether every group has an entry of the controller, and not what was loaded or given
    in its place."""
    return all(isinstance(group.get(CONTROL), ControlState) for group in groups)


def put_entries_back(groups: Sequence[Group], layout: Layout) -> None:
    """Put the entries of the controller back into groups that were replaced by ones without."""
    for group, old in zip(groups, layout.groups, strict=False):
        group.setdefault(CONTROL, old.control)


def new_groups(groups: Sequence[Group]) -> list[int]:
    """Return the indices of the groups that were appended by hand.

    One that was copied from another group keeps the settings of that one.
    """
    known: list[Any] = []
    found = []
    for index, group in enumerate(groups):
        control = entry_of(group)
        if not isinstance(control, ControlState) or any(control is other for other in known):
            group[CONTROL] = {k: v for k, v in control.items() if k not in STATE_NAMES}
            found.append(index)
        known.append(control)
    return found


@torch.no_grad()
def carry_over_references(
    optimizer: Optimizer, before: Layout | None, sets: Sequence[WeightSet], sharing: Sharing
) -> None:
    """Give every group the reference norms of the tensors that it has now.

    ``before`` is None if no step was made yet: then there is nothing to carry over.
    """
    groups = optimizer.param_groups
    check_moments(optimizer)
    if before is None:
        measure_references(groups, sharing)
        return
    if sharing.norm_group is not None:
        raise ValueError(
            "A tensor was frozen or unfrozen, replaced, added or removed after the first step, "
            "under norm_group: its share of the reference norm is not known. Construct the "
            "optimizer again."
        )
    ratios: dict[int, Tensor] | None = None
    for group, members in zip(groups, members_of(groups), strict=True):
        for old in before.groups:
            if old.control is group[CONTROL] and old.sizes != _sizes(group, members):
                _check_memory(group)
                ratios = reached_ratios(sets) if ratios is None else ratios
                measured = reference_norms(group, members, sharing)
                state_of(group)["reference"] = _carried_over(group, members, old, measured, ratios)
            if old.control is group[CONTROL] and old.trained != _trained(members):
                group[CONTROL].pop("vectors", None)  # they follow the matrices that were trained
                _measure_frozen(group, members, old.trained, sharing)


def _measure_frozen(group: Group, members: Members, trained: list[int], sharing: Sharing) -> None:
    """Take the norms of tensors that are frozen now as their reference, if control has not started.

    They were ``trained`` before. No step measures them when control starts.
    """
    control = state_of(group)
    start, memory = control["start"], control.get("memory")
    if not start or start == EVERY_STEP:
        return
    waits: Any = memory is None or memory[-1] == 0
    if isinstance(start, int):
        waits = control.step < start
    frozen = {id(p) for p in members.params if not p.requires_grad}.intersection(trained)
    counts = parse_scope(control["scope"]).sizes(members.params)
    pairs = zip(members.params, counts, strict=True)
    parts = [id(p) in frozen for p, n in pairs for _ in range(n)]
    reference = control.reference
    chosen = torch.tensor(parts, dtype=torch.bool, device=reference.device) & waits
    measured = reference_norms(group, members, sharing)
    control["reference"] = torch.where(chosen, measured, reference)


def _carried_over(
    group: Group, members: Members, old: GroupLayout, measured: Tensor, ratios: dict[int, Tensor]
) -> Tensor:
    """Return the reference norms of a group after a change, from the norms that it has now."""
    pieces = state_of(group).reference.split(old.counts)
    kept = dict(zip(old.sizes, pieces, strict=True))
    present = {id(p) for p in group["params"]}
    replaced = {
        id(new): id(gone)
        for new, gone in zip(group["params"], old.places, strict=False)
        if id(gone) not in present
    }
    references = []
    counts = parse_scope(state_of(group)["scope"]).sizes(members.params)
    for key, norms in zip(_sizes(group, members), measured.split(counts), strict=True):
        place = replaced.get(key[0], key[0])  # its own, if the tensor was resized
        if key in kept:
            references.append(kept[key])
        elif place in ratios:
            references.append(norms / ratios[place].to(norms.device))
        else:
            references.append(norms)
    return torch.cat(references) if references else measured


def reached_ratios(sets: Sequence[WeightSet]) -> dict[int, Tensor]:
    """Return the ratio of its norm to its reference that every tensor has, by its id.

    The weights of sets that have made no step are measured, on every rank.
    """
    found = {}
    for s in sets:
        if (last := s.last_norms) is None:
            norms = whole_norms(s.params, s.scope, Sharing(s.params), s.size)
            counts = s.scope.sizes(s.params)
        else:
            norms, counts = s.whole(last), s.counts
        pieces = zip(s.params, norms.split(counts), s.whole(s.initial).split(s.counts), strict=True)
        for p, now, then in pieces:
            ratio = torch.linalg.vector_norm(now) / torch.linalg.vector_norm(then)
            found[id(p)] = torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, 1.0)
    return found


def _sizes(group: Group, members: Members) -> list[Any]:
    by_shape = parse_scope(state_of(group)["scope"]).axes is not None
    return [(id(p), p.shape if by_shape else p.numel()) for p in members.params]


def _trained(members: Members) -> list[int]:
    return [id(p) for p in members.params if p.requires_grad]


def _check_memory(group: Group) -> None:
    control = state_of(group)
    memory = control.get("memory")
    is_used = control["law"] == "integral" or control["start"] == "inflection"
    if is_used and memory is not None and memory.shape[-1] > 1:
        raise ValueError(
            "A tensor was replaced, resized, added or removed in a group whose law or start "
            "remembers every norm, and what it would remember of the new tensor is not known. "
            "Construct the optimizer again, or use scope='group'."
        )
