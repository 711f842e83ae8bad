"""The controller: an optimizer around any optimizer, which controls the norm of its weights.

``control_`` is the whole method in four lines. ``NormControl`` decides when they run. This file
does not know how weights are measured and multiplied (``steppers``), or grouped (``groups``).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from operator import attrgetter, is_
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from normcontrol.distributed.layouts import refuse_zero_redundancy
from normcontrol.distributed.sharing import NORM_GROUP_LOST, Sharing
from normcontrol.groups import changes
from normcontrol.groups.build import adopt, measure_references, weight_sets
from normcontrol.groups.clock import Clock
from normcontrol.groups.members import Controlled
from normcontrol.groups.readings import NOTHING_CONTROLLED, Reading, readings
from normcontrol.groups.sets import WeightSet
from normcontrol.groups.settings import Group, check_decay, setting_names, with_defaults
from normcontrol.groups.state import (
    refuse_other_entries,
    restored_state,
    saved_state,
    state_of,
    unchanged_on_error,
)
from normcontrol.groups.turns import Turns, check_pieces, may_move
from normcontrol.law import Law
from normcontrol.schedule import Value
from normcontrol.steppers.stepper import NO_SCALER, PlainStepper, Scaler, Stepper, evaluated
from normcontrol.warn import warn
from normcontrol.wrapper import Wrapper, not_compiled, not_compiled_before

BUILT = {"sets", "_before", "_after", "stepper", "sharing", "_layout", "_has_shards"}
BUILT |= set(Scaler._fields)
"""Attributes of a controller that are built again, not pickled."""
DTYPE = attrgetter("dtype")


def control_(s: WeightSet, stepper: Stepper, skip: Tensor | None = None) -> tuple[Any, Any]:
    """Weight norm control of one set, in place: equation 3 of the paper for the proportional law.

    ``skip`` is GradScaler's ``found_inf``. Returns the target and the scale. The laws are in
    ``law.py``; a stepper may have multiplied by a guess already, see its contract.
    """
    norm = stepper.measure(s)  #                     ||theta_t||
    target, rate = s.goal  #                         r_t ||theta_0||, k_t
    scale = s.apply_law(norm, target, rate, skip)  # 1 - k_t (1 - r_t ||theta_0|| / ||theta_t||)
    stepper.multiply_(s, scale)  #                   theta_t <- scale * theta_t
    return target, scale


class NormControl(Wrapper):
    """Controls the norm of the weights that ``optimizer`` trains.

    Args:
        optimizer: any torch optimizer; it must not decay the weights that are controlled.
        ratio: target norm / initial norm, r_t: a number, a schedule, or a function of the step.
        norm: the target norm itself, in place of a ratio.
        rms: the target root-mean-square of the weights, in place of a ratio.
        gain: the target norm in units of sqrt(outputs): about the norm of a row.
        hold: as ``ratio``, but relative to the norm of gain 0.8 if that is larger. The default
            target is ``hold=1.0``.
        rate: the fraction of the distance to the target that each step covers, k_t in [0, 1]. The
            norm follows with a time constant of 1/rate steps.
        scope: which weights share a norm: "global" (the paper), "group", "tensor", "row", "col", or
            a tuple of axes.
        law: "proportional" (the paper), "upper" or "lower" (bounds), "band(0.5)" (no change between
            half the target and the target), "projection" (on target at each step), "integral"
            (CPR), or a function: ``law.py``.
        order: "after" the optimizer's step (Algorithm 1) or "before" it, as torch's AdamW decays.
        size: what is controlled: "norm", "spectral", "spectral-exact", or a function of a tensor.
        start: the step at which control starts; the norm at that step is the reference of a ratio.
            "inflection": start when the growth of the norm slows down. "every step": the reference
            is the norm before each step.
        relative_step: the length of the optimizer's updates as a fraction of the target norm, in
            place of their own length.
        min_relative_step: the smallest length of the updates, as such a fraction; longer updates
            stay as they are.
        cautious: scale only the weights that the optimizer's update moved towards zero.
        controlled: which tensors: "matrices" (two or more dimensions, so not biases and norm
            layers), True (all), False (none), or a function of name and tensor.
        outputs: for a gain, the axes that count the outputs of a tensor, if not the first one.
        norm_group: the process group whose ranks share the norms of the scopes "global" and
            "group", if the tensors do not contain this information (FSDP1, ZeRO, pipeline stages).
            DTensors (FSDP2, tensor parallel) need none. It is not pickled or saved.
        stepper: for extensions: a function of the optimizer and the clock that returns the object
            that carries out the steps.

    A parameter group may give these settings itself, by the same names. They are stored in
    ``group["control"]``, where you can change them. A number in a tensor is read once: to change it
    in place later, give a function that returns the tensor, ``rate=lambda step: tensor``.

    >>> model = torch.nn.Linear(4, 4)
    >>> opt = NormControl(torch.optim.SGD(model.parameters(), lr=0.1), ratio=1.5, rate=1.0)
    >>> initial = model.weight.norm()
    >>> _ = model(torch.ones(2, 4)).sum().backward()
    >>> opt.step()
    >>> torch.allclose(model.weight.norm(), 1.5 * initial)
    True
    """

    clock: Clock
    """The number of steps that were made."""
    sets: list[WeightSet]
    """The weights under control, sorted by what they share."""
    sharing: Sharing
    """The ranks that share norms."""
    stepper: Stepper
    """How steps are carried out."""

    @not_compiled
    @torch.inference_mode(False)  # steps write the tensors that it makes
    def __init__(
        self,
        optimizer: Optimizer,
        *,
        ratio: Value | None = None,
        norm: Value | None = None,
        rms: Value | None = None,
        gain: Value | None = None,
        hold: Value | None = None,
        rate: Value = 0.1,
        scope: Any = "global",
        law: str | Law = "proportional",
        order: str = "after",
        size: Any = "norm",
        start: Any = 0,
        relative_step: Value | None = None,
        min_relative_step: Value | None = None,
        cautious: bool = False,
        controlled: Controlled = "matrices",
        outputs: Any = None,
        norm_group: Any = None,
        stepper: Callable[[Optimizer, Clock], Stepper] | None = None,
    ) -> None:
        given: dict[str, Any] = {"ratio": ratio, "norm": norm, "rms": rms, "gain": gain}
        given |= {"hold": hold, "rate": rate, "scope": scope, "law": law, "order": order}
        given |= {"start": start, "size": size}
        given |= {"cautious": cautious, "outputs": outputs, "controlled": controlled}
        given |= {"relative_step": relative_step, "min_relative_step": min_relative_step}
        super().__init__(optimizer)
        refuse_other_entries(self.param_groups)
        self._settings, self._make_stepper = with_defaults(given), stepper or PlainStepper
        self._norm_group, self._norm_group_lost = norm_group, False
        self._turns = Turns()
        self._fresh = True  # whether the reference is still to be taken at the first step
        device = next((p.device for g in optimizer.param_groups for p in g["params"]), None)
        self.clock = Clock(torch.zeros((), dtype=torch.int64, device=device))
        self.stepper, self.sets = self._make_stepper(optimizer, self.clock), []
        self._names, self._layout = setting_names(), changes.layout_of([])
        self._seen: list[Any] = []  # the settings of every group as they were last checked
        self._given_as = frozenset(self._names) - optimizer.defaults.keys()
        with unchanged_on_error(self.param_groups):
            for index in range(len(self.param_groups)):
                self._adopt(index)
            self._build()
        self._zero_hook = refuse_zero_redundancy(self) if norm_group is None else None
        if not self.sets:
            warn(NOTHING_CONTROLLED)

    @overload
    def step(self, closure: None = None, **arguments: Any) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], **arguments: Any) -> float: ...
    def step(self, closure: Callable[[], float] | None = None, **arguments: Any) -> float | None:
        """Make one step of the optimizer, which gets ``arguments``, and one of the controller."""
        if arguments or self.stepper.arguments:
            self.stepper.take_arguments(arguments)
        # The usual step is ours: the tensors are those of the last step, and some rate is not zero.
        compiling = torch.compiler.is_compiling()
        lr = None if compiling else next(iter(self.optimizer.param_groups), {}).get("lr")
        usual = type(lr) is float and lr != 0 and not self._has_changed()
        if not usual and (self._fresh or not compiling) and not self._is_ours():
            given = (self.__dict__.get(name) for name in Scaler._fields)
            return self.stepper.optimizer_step(closure, Scaler(*given))
        scaler, loss = NO_SCALER, None
        counted: Tensor | int = 0
        fresh, calls = self._fresh, self.clock.calls
        self._refresh(usual)
        stepper = self.stepper
        if "found_inf" in self.__dict__:
            scaler = Scaler(self.__dict__.get("grad_scale"), self.found_inf.reshape(()))
        try:
            if closure is not None and (self._before or stepper.needs_gradients):
                loss, closure = evaluated(closure)
            counted = self._count(scaler.found_inf)
            if stepper.needs_gradients:
                stepper.begin()
            with torch.set_grad_enabled(self.optimizer.defaults.get("differentiable", False)):
                for s in self.sets:
                    s.choose_goal(self.clock)
            self._control(self._before, scaler.found_inf)
            stepped = stepper.step(closure, scaler)
        except BaseException:  # such as an error in the closure: this step was not made
            self._fresh, self.clock.calls = fresh, calls
            self.clock.step.sub_(counted)
            raise
        self._control(self._after, scaler.found_inf)
        return stepped if loss is None else loss

    def _count(self, found_inf: Tensor | None) -> Tensor | int:
        """Count a step, in place and on its device; on the host if the host can know it."""
        clock = self.clock
        counted = 1 if found_inf is None else (found_inf == 0).to(clock.step)
        clock.step.add_(counted)
        if torch.compiler.is_compiling():
            clock.known = False
        else:
            captured = clock.step.is_cuda and torch.cuda.is_current_stream_capturing()
            clock.known = clock.known and found_inf is None and not captured
            clock.calls += 1
        return counted

    def _control(self, sets: list[WeightSet], found_inf: Tensor | None) -> None:
        """Control these sets."""
        if not sets:
            return
        with torch.set_grad_enabled(self.optimizer.defaults.get("differentiable", False)):
            if self._has_shards:
                self.stepper.sum_over_ranks(sets)
            for s in sets:
                skip = None if found_inf is None else found_inf.to(s.initial.device)
                s.noted = control_(s, self.stepper, skip)
                if s.start is not None:
                    s.update_reference(self.clock, skip)

    def norms(self) -> dict[str, Reading]:
        """Return the norm, target, ratio and last scale of everything that is controlled.

        The last step computed them, so this call does not wait for the device; reading a value
        does. The norm is that of the weights after they were scaled; with ``cautious``, before.
        With sharded weights the values are those of the whole weights. Norms of rows that lie on
        one rank each are gathered, so make this call on every rank.

        >>> params = [torch.nn.Parameter(torch.ones(3, 3))]
        >>> opt = NormControl(torch.optim.SGD(params, lr=0.1), ratio=2.0)
        >>> {name: (r.norm.item(), r.target.item()) for name, r in opt.norms().items()}
        {'global': (3.0, 6.0)}
        """
        self._catch_up()
        return readings(self.sets, self.param_groups, self.clock)

    def report(self) -> str:
        """Return a table of the controlled tensors with norms and targets. Waits for the device."""
        from normcontrol.watch.report import report

        return report(self)

    @torch.inference_mode(False)
    def add_param_group(self, param_group: Group) -> None:
        """Add a group. The reference of its tensors is their current norm."""
        if self._has_changed():
            self._rebuild()
        self.optimizer.add_param_group(param_group)
        try:
            with unchanged_on_error(self.param_groups[-1:]):
                self._adopt(len(self.param_groups) - 1)
                self._take_over_edits()
        except Exception:
            self.param_groups.pop()
            raise

    def pack(self) -> dict[str, Any]:
        """Return the optimizer's state and groups, with the controller's entry: plain data."""
        self._catch_up()
        with unchanged_on_error(self.param_groups):  # edits are saved as they will be used
            changes.take_over_edits(self.optimizer, self._layout, self._seen, self._fresh)
        self._hand_over()
        return saved_state(super().pack())

    @torch.inference_mode(False)  # steps write what it makes
    def unpack(self, state_dict: dict[str, Any]) -> None:
        """Load a state, with its exact reference norms. If it does not fit, nothing changes."""
        before = self.param_groups
        with unchanged_on_error(before):
            changes.put_entries_back(before, self._layout)
            if changes.has_entries(before) and self._has_changed():
                # The state must fit the tensors as they are now.
                measure_references(before, self._find_sharing())
            state_dict, step = restored_state(state_dict, self.optimizer)
            super().unpack(state_dict)
        self._turns.replace(before, self.param_groups)
        self._go_on_from(step)
        self._build()

    def _go_on_from(self, step: Tensor) -> None:
        """Take over the number of steps of a state that was loaded."""
        self._set_step(step.detach().to(torch.int64, copy=True))
        self.clock.calls, self.clock.known = int(step.item()), True
        self._fresh = self.clock.calls == 0

    @property
    def norm_group(self) -> Any:
        """The process group whose ranks share the norms. A pickled or copied optimizer has none."""
        return self._norm_group

    @norm_group.setter
    def norm_group(self, group: Any) -> None:
        before, self._norm_group = self._norm_group, group
        try:
            self._build()
        except Exception:
            self._norm_group = before
            raise
        self._norm_group_lost = False

    def _catch_up(self) -> None:
        """Take over what has changed since the last step, where that needs no other rank.

        Before the first step the current weights are the reference: others may have been loaded.
        Edited settings wait for the step.
        """
        if self._norm_group is not None:
            return
        changed = self._has_changed()
        if not changed and self._fresh and not self._has_shards:
            changed = not any(map(self._is_edited, count(), self.param_groups))
        if changed:
            self._rebuild()

    def _adopt(self, index: int) -> None:
        """Complete and check a group's settings, and measure the reference norms of its weights."""
        adopt(index, self._settings, self.optimizer, self._find_sharing(), self.clock.step)

    def _hand_over(self) -> None:
        """Store in the groups what the next step needs."""
        self.stepper.hand_over()
        for s in self.sets:
            s.store_memory()

    def _find_sharing(self) -> Sharing:
        return Sharing((p for g in self.param_groups for p in g["params"]), self._norm_group)

    def _set_step(self, step: Tensor) -> None:
        """Store this tensor as the step of the clock and of all groups, which share it.

        It is on the device of the reference norms.
        """
        references = (state_of(group).reference for group in self.param_groups)
        home = next((r.device for r in references if len(r)), step.device)
        self.clock.step = step = step.to(home)
        for group in (*self.param_groups, *self._turns.known):
            state_of(group)["step"] = step

    @not_compiled
    def _build(self, seen: list[Any] | None = None) -> None:
        """Sort the controlled weights into sets, and prepare the stepper for them.

        What can be refused is refused before anything is stored: a user may go on after an error.
        """
        self._hand_over()
        sharing = self._find_sharing()
        sets = weight_sets(self.param_groups, sharing)
        stepper = self._chosen_stepper()
        stepper.check(sets)
        self.sharing, self.sets, self.stepper = sharing, sets, stepper
        self._before = [s for s in self.sets if s.order == "before"]
        self._after = [s for s in self.sets if s.order == "after"]
        self._has_shards = any(s.shards is not None for s in self.sets)
        self._turns.note(self.param_groups)
        self.stepper.prepare(self.sets, self.sharing)
        self._seen = seen or changes.checked_settings(self.param_groups, self._layout, self._seen)
        self._layout = changes.layout_of(self.param_groups)

    def _chosen_stepper(self) -> Stepper:
        """Return the stepper, or another one if the tensors need it, as on another device."""
        now, other = self.stepper, self._make_stepper(self.optimizer, self.clock)
        if type(other) is type(now) and other.reason in (None, now.reason):
            return now
        other.arguments = now.arguments
        return other

    def _refresh(self, usual: bool) -> None:
        """Measure the reference at the first step. Rebuild what has changed since the last step."""
        if self._norm_group_lost:
            raise ValueError(NORM_GROUP_LOST)
        if not usual and self._has_changed():
            self._rebuild()
        for index, group in enumerate(self.optimizer.param_groups):
            if group.get("weight_decay"):
                check_decay(index, group, self.optimizer)
            if self._is_edited(index, group):
                self._take_over_edits()
        if self._fresh:
            self._begin()

    @not_compiled_before("2.7")  # it cannot trace a lookup in a subclass of dict
    def _is_edited(self, index: int, group: Group) -> bool:
        now = [*map(group["control"].get, self._names)]
        return now != [*self._seen[index].values()] or not self._given_as.isdisjoint(group)

    def _has_changed(self) -> bool:
        """Notice tensors that were changed by hand: replaced, added, removed, reshaped, frozen, of
        another dtype; and groups that were replaced."""
        params: list[Tensor] = []
        looks: list[Any] = []
        dicts: list[Any] = []
        seen = self._layout
        for group in self.optimizer.param_groups:
            params += group["params"]
            looks.append(len(params))
            dicts += group, group.get("control")
        for p in params:
            looks.append(p.shape if p.requires_grad else None)
        looks += map(DTYPE, params)
        is_same = looks == seen.looks and all(map(is_, params, seen.params))
        return not is_same or not all(map(is_, dicts, seen.dicts))

    @not_compiled
    @torch.inference_mode(False)  # it may be called to read norms, but steps write its tensors
    def _rebuild(self) -> None:
        self._hand_over()
        step = changes.loaded_step(self.optimizer, self._layout)
        if step is not None:
            self._turns = Turns()
            self._go_on_from(step)
        with unchanged_on_error(self.param_groups):
            for index in changes.new_groups(self.param_groups):
                self._adopt(index)
            seen = changes.take_over_edits(self.optimizer, self._layout, self._seen, self._fresh)
            before = None if self._fresh else self._layout
            changes.carry_over_references(self.optimizer, before, self.sets, self._find_sharing())
            self._build(seen)

    @not_compiled
    def _take_over_edits(self) -> None:
        """Check settings that were changed since the last step, and take them over."""
        with unchanged_on_error(self.param_groups):
            seen = changes.take_over_edits(self.optimizer, self._layout, self._seen, self._fresh)
            if self._fresh:
                measure_references(self.param_groups, self._find_sharing(), are_known=True)
            self._build(seen)

    @not_compiled
    def _begin(self) -> None:
        """Measure theta_0, the reference: weights may have been loaded since construction."""
        if self._zero_hook is not None:
            self._zero_hook.remove()
        measure_references(self.param_groups, self._find_sharing())
        self._set_step(self.clock.step)
        self._build()
        self._fresh = False

    @not_compiled
    def _is_ours(self) -> bool:
        """Return whether this call is a step of the controller too; see ``groups/turns.py``."""
        groups = self.optimizer.param_groups
        if not self._turns.are_usual(groups):
            if not self._turns.include(groups, self.sets, self.stepper.clips):
                return False
            if not self._fresh and (self._norm_group is not None or self._turns.hidden(groups)):
                check_pieces(groups, self.sets)
                self._build()
        params = [p for group in groups for p in group["params"]]
        return may_move(groups, self._fresh) or not self.sharing.all_zero(params)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: all but hooks, and objects that can be built again."""
        self._catch_up()
        self._hand_over()
        lost = self._norm_group_lost or self._norm_group is not None
        state = {k: v for k, v in super().__getstate__().items() if k not in BUILT}
        state["_seen"] = changes.checked_settings(self.param_groups, self._layout, self._seen)
        return {**state, "_norm_group": None, "_norm_group_lost": lost, "_zero_hook": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.stepper = self._make_stepper(self.optimizer, self.clock)
        self.sharing, self.sets, self._layout = Sharing(), [], changes.layout_of(self.param_groups)
        if not self._norm_group_lost:
            self._build()
