"""What the controller stores in a parameter group, and how it is saved and restored.

All of it is one entry of the group, ``group["control"]``, so that it is saved with the group. In a
checkpoint it is plain data: a dict of tensors and numbers, and settings as text. This file knows
nothing about how a step is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from normcontrol.groups.members import CONTROL, controlled_params
from normcontrol.groups.moments import check_saved_moments
from normcontrol.groups.settings import (
    DEFAULTS,
    MEMORIES,
    STATE_NAMES,
    STEP_LENGTHS,
    Group,
    Settings,
    check_group,
    completed,
    edited,
    given_settings,
    setting_names,
)
from normcontrol.law import OwnLaw
from normcontrol.mechanisms.size import Statistic, as_size
from normcontrol.numbers import plain
from normcontrol.schedule import SCHEDULES
from normcontrol.schedule_text import checked_text, from_text
from normcontrol.scope import check_axes, parse_scope
from normcontrol.target import TARGETS
from normcontrol.warn import warn


class ControlState(dict[str, Any]):
    """The entry ``group["control"]``: the settings of the group, and

    - ``step``: the number of steps that the controller has made; one tensor for all groups.
    - ``reference``: the reference norm of every part, float64; the norms at theta_0.
    - ``first_lr``: the learning rate at construction, which :class:`eta_times` divides by.
    - ``memory``: what a law or a start remembers of every norm, if it does.
    - ``scales``: the last factor and the next guess, if a stepper multiplies by a guess.
    - ``vectors``: what follows the largest singular values, if they are controlled.

    Settings may be changed; the next step checks them and takes them over.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in setting_names() and name not in STATE_NAMES:
            raise KeyError(
                f"{name!r} is no setting of norm control: the settings are "
                f"{', '.join(setting_names())}."
            )
        if name in setting_names() and getattr(plain(value), "ndim", 0) > 0:
            raise ValueError(
                f"{name}={value!r} is {len(value)} numbers, but a group has one. Give a group to "
                "each set of tensors that needs another number."
            )
        super().__setitem__(name, value)

    def __ior__(self, given: Any) -> ControlState:  # type: ignore[override,misc]
        self.update(given)
        return self

    def update(self, *given: Any, **more: Any) -> None:
        """Set several settings, each of which is checked."""
        for name, value in dict(*given, **more).items():
            self[name] = value

    @property
    def step(self) -> Tensor:
        return self["step"]

    @property
    def reference(self) -> Tensor:
        return self["reference"]

    def __reduce__(self) -> Any:
        return ControlState, (dict(self),)  # the form that torch.load(weights_only=True) can read

    def __repr__(self) -> str:
        kinds = [name for name in TARGETS if self.get(name) is not None]
        shown = ", ".join(f"{name}={self.get(name)}" for name in (*kinds, "rate"))
        shown += f", scope={self.get('scope')!r}"
        return f"{shown}, step {int(self.step)}, {self.reference.numel()} reference norms"


# Frameworks store groups themselves, as Lightning's callbacks for fine-tuning do.
torch.serialization.add_safe_globals([ControlState, *SCHEDULES.values()])


def state_of(group: Group) -> ControlState:
    """Return the controller's entry of a group."""
    return group[CONTROL]


def refuse_other_entries(groups: Sequence[Group]) -> None:
    """Refuse groups of another controller, or with a state that one has saved: its settings would
    hold in place of new ones."""
    for index, group in enumerate(groups):
        entry = group.get(CONTROL)
        if isinstance(entry, ControlState):
            raise ValueError(
                f"Group {index} is under norm control already ({entry!r}), and these "
                "settings would be used in place of the ones that are given now. Construct the "
                f"wrapped optimizer again, or remove them first: group.pop({CONTROL!r})."
            )
        if isinstance(entry, Mapping) and "reference" in entry:
            raise ValueError(
                f"Group {index} contains a saved state of norm control, as after the wrapped "
                "optimizer's load_state_dict. Its settings would be used in place of the ones that "
                "are given now, and its reference norms would be lost. Construct NormControl first "
                "and load the state into that, or remove it first: "
                f"group.pop({CONTROL!r})."
            )


def settings_of(group: Group) -> dict[str, Any]:
    """Return the settings of a group as they are now; None for kinds of target it does not have."""
    return {name: group[CONTROL].get(name) for name in setting_names()}


def add_settings(index: int, group: Group, defaults: Settings, optimizer: Optimizer) -> None:
    """Complete and check the settings of a new group, and move them to ``group["control"]``."""
    own = given_settings(group, optimizer.defaults)
    group[CONTROL] = ControlState(_moved(group, completed(own, defaults, group), optimizer))
    check_group(index, group, optimizer)


def change_settings(
    index: int, group: Group, before: Settings, fixed: Collection[str], optimizer: Optimizer
) -> None:
    """Check the settings of a group if they are no longer as ``before``, and complete them.

    Those that are ``fixed`` may not be changed. The entry stays the same object, so that a user who
    holds it can edit it again.
    """
    is_given = any(name in group and name not in optimizer.defaults for name in setting_names())
    if not is_given and settings_of(group) == before:
        return
    settings = _moved(group, edited(group, before, optimizer.defaults, fixed), optimizer)
    if not isinstance(group[CONTROL], ControlState):
        group[CONTROL] = ControlState()
    _refill(group[CONTROL], settings)
    check_group(index, group, optimizer)
    scope = state_of(group)["scope"]
    if scope != before["scope"]:
        for name, p in controlled_params(group, index):
            check_axes(parse_scope(scope), name, p)


def _moved(group: Group, settings: Settings, optimizer: Optimizer) -> dict[str, Any]:
    """Return these settings with the state of a group, and remove the keys they were given by."""
    for name in setting_names():
        if name not in optimizer.defaults:
            group.pop(name, None)
    kept = {name: value for name, value in group.get(CONTROL, {}).items() if name in STATE_NAMES}
    return {**settings, **kept}


def _refill(entry: dict[str, Any], content: Settings) -> None:
    entry.clear()
    entry.update(content)


@contextmanager
def unchanged_on_error(groups: Sequence[Group]) -> Iterator[None]:
    """Restore the groups if an error is raised: nothing that a user gave is lost."""
    before = [dict(group) for group in groups]
    entries = [entry for group in groups if isinstance(entry := group.get(CONTROL), ControlState)]
    contents = [dict(entry) for entry in entries]
    try:
        yield
    except Exception:
        for group, keys in zip(groups, before, strict=False):
            _refill(group, keys)
        for entry, content in zip(entries, contents, strict=True):
            _refill(entry, content)
        raise


def groups_of(packed: dict[str, Any], may_be_inside: bool = True) -> list[Group]:
    """Return the groups of a state_dict, or of the one inside it.

    An optimizer around another one, such as Lookahead, may save the inner one's under a key.
    Otherwise what has a state_dict inside is a whole checkpoint.
    """
    found = _lists_of_groups(packed) if may_be_inside or "param_groups" in packed else []
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"The state of the optimizer has {len(found)} lists of param_groups, and the control "
            "is saved in one. Put NormControl around each optimizer inside it."
        )
    raise ValueError(
        f"The state has no param_groups (its keys are {', '.join(map(str, [*packed][:4]))}), so it "
        "is not that of an optimizer. Give what opt.state_dict() returned."
    )


def with_groups(packed: dict[str, Any], groups: list[Group]) -> dict[str, Any]:
    """Return a state_dict, or the one inside it, with other groups."""
    if "param_groups" in packed:
        return {**packed, "param_groups": groups}
    return {
        key: with_groups(value, groups) if _lists_of_groups(value) else value
        for key, value in packed.items()
    }


def _lists_of_groups(packed: Any) -> list[list[Group]]:
    if not isinstance(packed, dict):
        return []
    if "param_groups" in packed:
        return [packed["param_groups"]]
    return [groups for value in packed.values() for groups in _lists_of_groups(value)]


def saved_state(packed: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state_dict with its groups as plain data."""
    return with_groups(packed, [saved(group) for group in groups_of(packed)])


def saved(group: Group) -> Group:
    """Return a group as plain data, for a checkpoint."""
    control = {
        name: _plain(name, value) if name in setting_names() else value
        for name, value in group[CONTROL].items()
    }
    return {**group, CONTROL: control}


def restored_state(packed: dict[str, Any], optimizer: Optimizer) -> tuple[dict[str, Any], Tensor]:
    """Return a saved state with the settings of its groups read back, and the steps made.

    A state that was saved without norm control is adapted, with a warning.
    """
    live = optimizer.param_groups
    may_be_inside = "param_groups" not in packed and "param_groups" not in optimizer.state_dict()
    groups, step = restored_groups(groups_of(packed, may_be_inside), live)
    for index, (group, ours) in enumerate(zip(groups, live, strict=True)):
        check_group(index, {**group, "params": ours["params"]}, optimizer)
    check_saved_moments(packed.get("state", {}), groups, optimizer)
    return with_groups(packed, groups), step


def restored_groups(given: list[Group], live: list[Group]) -> tuple[list[Group], Tensor]:
    """Return saved groups with their settings read back, and the number of steps made."""
    have, got = ([len(group["params"]) for group in groups] for groups in (live, given))
    if have != got:
        raise ValueError(
            f"The state is of groups with {got} tensors, but this optimizer has groups with "
            f"{have}: they are of different models or groupings. Build the groups as they were "
            "when the state was saved."
        )
    pairs = list(zip(given, live, strict=True))
    if all(CONTROL in group for group in given):
        return [restored(i, *pair) for i, pair in enumerate(pairs)], given[0][CONTROL]["step"]
    warn(
        "The loaded state has no reference norms: it was saved by an optimizer without norm "
        "control. The weights at the next step become the reference, and the control's schedules "
        "start there. To continue from an earlier reference instead, set norm= or rms=, which need "
        "none."
    )
    step = torch.zeros((), dtype=torch.int64, device="cpu")
    return [adapted(*pair) for pair in pairs], step


def restored(index: int, given: Group, live: Group) -> Group:
    """Return a saved group with its settings read back, if it fits the live group."""
    theirs, ours = given[CONTROL], live[CONTROL]
    lacks = [name for name in ("step", "reference", "scope") if name not in theirs]
    lacks += [] if any(theirs.get(name) is not None for name in TARGETS) else ["target"]
    if lacks:
        raise ValueError(
            f"The state of group {index} has no {' and no '.join(lacks)}, which every saved state "
            "of norm control has: it was changed after it was saved. Load an unchanged one."
        )
    for name in ("step", "reference"):
        if not isinstance(theirs[name], Tensor):
            raise ValueError(
                f"The state of group {index} has {name}={theirs[name]!r}, where a saved state has "
                "a tensor: it was changed after it was saved. Load an unchanged one."
            )
    if parse_scope(theirs["scope"]) != parse_scope(ours["scope"]):
        raise ValueError(
            f"The state of group {index} was saved with scope={theirs['scope']!r}, but the "
            f"optimizer has scope={ours['scope']!r}; reference norms of one scope mean nothing in "
            "another. Construct the optimizer with the saved scope."
        )
    have, got = ours["reference"], theirs["reference"]
    if got.shape != have.shape:
        raise ValueError(
            f"The state of group {index} contains {got.numel()} reference norms, but {have.numel()}"
            " are needed: other tensors were controlled when it was saved. Control the same ones, "
            "or start again without this state."
        )
    missing = {k: v for k, v in ours.items() if k in DEFAULTS and k not in theirs}
    homes = [p.device for p in live.get("params", ())]
    home = have.device if have.device in homes or not homes else homes[0]  # they were moved
    control = {**missing, **theirs, "scope": ours["scope"], "reference": got.to(home)}
    for name in (*TARGETS, "rate", *STEP_LENGTHS):
        if name in theirs:
            control[name] = _read(name, theirs[name], ours.get(name))
    if "size" in theirs:
        control["size"] = as_size(_restored("size of weights", theirs["size"], ours["size"]))
    if "law" in theirs:
        control["law"] = _restored("law", theirs["law"], ours["law"])
    return {**given, CONTROL: ControlState(control)}


def adapted(given: Group, live: Group) -> Group:
    """Return a group that was saved without norm control, with the live group's settings.

    A decay in the saved group is dropped: the controller replaces it. So is what the live group
    remembers of its steps.
    """
    control = {name: x for name, x in live[CONTROL].items() if name not in MEMORIES}
    ours = {"weight_decay": live["weight_decay"]} if "weight_decay" in live else {}
    return {**given, **ours, CONTROL: ControlState(control)}


def _plain(name: str, value: Any) -> Any:
    return repr(value) if isinstance(value, (Statistic, OwnLaw)) else checked_text(name, value)


def _read(name: str, text: Any, live: Any) -> Any:
    try:
        return from_text(text, live)
    except SyntaxError:
        raise ValueError(
            f"The state has {name}={text!r}, which cannot be read: it was changed or cut off after "
            "it was saved. Load an unchanged one."
        ) from None


def _restored(what: str, given: Any, live: Any) -> Any:
    """Return a saved setting, or the live one if a user's function was saved by its name."""
    if not isinstance(given, str):
        raise ValueError(
            f"The state has {given!r} as the {what}, where a saved state has a name: it was "
            "changed after it was saved. Load an unchanged one."
        )
    if not given.startswith(("statistic(", "law(")):
        return given
    if isinstance(live, (Statistic, OwnLaw)):
        return live
    raise ValueError(
        f"The checkpoint was made with the function {given[given.index('(') + 1 : -1]} as the "
        f"{what}, and a function cannot be stored. Construct the optimizer with the same function "
        "before loading."
    )
