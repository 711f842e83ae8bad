"""Readings: norm, target, ratio and scale of the last step, by name; the values of ``opt.norms()``.

They are computed from what the sets stored in the step. No weights are measured, and nothing is
changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normcontrol.groups.clock import Clock
from normcontrol.groups.sets import WeightSet
from normcontrol.groups.settings import Group
from normcontrol.schedule import Schedule

NOTHING_CONTROLLED = (
    "Nothing is controlled now: no trained tensor has two or more dimensions or is in a group with "
    "controlled=True. The optimizer makes its own steps. To control tensors, unfreeze them, or "
    "construct the optimizer with controlled=True in their group."
)


class Reading(NamedTuple):
    """What the controller measured and did at its last step.

    The values are tensors, so that the host waits for the device only when one is read. The norm is
    that after the step; with ``cautious``, which scales some of the weights only, it is the norm
    that the law was given, before they were scaled.
    """

    norm: Tensor
    target: Tensor
    ratio: Tensor
    scale: Tensor

    def decay(self, lr: Tensor | float) -> Tensor:
        """Return the effective weight decay of the last step, ``(1 - scale) / lr``.

        AdamW with this decay and the learning rate ``lr`` would have multiplied by the same factor.
        It is negative while the norm grows.
        """
        return (1 - self.scale) / lr


@torch.no_grad()
def reading(s: WeightSet, clock: Clock) -> Reading:
    """Return the values of one set, for the parts that this process knows.

    Before the first step of the set, also after a state was loaded or a group was added, the norm
    is that of the current weights; where they are shards it is not known, see ``part_norms``.
    """
    initial = s.scope.join(s.initial)
    if s.last is None:
        given = s.given[s.kind]
        if isinstance(given, Schedule):
            given = given.at(clock.step.to(s.initial.dtype), s.groups[0])
        norm = s.scope.join(s.part_norms(clock))
        return Reading(norm, given * s.unit, norm / initial, torch.ones_like(initial))
    target, scale = s.last
    norm = s.scaled(s.scope.join(s.parts.detach()), scale)
    return Reading(norm, target, norm / initial, scale)


def readings(
    sets: Sequence[WeightSet], groups: Sequence[Group], clock: Clock
) -> dict[str, Reading]:
    """Return the values of all sets: by tensor, or by group where the weights share a norm."""
    found: dict[str, Reading] = {}
    for s in sets:
        whole = reading(s, clock)
        if s.scope.joint:
            index = next(i for i, group in enumerate(groups) if group is s.groups[0])
            found["global" if s.scope.name == "global" else f"group {index}"] = whole
            continue
        values = whole if s.shards is None else s.shards.whole(torch.stack(whole))
        for name, *pieces in zip(s.names, *(v.split(s.counts) for v in values), strict=True):
            found[name] = Reading(*(p.reshape(()) if s.scope.axes is None else p for p in pieces))
    return found


@torch.no_grad()
def joint_references(sets: Sequence[WeightSet]) -> dict[str, Tensor]:
    """Return the joint reference norm of every tensor whose parts have norms of their own, by name.

    Ratios do not contain it: that of a part which became zero is zero. Rows that lie on one rank
    each are gathered, as in :func:`readings`.
    """
    found: dict[str, Tensor] = {}
    for s in sets:
        if s.scope.axes is not None:
            pieces = s.whole(s.initial).split(s.counts)
            found |= zip(s.names, map(torch.linalg.vector_norm, pieces), strict=True)
    return found
