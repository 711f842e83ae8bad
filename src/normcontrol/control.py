"""The controller: an optimizer around any optimizer, which after (or before) its step holds the
norm of the weights.

``control_`` is the whole method in four lines. ``NormControl`` says when they run; it composes the
optimizer it is given and never looks inside its step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from normcontrol.distributed.layouts import check_recognised
from normcontrol.distributed.sharding import Spread, all_agree, local, measure_together, whole_norms
from normcontrol.groups.clock import Clock
from normcontrol.groups.sets import Reading, WeightSet, members_of, weight_sets
from normcontrol.groups.settings import (
    Group,
    adapted,
    check_decay,
    check_group,
    check_references,
    complete,
    restored,
)
from normcontrol.law import Law
from normcontrol.mechanisms.size import size_of
from normcontrol.mechanisms.update import CautiousWeights, resize_
from normcontrol.schedule import Schedule, Value, trace
from normcontrol.schedule_text import to_text
from normcontrol.scope import Weights, check_axes, join, parse_scope

LOST = "lost"
"""What pickling and copying leave of a process group."""


def control_(
    weights: Weights,
    law: Law,
    ratio: Tensor | float,
    reference: Tensor,
    rate: Tensor | float,
    step: Tensor,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight norm control, in place: equation 3 of the paper when ``law`` is proportional.

    A norm that is zero or not finite has no direction to be scaled along: such weights are left as
    they are, so that one NaN does not spread to every weight that shares its norm. ``skip`` is
    GradScaler's ``found_inf``.
    """
    parts = weights.measure()
    norm = join(parts, weights.scope)  #             ||theta_t||
    target = ratio * reference  #                    r_t ||theta_0||
    scale = law(norm, target, rate)  #               1 - k_t (1 - r_t ||theta_0|| / ||theta_t||)
    scale = (scale + (norm - norm)).nan_to_num(nan=1.0, posinf=1.0, neginf=1.0)
    if skip is not None:
        scale = torch.where(skip == 0, scale, 1.0)
    weights.apply_(scale, step)  #                   theta_t <- scale * theta_t
    return parts, target, scale


class NormControl(Optimizer):
    """Holds the norm of the weights that ``optimizer`` trains at a value you choose and schedule.

    Args: optimizer: any torch optimizer; it must not decay the weights that are controlled. ratio:
        the target norm as a multiple of the initial norm, r_t: a number, a schedule, or a function
        of the step.
            The default is the paper's: from 1 to 2 over 2,500 steps, then constant.
        norm: the target norm itself, in place of a ratio. rms: the target root-mean-square of the
        weights, in place of a ratio. rate: how much of the way to the target each step goes, k_t in
        [0, 1]; the norm follows with a time constant
            of 1/rate steps.
        scope: which weights share a norm: "global" (the paper), "group", "tensor", "row", "col", or
        a tuple of axes. law: "proportional" (the paper), "upper" or "lower" (one-sided bounds),
        "band(0.5)" (free between half the target and
            it), "projection" (on target at once), or "integral" (an upper bound with memory, CPR).
        order: "after" the optimizer's step (Algorithm 1) or "before" it, as torch's AdamW decays.
        size: what is held: the "norm", the "spectral" norm, or a function of a tensor that gives a
        number for each part. start: hold the norm from this step on, relative to what it is then;
        or "inflection", when its growth slows down. relative_step: the length of the optimizer's
        steps as a part of the target norm, in place of their own. cautious: scale only those
        weights that the optimizer's step moved towards zero. norm_group: the process group whose
        ranks share the norms of the scopes "global" and "group", where that cannot be
            seen from the tensors (FSDP1, ZeRO, pipeline stages); DTensors (FSDP2, tensor parallel)
            need none. It is not pickled or saved.

    A parameter group may override each of these, and say ``controlled=True`` or ``False``. By
    default tensors with two or more dimensions are controlled; biases and norm layers are left
    alone.

    >>> model = torch.nn.Linear(4, 4)
    >>> opt = NormControl(torch.optim.SGD(model.parameters(), lr=0.1), ratio=1.5, rate=1.0)
    >>> initial = model.weight.norm()
    >>> _ = model(torch.ones(2, 4)).sum().backward()
    >>> opt.step()
    >>> torch.allclose(model.weight.norm(), 1.5 * initial)
    True
    """

    _KEPT: tuple[str, ...] = (
        "optimizer",
        "_settings",
        "_fresh",
        "_clock",
    )  # what a copy or a pickle takes along

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        ratio: Value | None = None,
        norm: Value | None = None,
        rms: Value | None = None,
        rate: Value = 1e-2,
        scope: Any = "global",
        law: str = "proportional",
        order: str = "after",
        size: Any = "norm",
        start: Any = 0,
        relative_step: Value | None = None,
        cautious: bool = False,
        norm_group: Any = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"NormControl wraps a torch.optim.Optimizer, but got {type(optimizer).__name__}. "
                "Construct the optimizer first: "
                "NormControl(torch.optim.SGD(model.parameters(), lr=0.1)). In JAX, put "
                "normcontrol.optax.control_norm last in the chain."
            )
        if isinstance(optimizer, NormControl):
            raise TypeError(
                "The optimizer is under norm control already; give its settings there, by group if "
                "need be."
            )
        given = {
            "ratio": ratio,
            "norm": norm,
            "rms": rms,
            "rate": rate,
            "scope": scope,
            "law": law,
            "order": order,
        }
        given |= {
            "size": size,
            "start": start,
            "relative_step": relative_step,
            "cautious": cautious,
        }
        self._norm_group = norm_group
        self.__setstate__(
            {
                "optimizer": optimizer,
                "_settings": given,
                "_fresh": True,
                "_clock": Clock(),
                "_sets": [],
            }
        )
        for index in range(len(self.param_groups)):
            self._adopt(index)
        self._build()
        if not self._sets:
            raise ValueError(
                "Nothing would be controlled: every tensor that could be is frozen "
                "(requires_grad=False). Unfreeze what is to be trained "
                "before constructing the optimizer."
            )

    # What the wrapped optimizer owns stays its own; there is no second copy to fall out of step.
    @property
    def param_groups(self) -> list[Group]:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return getattr(self.optimizer, "_step_supports_amp_scaling", False)

    def __getattr__(self, name: str) -> Any:
        # The optimizer's own methods (schedule-free's train and eval, say); private names and
        # GradScaler's are ours.
        if name.startswith("_") or name in ("optimizer", "found_inf", "grad_scale"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **{key: self.__dict__[key] for key in self._KEPT},
            "_norm_group": None if self._norm_group is None else LOST,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_sets" not in state:  # a copy, or fresh from a pickle
            self._sets: list[WeightSet] = []
            self._spread = Spread(())
            if self._norm_group != LOST:
                self._build()

    @property
    def norm_group(self) -> Any:
        """The process group whose ranks share the norms. Set it again on an optimizer that was
        pickled or copied."""
        return self._norm_group

    @norm_group.setter
    def norm_group(self, group: Any) -> None:
        self._norm_group = group
        self._build()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of the optimizer, and one of the controller."""
        if (self._fresh or not torch.compiler.is_compiling()) and self._is_dry_run():
            return self._inner_step(closure)
        if self._fresh:
            self._begin()
        self._check_unchanged()
        found_inf = self.found_inf.reshape(()) if "found_inf" in self.__dict__ else None
        self._clock.count(self._step, found_inf)

        loss = None
        if closure is not None and self._closure_comes_first():
            with torch.enable_grad():
                loss = closure()
            closure = None
        self._get_ready()
        self._control("before", found_inf)
        self._remember()
        stepped = self._inner_step(closure)
        self._resize()
        self._control("after", found_inf)
        return stepped if loss is None else loss

    def _closure_comes_first(self) -> bool:
        """Whether the gradients must be there before the control, not only before the optimizer's
        step."""
        return any(s.settings["order"] == "before" for s in self._sets)

    def _get_ready(self) -> None:
        """What a subclass does once the gradients are there."""

    def _inner_step(self, closure: Callable[[], float] | None) -> float | None:
        """The wrapped optimizer's step, with GradScaler's scale and overflow flag passed on to
        it."""
        scaler = {
            name: getattr(self, name)
            for name in ("grad_scale", "found_inf")
            if name in self.__dict__
        }
        self.optimizer.__dict__.update(scaler)
        # Hooks on all optimizers see this one; the optimizer inside it must not call them a second
        # time.
        hooks: list[tuple[Any, Any]] = [
            (live, dict(live))
            for live in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
            if live
        ]
        for live, _ in hooks:
            live.clear()
        try:
            return self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        finally:
            for name in scaler:
                del self.optimizer.__dict__[name]
            for live, kept in hooks:
                live.update(kept)

    def _control(self, order: str, found_inf: Tensor | None) -> None:
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
            sets = [s for s in self._sets if s.settings["order"] == order]
            measure_together([s.shards for s in sets])
            for s in sets:
                ratio = s.value(s.kind, 0.0, math.inf, self._clock, self._step)
                rate = s.value("rate", 0.0, 1.0, self._clock, self._step)
                skip = None if found_inf is None else found_inf.to(s.initial.device)
                if s.start is not None:
                    rate = torch.where(s.start.is_active(self._step), rate, 0.0)
                if skip is not None:  # nothing is learnt from an overflow either
                    rate = torch.where(skip == 0, rate, 0.0)
                parts, target, scale = control_(
                    s.weights, s.law, ratio, s.reference, rate, self._step, skip
                )
                if s.start is not None:
                    now = s.start.starts_now(join(parts, s.scope), self._step)
                    s.take_reference(parts, now if skip is None else now & (skip == 0))
                s.last = (parts.detach(), target.detach(), scale.detach())

    @torch.no_grad()
    def _remember(self) -> None:
        """Keep the weights as they are, where a method compares them with what the optimizer's step
        makes of them."""
        for s in self._sets:
            if s.settings["relative_step"] is not None or s.settings["cautious"]:
                s.before = [p.clone() for p in s.params]
                if isinstance(s.weights, CautiousWeights):
                    s.weights.before = s.before

    def _resize(self) -> None:
        for s in self._sets:
            if s.settings["relative_step"] is not None:
                part, ratio = (
                    s.value(name, 0.0, math.inf, self._clock, self._step)
                    for name in ("relative_step", s.kind)
                )
                resize_(s.params, s.before, s.scope, part * ratio * s.reference, self._step)

    def norms(self) -> dict[str, Reading]:
        """The norm, target, ratio to the initial norm and last factor of everything that is
        controlled.

        All of it was computed in the last step: no pass over the weights is made, and no device
        waited for until you read a value. With ``order="after"`` the norm is that of the weights as
        they are now; with ``"before"``, of the weights as they were when the step had just scaled
        them. Under sharding they are the norms of the whole weights, the same on every rank; with
        scopes of rows or slices that lie on one rank each, this call gathers them, so make it on
        every rank.

        >>> opt = NormControl(torch.optim.SGD([torch.nn.Parameter(torch.ones(3, 3))], lr=0.1), ratio=2.0)
        >>> {name: (r.norm.item(), r.target.item()) for name, r in opt.norms().items()}
        {'global': (3.0, 6.0)}
        """
        readings: dict[str, Reading] = {}
        for s in self._sets:
            whole = self._reading(s)
            if s.scope.joint:
                index = next(i for i, group in enumerate(self.param_groups) if group is s.settings)
                readings["global" if s.scope.name == "global" else f"group {index}"] = whole
                continue
            sizes = s.scope.sizes(s.params)
            values = whole if s.shards is None else s.shards.whole(torch.stack(whole))
            for name, *pieces in zip(s.names, *(v.split(sizes) for v in values), strict=True):
                readings[name] = Reading(
                    *(p.reshape(()) if s.scope.axes is None else p for p in pieces)
                )
        return readings

    @torch.no_grad()
    def _reading(self, s: WeightSet) -> Reading:
        schedule = s.settings[s.kind]
        return s.reading(
            schedule.at(self._step.to(s.initial.dtype), s.settings)
            if isinstance(schedule, Schedule)
            else schedule
        )

    def report(self) -> str:
        """A table of who is controlled, at which norm, and towards what. Reading it waits for the
        device."""
        from normcontrol.watch.report import report

        return report(self)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; the reference of its tensors is their norm now."""
        self.optimizer.add_param_group(param_group)
        try:
            self._adopt(len(self.param_groups) - 1)
            self._build()
        except Exception:
            self.param_groups.pop()
            raise

    @torch.compiler.disable
    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with the controller's settings, step and reference norms in its
        groups: plain data."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        packed = self.optimizer.state_dict()
        packed["param_groups"] = [
            {key: to_text(value) for key, value in group.items()}
            for group in packed["param_groups"]
        ]
        for after in self._optimizer_state_dict_post_hooks.values():
            packed = after(self, packed) or packed
        return packed

    @torch.compiler.disable
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; nothing is changed when it does not fit. The stored reference norms are
        taken exactly."""
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        saved = state_dict["param_groups"]
        have, got = [len(g["params"]) for g in self.param_groups], [len(g["params"]) for g in saved]
        if have != got:
            raise ValueError(
                f"The state is of groups with {got} tensors, but this optimizer has groups with "
                f"{have}: they are of different "
                "models or groupings. Build the groups as they were when the state was saved."
            )
        if all("norm0" in group for group in saved):
            groups = [
                restored(i, *pair)
                for i, pair in enumerate(zip(saved, self.param_groups, strict=True))
            ]
            step = saved[0]["control_step"].detach().to(self._step, copy=True)
        else:
            groups = [adapted(*pair) for pair in zip(saved, self.param_groups, strict=True)]
            step = torch.zeros_like(self._step)
            warnings.warn(
                "The loaded state holds no reference norms: it was saved by an optimizer without "
                "norm control. The weights as they "
                "are at the next step become the reference, and the control's schedules start "
                "there. To go on from an earlier "
                "reference instead, set norm= or rms=, which need none.",
                stacklevel=2,
            )
        self.optimizer.load_state_dict({**state_dict, "param_groups": groups})
        for group in self.param_groups:
            group["control_step"] = step
            group["norm0"] = group["norm0"].to(step.device)
        self._clock = Clock(int(step.item()))
        self._fresh = self._clock.calls == 0
        self._build()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _adopt(self, index: int) -> None:
        """Complete and check a group's settings, and take the norms of its weights as their
        reference."""
        group = self.param_groups[index]
        complete(group, self._settings)
        check_group(index, group, self.optimizer)
        names, params = members_of(self.param_groups[: index + 1])[index]
        for name, p in zip(names, params, strict=True):
            if p.is_meta:
                raise ValueError(
                    f"{name} is on the meta device, so it has no norm yet. Materialise and "
                    "initialise the model first, then "
                    "construct the optimizer."
                )
            check_axes(parse_scope(group["scope"]), name, p)
        # An integer: torch.compile loses in-place additions to a 0-d float64 tensor, which it takes
        # for a Python number.
        first = self.param_groups[0]
        device = next(
            (p.device for g in self.param_groups for p in g["params"]), None
        )  # a rank may hold nothing of a group
        group["control_step"] = (
            first["control_step"] if index else torch.zeros((), dtype=torch.int64, device=device)
        )
        self._capture(group, names, params)

    def _capture(self, group: Group, names: list[str], params: list[Tensor]) -> None:
        scope, spread = parse_scope(group["scope"]), self._look_around()
        check_recognised(names, params, scope, spread, was=group.get("norm0"))
        if (
            spread.told is not None and scope.joint
        ):  # its norm is one number, from which a frozen tensor's could not be taken out
            params = [p for p in params if p.requires_grad]
        with torch.no_grad():
            unusual = group["size"] == "spectral" and params and not spread.is_shared
            group["norm0"] = (
                size_of("spectral")(params, scope)
                if unusual
                else whole_norms(params, scope, spread)
            )
        check_references(group, names, params)

    def _look_around(self) -> Spread:
        return Spread((p for group in self.param_groups for p in group["params"]), self._norm_group)

    @torch.compiler.disable
    def _build(self) -> None:
        """Sort the controlled weights into the sets that share settings."""
        self._spread = self._look_around()
        self._sets = weight_sets(self.param_groups, self._spread)
        self._step = self.param_groups[0]["control_step"]
        self._trainable = [p.requires_grad for g in self.param_groups for p in g["params"]]
        for s in self._sets:
            for schedule in (s.settings[s.kind], s.settings["rate"]):
                if isinstance(
                    schedule, trace
                ):  # its table must be on the device before a graph is captured
                    schedule.value(self._step.to(s.initial.device, s.initial.dtype))

    def _check_unchanged(self) -> None:
        """Notice what people change in place: frozen tensors, and a decay that has come back."""
        for index, group in enumerate(self.param_groups):
            if group.get("weight_decay"):
                check_decay(index, group, self.optimizer)
        if self._norm_group == LOST:
            raise ValueError(
                "This optimizer was pickled or copied, and a process group cannot be: its "
                "norm_group is lost, and its norms would be this "
                "rank's alone. Set opt.norm_group to the group again."
            )
        if self._trainable != [p.requires_grad for g in self.param_groups for p in g["params"]]:
            if self._norm_group is not None:
                raise ValueError(
                    "A tensor was frozen or thawed after the first step, under norm_group: what it "
                    "had in the shared reference norm is not "
                    "known any more. Construct the optimizer anew, so that the reference is that "
                    "of the weights it trains."
                )
            self._build()

    @torch.compiler.disable
    def _begin(self) -> None:
        """The first step: the weights as they are now, loaded, broadcast or moved since
        construction, are theta_0."""
        for group, (names, params) in zip(
            self.param_groups, members_of(self.param_groups), strict=True
        ):
            self._capture(group, names, params)
        step = self._step.to(next(g["norm0"].device for g in self.param_groups if len(g["norm0"])))
        for group in self.param_groups:
            group["control_step"] = step
        self._fresh = False
        self._build()

    @torch.compiler.disable
    def _is_dry_run(self) -> bool:
        """Whether this step only fills the optimizer's state, as torch.distributed.checkpoint makes
        it do whenever it finds none: the learning rate and all gradients are zero. Control must not
        move the weights then."""
        for group in self.param_groups:
            lr = group.get("lr", 1)
            if (isinstance(lr, Tensor) and not lr.is_cpu and not self._fresh) or float(
                lr
            ) != 0:  # reading it would wait for the device
                return False
        params = [p for group in self.param_groups for p in group["params"]]
        grads = [local(p.grad) for p in params if p.grad is not None]
        still = bool(grads or not params) and not any(bool(g.any()) for g in grads)
        return all_agree(still, self._spread)
