"""Sets: the weights that share one target and one rate.

A set belongs to one group, or to all groups that share the global norm. It knows its tensors, its
reference and its settings, and what the controller did at the last step. It does not measure or
multiply weights: a stepper does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normcontrol.distributed.shards import Shards
from normcontrol.groups.clock import Clock
from normcontrol.groups.settings import MECHANISMS, STEP_LENGTHS, Group, target_kind
from normcontrol.groups.state import state_of
from normcontrol.law import Integral, Law, law_of, proportional
from normcontrol.mechanisms.power_iteration import PowerIteration
from normcontrol.mechanisms.size import size_of
from normcontrol.mechanisms.start import EVERY_STEP, ROWS, AtEveryStep, AtInflection, AtStep
from normcontrol.mechanisms.update import resize_
from normcontrol.numbers import is_number, plain
from normcontrol.schedule import Schedule, lr_times, trace
from normcontrol.scope import parse_scope
from normcontrol.target import TARGETS, Units

AHEAD = 256
"""Steps for which a schedule is evaluated at once, where the host knows the step."""


class WeightSet:
    """Weights that share one target and one rate.

    Args:
        groups: the parameter groups that the weights belong to; the first one has the settings.
        names: the names of the tensors.
        params: the tensors.
        outputs: the number of outputs of every tensor; NaN where it is not known.
        stored: the reference norms of the tensors, as the groups store them.
        shards: how the tensors are spread over processes; None if they are whole.
        columns: which of the group's parts these are; None if they are all, or share a norm.
    """

    parts: Tensor
    """The norm of every part, as a stepper last measured it. Not set before the first step."""

    def __init__(
        self,
        groups: list[Group],
        names: list[str],
        params: list[Tensor],
        outputs: list[float],
        stored: list[Tensor],
        shards: Shards | None = None,
        columns: Tensor | None = None,
    ) -> None:
        self.groups, self.names, self.params, self.shards = groups, names, params, shards
        self.settings = state_of(groups[0])
        self.scope = parse_scope(self.settings["scope"])
        self.size = size_of(self.settings["size"])
        if self.settings["size"] != "norm":
            outputs = [math.nan] * len(params)  # a gain is a norm
        self.outputs = outputs
        self.kind = target_kind(self.settings)
        self.counts = self.scope.sizes(params)
        """How many parts each tensor has."""
        self._stored, self._columns = stored, columns
        self._memory: Tensor | None = None
        home = self.settings.reference
        whole = torch.cat([norms.to(home.device) for norms in stored]) if stored else home[:0]
        self.initial = whole if shards is None else shards.known(whole)
        """The reference norm of every part."""
        self.units = Units(
            self.scope.join(self.initial),
            rms=self._unit_norms([p.numel() for p in params]),
            gain=self._unit_norms(outputs),
        )
        """What the kinds of target are multiples of."""
        self._unit = TARGETS[self.kind](self.units)
        self.start: AtStep | AtEveryStep | AtInflection | None = None
        self.law, self.start = self._law(), self._start()
        self.power_iteration: PowerIteration | None = None
        """What measures the weights in place of ``size``, with a memory of the last step."""
        if self.settings["size"] == "spectral" and params and shards is None:
            self.power_iteration = PowerIteration(params, self.settings.get("vectors"))
            self.settings["vectors"] = self.power_iteration.vectors
        scheduled = (self.kind, "rate", *STEP_LENGTHS)
        self.given = {name: self.settings[name] for name in scheduled}
        """What may be scheduled, as it was given; a set is built again if a setting is edited."""
        for schedule in self.given.values():
            if isinstance(schedule, trace):  # its table must exist before a graph is captured
                schedule.value(self.initial.new_zeros(()))
        self.mechanisms = {
            name for name, unused in MECHANISMS.items() if self.settings[name] != unused
        }
        """The optional mechanisms that are in use."""
        self.goal: tuple[Tensor | float, Tensor | float] = self.unit, 0.0
        """The target and the rate of the current step: ``r_t ||theta_0||`` for a ratio, and k_t."""
        self.on_host = False
        """Whether norm, target, rate and scale of the current step are floats, not tensors."""
        self.may_be_on_host = self.scope.joint and shards is None and self.unit.is_cpu
        self.may_be_on_host &= self.start is None and not self.mechanisms & set(STEP_LENGTHS)
        """Whether there is one number of each, and the host need not wait for it."""
        self._unit_on_host: float | None = None
        self._last_target: tuple[float, Tensor] | None = None
        ahead = (name for name, x in self.given.items() if getattr(x, "is_known_ahead", False))
        self._known_ahead = set(ahead)
        """The settings whose schedules are evaluated for :data:`AHEAD` steps at once."""
        self._ahead: dict[str, tuple[Schedule, int, list[float]]] = {}
        self.length = self.unit
        """The length of the optimizer's update, if a setting of :data:`STEP_LENGTHS` gives one."""
        self.before: list[Tensor] = []
        """The weights before the optimizer's step, if a mechanism needs them."""
        self.law_on_device: Callable[[Any, Any, Tensor | None], Tensor] | None = None
        """What applies the law to the norms that a stepper has on the device, with target, rate and
        ``skip``, in place of :meth:`join` and :meth:`apply_law`. A stepper sets it."""
        self.noted: tuple[Tensor | float, Tensor | float] | None = None
        """The target and the scale of the last step, as the controller left them."""

    @property
    def last(self) -> tuple[Tensor, Tensor] | None:
        """The target and the scale of the last step, as tensors; None before the first step."""
        if self.noted is None:
            return None
        unit = self.unit
        target, scale = (
            torch.as_tensor(x, dtype=unit.dtype, device=unit.device) for x in self.noted
        )
        return target.detach(), scale.detach()

    @property
    def unit(self) -> Tensor:
        """What the scheduled target is a multiple of: ||theta_0|| for a ratio.

        It is computed anew where the reference may change: torch.compile loses what is written in
        place into a 0-d float64 tensor.
        """
        if self.start is None:
            return self._unit
        units = self.units._replace(reference=self.scope.join(self.initial))
        return TARGETS[self.kind](units)

    @property
    def order(self) -> str:
        """Whether the weights are scaled "after" or "before" the optimizer's step."""
        return self.settings["order"]

    @property
    def has_plain_law(self) -> bool:
        """Whether the law is the proportional one, with one rate for all parts: kernels know it."""
        start_apart = isinstance(self.start, AtInflection) and not self.scope.joint
        return self.law is proportional and not start_apart

    @property
    def is_joint_over_ranks(self) -> bool:
        """Whether other ranks may have weights of this set that this rank cannot see."""
        return self.shards is not None and self.shards.norm_group is not None

    def choose_goal(self, clock: Clock) -> None:
        """Evaluate the target and the rate of this step; the rate is 0 before the start.

        A value that cannot be is refused here, before the step changes anything.
        """
        rate = self.value("rate", clock, 1.0)
        if self.start is not None:
            rate = torch.where(self.start.is_active(clock.step), self._as_tensor(rate), 0.0)
        value = self.value(self.kind, clock, math.inf)
        are_floats = isinstance(value, float) and isinstance(rate, float)
        self.on_host = self.may_be_on_host and are_floats and not torch.is_grad_enabled()
        self.on_host &= self.law is proportional and clock.known
        if self.on_host:
            if self._unit_on_host is None:
                self._unit_on_host = self.unit.item()
            self.goal = value * self._unit_on_host, rate
            return
        target = self._target(value) if clock.known else value * self.unit
        for name in self.mechanisms.intersection(STEP_LENGTHS):
            self.length = self.value(name, clock, math.inf) * target
        self.goal = target, rate

    def _as_tensor(self, value: Tensor | float) -> Tensor:
        """Return a value as a tensor; of two floats torch would make one of its default dtype."""
        return value if isinstance(value, Tensor) else self.unit.new_full((), value)

    def _target(self, value: Tensor | float) -> Tensor:
        """Return the target; the tensor of the last step, if neither value nor unit can differ."""
        if not isinstance(value, float) or self.start is not None or torch.is_grad_enabled():
            return value * self.unit
        if self._last_target is None or self._last_target[0] != value:
            self._last_target = value, value * self.unit
        return self._last_target[1]

    def join(self, parts: Tensor) -> Any:
        """Return the controlled norms, from the norms of the parts: a float on the host."""
        if not self.scope.joint or self.law_on_device is not None:
            return parts
        norm = torch.linalg.vector_norm(parts)
        return norm.item() if self.on_host else norm

    def apply_law(self, norm: Any, target: Any, rate: Any, skip: Tensor | None = None) -> Any:
        """Return the scale that the law chooses; a skipped step must not change its memory."""
        if self.law_on_device is not None:
            return self.law_on_device(target, rate, skip)
        if isinstance(norm, float):
            scale = proportional(norm, target, rate) if norm else math.nan  # as tensors would be
            return scale if math.isfinite(scale) and math.isfinite(norm) else 1.0  # as usable()
        if skip is not None:
            rate = torch.where(skip == 0, self._as_tensor(rate), 0.0)
        return usable(self.law(norm, target, rate), norm, skip)

    def value(self, name: str, clock: Clock, most: float) -> Tensor | float:
        """Return a setting's value at this step.

        A value outside [0, ``most``] is refused if the host can see it without waiting.
        """
        given = self.given[name]
        value = given
        if isinstance(given, Schedule):
            if isinstance(given, lr_times):
                self._check_learning_rates(name, given)
            if clock.known and name in self._known_ahead:
                value = self._value_ahead(name, given, clock.calls)
            else:
                dtype = self.initial.dtype
                calls = torch.tensor(clock.calls, dtype=dtype, device="cpu")
                now = calls if clock.known else clock.step.to(dtype)
                value = given.at(now, self.groups[0])
        if not clock.known:
            return value
        if isinstance(given, trace):
            given.note_end(clock.calls)
        if isinstance(value, Tensor):
            if not value.is_cpu:  # a learning rate on the device
                return value
            number = plain(value)
            value = value if value.requires_grad else number  # of a learning rate, for example
        else:
            number = value
        if type(number) is not float and not is_number(number):
            raise ValueError(
                f"{name}={given} is {number!r} at step {clock.calls}: a schedule returns a number "
                "for every step. Correct the schedule; this step was not made."
            )
        if not 0.0 <= number <= most:
            raise ValueError(
                f"{name}={given} is {number:g} at step {clock.calls}: it must stay within "
                f"[0, {most:g}]. Correct the schedule; this step was not made."
            )
        return value

    def _value_ahead(self, name: str, given: Schedule, step: int) -> float:
        """Return a value of a schedule of the step alone, from a table of the steps around it.

        The tables begin at fixed steps, so that a resumed run finds the same bits in them.
        """
        known, first, values = self._ahead.get(name, (None, 0, []))
        if known is not given or not first <= step < first + AHEAD:
            first = step - step % AHEAD
            dtype = self.initial.dtype
            steps = torch.arange(first, first + AHEAD, dtype=dtype, device="cpu")
            values = given.value(steps).tolist()
            self._ahead[name] = given, first, values
        return values[step - first]

    def resize_update_(self, clock: Clock) -> None:
        """Give the optimizer's last update the length that a setting asks for."""
        at_least = "min_relative_step" in self.mechanisms
        resize_(self.params, self.before, self.scope, self.length, clock.step, at_least)

    def update_reference(self, clock: Clock, skip: Tensor | None) -> None:
        """Store the current norms as the reference of the parts whose control starts now."""
        assert self.start is not None
        assert self.last is not None
        parts = self.last[1].abs() * self.parts  # the scale is 1 where control has not started
        norm = self.scope.join(parts)
        valid = torch.isfinite(norm) if skip is None else torch.isfinite(norm) & (skip == 0)
        now = self.start.starts_now(norm, clock.step, valid)
        self.initial.copy_(torch.where(now, parts, self.initial))
        if not self._is_gathered:
            self._store_reference(self.initial)

    def _store_reference(self, whole: Tensor) -> None:
        pieces = whole.split([len(norms) for norms in self._stored])
        for stored, piece in zip(self._stored, pieces, strict=True):
            stored.copy_(piece)

    @property
    def last_norms(self) -> Tensor | None:
        """The norm of every part after the last step, even where the parts share a norm; None
        before the first step of this set. With ``cautious`` it is that before the scaling."""
        if (last := self.last) is None:
            return None
        return self.scaled(self.parts.detach(), last[1])

    @torch.no_grad()
    def part_norms(self, clock: Clock) -> Tensor:
        """Return :attr:`last_norms`. Before the first step of this set the weights are measured.

        Those of shards are not, because a sum over ranks must not depend on who asks: their norms
        are the reference before the first step of all, and then NaN until the next step.
        """
        if (norms := self.last_norms) is not None:
            return norms
        if self.shards is None:
            return self.size(self.params, self.scope)
        return self.initial if clock.calls == 0 else torch.full_like(self.initial, math.nan)

    def scaled(self, norms: Tensor, scale: Tensor) -> Tensor:
        """Return what norms become when their weights are scaled.

        With ``cautious`` some of the weights are, so that only another pass could tell: then the
        norms are those that were measured, before the weights were scaled.
        """
        if "cautious" in self.mechanisms:
            return norms
        return scale.abs() * norms  # the integral law's may be negative

    def whole(self, values: Tensor) -> Tensor:
        """Return values for all parts, from those of the parts that this process knows."""
        return values if self.shards is None else self.shards.whole(values)

    def _check_learning_rates(self, name: str, given: Schedule) -> None:
        lr = self.groups[0].get("lr")
        if lr is None:
            raise ValueError(
                f"{name}={given!r} follows the learning rate, but the group has lr=None: its "
                f"optimizer computes one in every step. Give a number or another schedule as "
                f"{name}."
            )
        if any(g["lr"] is not lr and g["lr"] != lr for g in self.groups):
            raise ValueError(
                f"{name}={given!r} follows the learning rate, but the groups that share the global "
                f"norm have different ones: {[float(g['lr']) for g in self.groups]}. Use "
                f"scope='group', so that each group has a norm and a {name} of its own."
            )

    def _unit_norms(self, amounts: Sequence[float]) -> Tensor:
        """Return the roots of the amounts of something that the tensors have: weights, outputs."""
        if self.shards is not None and self.is_joint_over_ranks:
            return self.scope.join(self.shards.unit_norms(amounts))
        pairs = zip(amounts, self.counts, strict=True)
        counts = [math.sqrt(amount / n) for amount, n in pairs for _ in range(n)]
        units = torch.tensor(counts, dtype=self.initial.dtype, device=self.initial.device)
        return self.scope.join(units if self.shards is None else self.shards.known(units))

    def _law(self) -> Law:
        law = law_of(self.settings["law"])
        if law is not None:
            return law
        counts = self._unit_norms([p.numel() for p in self.params]).square()
        return Integral(self._recall()[0], counts)

    def _start(self) -> AtStep | AtEveryStep | AtInflection | None:
        start = self.settings["start"]
        if start == EVERY_STEP:
            return AtEveryStep()
        if start == "inflection":
            return AtInflection(self._recall()[1:], self.unit.shape)
        return AtStep(start) if start else None

    def _recall(self) -> Tensor:
        """Return what laws and starts remember of every norm, a row each.

        The group stores it for all its parts. This set has a copy if some of them are frozen or
        known to other ranks only; :meth:`store_memory` writes it back.
        """
        if self._memory is None:
            state: dict[str, Any] = self.settings
            n = 1 if self.scope.joint else state["reference"].numel()
            memory = state.get("memory")
            if memory is None or memory.shape != (1 + ROWS, n):
                memory = self.unit.new_zeros(1 + ROWS, n)
            state["memory"] = memory = memory.to(self.unit.device)
            if self._columns is not None:
                memory = memory[:, self._columns.to(memory.device)]
            self._memory = memory if self.shards is None else self.shards.known(memory)
        return self._memory

    def store_memory(self) -> None:
        """Write back to the group what laws and starts remember, where this set has a copy.

        Parts that lie on one rank each are gathered, so every rank must call it.
        """
        if self._is_gathered and self.start is not None:
            self._store_reference(self.whole(self.initial))
        if self._memory is None or (self._columns is None and not self._is_gathered):
            return
        stored, memory = self.settings["memory"], self.whole(self._memory)
        columns = slice(None) if self._columns is None else self._columns.to(stored.device)
        stored[:, columns] = memory

    @property
    def _is_gathered(self) -> bool:
        """Whether this rank knows some parts only, so that all of them have to be gathered."""
        return self.shards is not None and self.shards.is_gathered


def usable(scale: Tensor, norm: Tensor, skip: Tensor | None) -> Tensor:
    """Return the scale, or 1 where the weights must stay as they are.

    Weights whose norm is zero or not finite have no direction to be scaled along; one NaN must not
    spread to every weight that shares its norm. A step that GradScaler skips changes nothing.
    """
    good = torch.isfinite(scale) & torch.isfinite(norm)
    if skip is not None:
        good = good & (skip == 0)
    return torch.where(good, scale, 1.0)
