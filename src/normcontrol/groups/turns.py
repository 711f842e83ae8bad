"""Calls of ``step`` in which the controller does nothing.

DeepSpeed's ZeRO calls ``step`` once for every parameter group, and copies the weights of the group
to the model after that call. During the call the optimizer has this group alone, or its other
groups have no tensors. So the controller acts in the call that steps the controlled group, and
counts that one only. torch.distributed.checkpoint makes a dummy step if it finds no state: control
must not move the weights then. This file does not know how a step is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from torch import Tensor

from normcontrol.groups.members import CONTROL
from normcontrol.groups.sets import WeightSet
from normcontrol.groups.settings import Group


class Turns:
    """The groups that have tensors, and which of them are in a call of ``step``."""

    def __init__(self) -> None:
        self.known: list[Group] = []
        """All groups that have had tensors."""
        self.firsts: list[Tensor | None] = []
        """The first tensor of every group when the sets were built, by which a change is seen."""

    def note(self, groups: Sequence[Group]) -> None:
        """Store these groups as those of a usual step.

        A group with the entry of a stored one replaces it: the dict of that group was replaced.
        """
        entries = {id(g[CONTROL]): g for g in groups}
        self.known = [entries.get(id(g[CONTROL]), g) for g in self.known]
        self.known += [g for g in groups if g["params"] and not _is_in(g, self.known)]
        self.firsts = [g["params"][0] if g["params"] else None for g in groups]

    def are_usual(self, groups: Sequence[Group]) -> bool:
        """Return whether the first tensors of these groups are those that were noted."""
        firsts = [g["params"][0] if g["params"] else None for g in groups]
        return len(firsts) == len(self.firsts) and all(map(is_, firsts, self.firsts))

    def replace(self, before: Sequence[Group], after: Sequence[Group]) -> None:
        """Follow groups that were replaced by others, one by one, as loading a state does."""
        pairs = zip(before, after, strict=True)
        self.known = [new for old, new in pairs if _is_in(old, self.known)]

    def hidden(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with tensors that a call of ``step`` with these groups leaves out."""
        return [g for g in self.known if not g["params"] or not _is_in(g, groups)]

    def include(self, groups: Sequence[Group], sets: Sequence[WeightSet], clips: bool) -> bool:
        """Return whether a call of ``step`` with these groups steps the controlled weights.

        A call that steps only some of the controlled groups is refused, and so is one that clips
        the gradients of some groups only.
        """
        shown = [group for group in groups if group["params"]]
        hidden = self.hidden(groups)
        controlled = [group for s in sets for group in s.groups]
        away = [group for group in controlled if _is_in(group, hidden)]
        if hidden and clips:
            raise ValueError(
                "max_grad_norm was given, but step() was called with some of the groups only, as "
                "DeepSpeed's ZeRO does, and the joint norm of all gradients is not known then. Set "
                "gradient_clipping in DeepSpeed's configuration instead."
            )
        if away and any(_is_in(group, shown) for group in controlled):
            raise ValueError(
                f"There are {len(controlled)} controlled groups, but step() was called with "
                f"{len(controlled) - len(away)} of them, as DeepSpeed's ZeRO does: it steps every "
                "group in a call of its own. Their common norm and the number of steps would be "
                "wrong. Put all weights to control into one group with controlled=True, and set "
                "controlled=False in the others. If a group was removed, construct the optimizer "
                "again."
            )
        return not away


def may_move(groups: Sequence[Group], fresh: bool) -> bool:
    """Return whether a step may move weights: not if all learning rates are zero.

    One on a device counts as not zero after the first step, because reading it waits.
    """
    for group in groups:
        lr = group.get("lr")  # None if the optimizer computes its own
        on_device = isinstance(lr, Tensor) and not lr.is_cpu
        if lr is None or (on_device and not fresh) or float(lr) != 0:
            return True
    return False


def check_pieces(groups: Sequence[Group], sets: Sequence[WeightSet]) -> None:
    """Refuse a call that steps other tensors of a controlled group than those of its set."""
    tensors = {id(p) for group in groups for p in group["params"]}
    if any(id(p) not in tensors for s in sets for p in s.params):
        raise ValueError(
            "step() was called with other tensors of a controlled group than before. DeepSpeed's "
            "ZeRO-3 steps a group of more than sub_group_size weights in pieces, whose common norm "
            "is not known in any of these calls. Set sub_group_size in the configuration of "
            "zero_optimization to the number of weights or more."
        )


def _is_in(group: Group, groups: Sequence[Group]) -> bool:
    return any(group is other for other in groups)
