"""What the controller stores in a parameter group, and how it is saved and restored.

All of it is one entry of the group, ``group["control"]``, so that it is saved with the group. In a
checkpoint it is plain data: a dict of tensors and numbers, and settings as text. This file knows
nothing about how a step is made.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from normcontrol.groups.settings import Group, setting_names
from normcontrol.mechanisms.size import Statistic, as_size
from normcontrol.schedule_text import from_text, to_text
from normcontrol.scope import parse_scope
from normcontrol.target import TARGETS

CONTROL = "control"
"""The key of the entry."""


class ControlState(dict[str, Any]):
    """The entry ``group["control"]``.

    - ``step``: the number of steps that the controller has made; one tensor for all groups.
    - ``reference``: the reference norm of every part, float64; the norms at theta_0.
    - ``first_lr``: the learning rate at construction, which :class:`eta_times` divides by.
    - ``memory``: what a law or a start remembers of every norm, if it does.
    - ``scales``: the last factor and the next guess, if a stepper multiplies by a guess.
    """

    @property
    def step(self) -> Tensor:
        return self["step"]

    @property
    def reference(self) -> Tensor:
        return self["reference"]

    def __repr__(self) -> str:
        return f"step {int(self.step)}, {self.reference.numel()} reference norms"


def state_of(group: Group) -> ControlState:
    """Return the controller's entry of a group."""
    return group[CONTROL]


def saved(group: Group) -> Group:
    """Return a group as plain data, for a checkpoint."""
    plain = {key: to_text(value) for key, value in group.items()}
    return {**plain, CONTROL: dict(group[CONTROL])}


def restored_groups(given: list[Group], live: list[Group]) -> tuple[list[Group], Tensor]:
    """Return saved groups with their settings read back, and the number of steps made.

    A state that was saved without norm control is adapted, with a warning.
    """
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
    warnings.warn(
        "The loaded state has no reference norms: it was saved by an optimizer without norm "
        "control. The weights at the next step become the reference, and the control's schedules "
        "start there. To continue from an earlier reference instead, set norm= or rms=, which need "
        "none.",
        stacklevel=4,
    )
    return [adapted(*pair) for pair in pairs], torch.zeros((), dtype=torch.int64)


def restored(index: int, given: Group, live: Group) -> Group:
    """Return a saved group with its settings read back, if it fits the live group."""
    if parse_scope(given["scope"]) != parse_scope(live["scope"]):
        raise ValueError(
            f"The state of group {index} was saved with scope={given['scope']!r}, but the "
            f"optimizer has scope={live['scope']!r}; reference norms of one scope mean nothing in "
            "another. Construct the optimizer with the saved scope."
        )
    have, got = (state["reference"] for state in (live[CONTROL], given[CONTROL]))
    if got.shape != have.shape:
        raise ValueError(
            f"The state of group {index} contains {got.numel()} reference norms, but {have.numel()}"
            " are needed: other tensors were controlled when it was saved. Control the same ones, "
            "or start again without this state."
        )
    group = {**given, CONTROL: ControlState(given[CONTROL])}
    for name in (*TARGETS, "rate", "relative_step"):
        if name in given:
            group[name] = from_text(given[name], live.get(name))
    if "size" in given:
        group["size"] = _restored_size(given["size"], live.get("size"))
    return group


def adapted(given: Group, live: Group) -> Group:
    """Return a group that was saved without norm control, with the live group's settings.

    A decay in the saved group is dropped: the controller replaces it.
    """
    ours = (*setting_names(), CONTROL, "weight_decay")
    return {**given, **{key: live[key] for key in ours if key in live}}


def _restored_size(given: str, live: Any) -> Any:
    if not given.startswith("statistic("):
        return as_size(given)
    if isinstance(live, Statistic):
        return live
    raise ValueError(
        f"The checkpoint was made with the function {given[10:-1]} as the size of weights, and a "
        "function cannot be stored. Construct the optimizer with the same function before loading."
    )
