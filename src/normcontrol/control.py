"""The controller: an optimizer around any optimizer, which after (or before) its step holds the norm of the weights.

``control_`` is the whole method in four lines. ``NormControl`` says for which weights, towards what, and when; it
composes the optimizer it is given and never looks inside its step.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from normcontrol.law import LAWS
from normcontrol.policy import is_controlled
from normcontrol.schedule import Schedule, Value, as_schedule, check, custom, from_plain, linear, lr_times, to_plain, trace
from normcontrol.scope import Scope, apply_, check_axes, join, measure, parse_scope

PAPER_RATIO = linear(1.0, 2.0, steps=2500)
"""The paper's Figure 1 and best run: the norm doubles over 2,500 steps and stays there."""

TARGETS = ("ratio", "norm", "rms")
SHARED = (*TARGETS, "rate", "scope", "law", "order")


class Reading(NamedTuple):
    """What the controller saw and did at its last step: tensors, so that nothing waits until you read one."""

    norm: Tensor
    target: Tensor
    ratio: Tensor
    scale: Tensor


def control_(
    params: Sequence[Tensor],
    scope: Scope,
    law: str,
    ratio: Tensor | float,
    reference: Tensor,
    rate: Tensor | float,
    step: Tensor,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight norm control, in place: equation 3 of the paper when ``law`` is "proportional".

    A norm that is zero or not finite has no direction to be scaled along: such weights are left as they are, so that
    one NaN does not spread to every weight that shares its norm. ``skip`` is GradScaler's ``found_inf``.
    """
    parts = measure(params, scope)
    norm = join(parts, scope)  #                       ||theta_t||
    target = ratio * reference  #                      r_t ||theta_0||
    scale = LAWS[law](norm, target, rate)  #           1 - k_t (1 - r_t ||theta_0|| / ||theta_t||)
    usable = torch.isfinite(scale + norm) if skip is None else torch.isfinite(scale + norm) & (skip == 0)
    scale = torch.where(usable, scale, torch.ones_like(scale))
    apply_(params, scope, scale, step)  #              theta_t <- scale * theta_t
    return parts, target, scale


class WeightSet:
    """Weights under one setting: those of one group, or of all groups that share the global norm."""

    def __init__(self, groups: list[dict[str, Any]], names: list[str], params: list[Tensor], initial: Tensor) -> None:
        self.groups = groups
        self.settings = groups[0]
        self.names = names
        self.params = params
        self.initial = initial  # the norm of every part at theta_0
        self.scope = parse_scope(self.settings["scope"])
        self.kind = target_kind(self.settings)
        self.reference = self._reference()
        self.last: tuple[Tensor, Tensor, Tensor] | None = None

    def _reference(self) -> Tensor:
        """What the scheduled number is a multiple of: the initial norm, 1, or the norm of weights of rms 1."""
        if self.kind == "ratio":
            return join(self.initial, self.scope)
        if self.kind == "norm":
            return torch.ones_like(join(self.initial, self.scope))
        sizes = self.scope.sizes(self.params)
        counts = [math.sqrt(p.numel() / n) for p, n in zip(self.params, sizes, strict=True) for _ in range(n)]
        return join(torch.tensor(counts, dtype=self.initial.dtype, device=self.initial.device), self.scope)

    def reading(self, ratio: Tensor | float) -> Reading:
        initial = join(self.initial, self.scope)
        if self.last is None:
            return Reading(initial, ratio * self.reference, torch.ones_like(initial), torch.ones_like(initial))
        parts, target, scale = self.last
        norm = scale * join(parts, self.scope)  # every law's scale is positive or zero, for rates within [0, 1]
        return Reading(norm, target, norm / initial, scale)

    def parts(self) -> Tensor:
        """The norm of every part now, even where the control joins them."""
        return self.initial if self.last is None else self.last[2] * self.last[0]


class NormControl(Optimizer):
    """Holds the norm of the weights that ``optimizer`` trains at a value you choose and schedule.

    Args:
        optimizer: any torch optimizer; it must not decay the weights that are controlled.
        ratio: the target norm as a multiple of the initial norm, r_t: a number, a schedule, or a function of the step.
            The default is the paper's: from 1 to 2 over 2,500 steps, then constant.
        norm: the target norm itself, in place of a ratio.
        rms: the target root-mean-square of the weights, in place of a ratio.
        rate: how much of the way to the target each step goes, k_t in [0, 1]; the norm follows with a time constant
            of 1/rate steps.
        scope: which weights share a norm: "global" (the paper), "group", "tensor", "row", "col", or a tuple of axes.
        law: "proportional" (the paper), "upper" or "lower" (one-sided bounds), or "projection" (on target at once).
        order: "after" the optimizer's step (Algorithm 1) or "before" it, as torch's AdamW decays.

    A parameter group may override each of these, and say ``controlled=True`` or ``False``. By default tensors with two
    or more dimensions are controlled; biases and norm layers are left alone.

    >>> model = torch.nn.Linear(4, 4)
    >>> opt = NormControl(torch.optim.SGD(model.parameters(), lr=0.1), ratio=1.5, rate=1.0)
    >>> initial = model.weight.norm()
    >>> _ = model(torch.ones(2, 4)).sum().backward()
    >>> opt.step()
    >>> torch.allclose(model.weight.norm(), 1.5 * initial)
    True
    """

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
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"NormControl wraps a torch.optim.Optimizer, but got {type(optimizer).__name__}. Construct the optimizer first: "
                "NormControl(torch.optim.SGD(model.parameters(), lr=0.1))."
            )
        if isinstance(optimizer, NormControl):
            raise TypeError("The optimizer is under norm control already; give its settings there, by group if need be.")
        given = {"ratio": ratio, "norm": norm, "rms": rms, "rate": rate, "scope": scope, "law": law, "order": order}
        self.__setstate__({"optimizer": optimizer, "_settings": given, "_fresh": True, "_calls": 0, "_sets": []})
        for index in range(len(self.param_groups)):
            self._adopt(index)
        self._build()

    # What the wrapped optimizer owns stays its own; there is no second copy to fall out of step.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
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
        # The optimizer's own methods (schedule-free's train and eval, say); private names and GradScaler's are ours.
        if name.startswith("_") or name in ("optimizer", "found_inf", "grad_scale"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in ("optimizer", "_settings", "_fresh", "_calls")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_sets" not in state:  # a copy or an unpickled optimizer
            self._build()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of the optimizer, and one of the controller."""
        if self._fresh:
            if self._is_dry_run():
                return self._inner_step(closure)
            self._begin()
        self._check_unchanged()
        found_inf = getattr(self, "found_inf", None)
        self._step.add_(1 if found_inf is None else 1 - found_inf.to(self._step))
        if not torch.compiler.is_compiling():
            self._calls += 1

        loss = None
        if closure is not None and any(s.settings["order"] == "before" for s in self._sets):
            with torch.enable_grad():
                loss = closure()
            closure = None
        self._control("before", found_inf)
        stepped = self._inner_step(closure)
        self._control("after", found_inf)
        return stepped if loss is None else loss

    def _inner_step(self, closure: Callable[[], float] | None) -> float | None:
        """The wrapped optimizer's step, with GradScaler's scale and overflow flag passed on to it."""
        scaler = {name: getattr(self, name) for name in ("grad_scale", "found_inf") if name in self.__dict__}
        if not scaler:
            return self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        self.optimizer.__dict__.update(scaler)
        try:
            return self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        finally:
            for name in scaler:
                del self.optimizer.__dict__[name]

    def _control(self, order: str, found_inf: Tensor | None) -> None:
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
            for s in self._sets:
                if s.settings["order"] != order:
                    continue
                ratio = self._value(s, s.kind, 0.0, math.inf)
                rate = self._value(s, "rate", 0.0, 1.0)
                skip = None if found_inf is None else found_inf.to(s.initial.device)
                seen = control_(s.params, s.scope, s.settings["law"], ratio, s.reference, rate, self._step, skip)
                s.last = (seen[0].detach(), seen[1].detach(), seen[2].detach())

    def _value(self, s: WeightSet, name: str, low: float, high: float) -> Tensor | float:
        """A setting's value at this step, refused where it can be seen, without waiting for a device, to be wrong."""
        schedule = s.settings[name]
        if not isinstance(schedule, Schedule):
            if callable(schedule):  # put into the group by hand
                schedule = s.settings[name] = custom(schedule)
            else:
                value: Any = schedule
        if isinstance(schedule, Schedule):
            value = schedule.at(self._step.to(s.initial.dtype), s.settings)
        if isinstance(schedule, lr_times) and any(g["lr"] is not s.settings["lr"] and g["lr"] != s.settings["lr"] for g in s.groups):
            raise ValueError(
                f"rate={schedule!r} follows the learning rate, but the groups that share the global norm have different ones: "
                f"{[float(g['lr']) for g in s.groups]}. Use scope='group', so that each group has a norm and a rate of its own."
            )
        if torch.compiler.is_compiling():
            return value
        if isinstance(schedule, trace):
            schedule.note_end(self._calls)
        seen = value if isinstance(value, float | int) else value.item() if value.is_cpu and isinstance(schedule, custom) else None
        if seen is not None and not low <= seen <= high:
            raise ValueError(
                f"{name}={schedule!r} is {seen:g} at step {self._calls}: it must stay within [{low:g}, {high:g}]. "
                "Mend the schedule; the weights were not scaled at this step."
            )
        return value

    def norms(self) -> dict[str, Reading]:
        """The norm, target, ratio to the initial norm and last factor of everything that is controlled.

        All of it was computed in the last step: no pass over the weights is made, and no device waited for until you
        read a value. With ``order="after"`` the norm is that of the weights as they are now; with ``"before"``, of the
        weights as they were when the step had just scaled them.

        >>> opt = NormControl(torch.optim.SGD([torch.nn.Parameter(torch.ones(3, 3))], lr=0.1), ratio=2.0)
        >>> {name: (r.norm.item(), r.target.item()) for name, r in opt.norms().items()}
        {'global': (3.0, 6.0)}
        """
        readings: dict[str, Reading] = {}
        for s in self._sets:
            whole = self._reading(s)
            if s.scope.joint:
                index = next(i for i, g in enumerate(self.param_groups) if g is s.settings)
                readings["global" if s.scope.name == "global" else f"group {index}"] = whole
                continue
            sizes = s.scope.sizes(s.params)
            pieces = [piece.split(sizes) for piece in whole]
            for i, name in enumerate(s.names):
                one = [p[i].reshape(()) if s.scope.axes is None else p[i] for p in pieces]
                readings[name] = Reading(*one)
        return readings

    @torch.no_grad()
    def _reading(self, s: WeightSet) -> Reading:
        schedule = s.settings[s.kind]
        return s.reading(schedule.at(self._step.to(s.initial.dtype), s.settings) if isinstance(schedule, Schedule) else schedule)

    def report(self) -> str:
        """A table of who is controlled, at which norm, and towards what. Reading it waits for the device."""
        from normcontrol.report import report

        return report(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; the reference of its tensors is their norm now."""
        self.optimizer.add_param_group(param_group)
        try:
            self._adopt(len(self.param_groups) - 1)
            self._build()
        except Exception:
            self.param_groups.pop()
            self._build()
            raise

    @torch.compiler.disable
    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with the controller's settings, step and reference norms in its groups: plain data."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        packed = self.optimizer.state_dict()
        packed["param_groups"] = [
            {key: to_plain(value) if isinstance(value, Schedule) else value for key, value in group.items()}
            for group in packed["param_groups"]
        ]
        for after in self._optimizer_state_dict_post_hooks.values():
            packed = after(self, packed) or packed
        return packed

    @torch.compiler.disable
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; nothing is changed when it does not fit. The stored reference norms are taken exactly."""
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        saved = state_dict["param_groups"]
        have, got = [len(g["params"]) for g in self.param_groups], [len(g["params"]) for g in saved]
        if have != got:
            raise ValueError(
                f"The state is of groups with {got} tensors, but this optimizer has groups with {have}: they are of different "
                "models or groupings. Build the groups as they were when the state was saved."
            )
        stored = all("norm0" in g for g in saved)
        groups = [
            self._restored(i, new, old) if stored else self._foreign(new, old)
            for i, (new, old) in enumerate(zip(saved, self.param_groups, strict=True))
        ]
        if not stored:
            warnings.warn(
                "The loaded state holds no reference norms: it was saved by an optimizer without norm control. The weights as they "
                "are at the next step become the reference, and the control's schedules start there. To go on from an earlier "
                "reference instead, set norm= or rms=, which need none.",
                stacklevel=2,
            )
        step, like = (saved[0]["control_step"], self._step) if stored else (torch.zeros_like(self._step), self._step)
        self.optimizer.load_state_dict({**state_dict, "param_groups": groups})
        kept = step.detach().to(like, copy=True)
        for group in self.param_groups:
            group["control_step"] = kept
            group["norm0"] = group["norm0"].to(like.device)
        self._calls = int(kept.item())
        self._fresh = self._calls == 0
        self._build()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _restored(self, index: int, saved: dict[str, Any], live: dict[str, Any]) -> dict[str, Any]:
        group = dict(saved)
        if parse_scope(saved["scope"]) != parse_scope(live["scope"]):
            raise ValueError(
                f"The state of group {index} was saved with scope={saved['scope']!r}, but the optimizer has scope={live['scope']!r}; "
                "reference norms of one scope mean nothing in another. Construct the optimizer with the saved scope."
            )
        if saved["norm0"].shape != live["norm0"].shape:
            raise ValueError(
                f"The state of group {index} holds {saved['norm0'].numel()} reference norms, but {live['norm0'].numel()} are needed: "
                "other tensors were controlled when it was saved. Control the same ones, or start anew without this state."
            )
        for name in (*TARGETS, "rate"):
            group[name] = from_plain(saved[name], live[name])
        return group

    def _foreign(self, saved: dict[str, Any], live: dict[str, Any]) -> dict[str, Any]:
        ours = {key: live[key] for key in (*SHARED, "controlled", "first_lr", "control_step", "norm0")}
        return {**saved, **ours, **({"weight_decay": live["weight_decay"]} if "weight_decay" in live else {})}

    def _adopt(self, index: int) -> None:
        """Complete and check a group's settings, and take the norms of its weights as their reference."""
        group = self.param_groups[index]
        own = {name: group.get(name) for name in TARGETS if group.get(name) is not None}
        default = {name: self._settings[name] for name in TARGETS if self._settings[name] is not None}
        chosen = own or default or {"ratio": PAPER_RATIO}
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} were both given, but weights have one target: give one of them.")
        for name in TARGETS:
            group[name] = as_schedule(chosen[name]) if name in chosen else None
        group["rate"] = as_schedule(group.get("rate", self._settings["rate"]))
        for name in ("scope", "law", "order"):
            group.setdefault(name, self._settings[name])
        group.setdefault("controlled", "matrices")
        group.setdefault("first_lr", group.get("lr"))
        self._check_settings(index, group)

        params = [p for _, p in self._members(index)]
        for name, p in zip(self._names(index), [p for _, p in self._members(index)], strict=True):
            if p.is_meta:
                raise ValueError(
                    f"{name} is on the meta device, so it has no norm yet. Materialise and initialise the model first, then "
                    "construct the optimizer."
                )
            check_axes(parse_scope(group["scope"]), name, p)
        steps = [g["control_step"] for g in self.param_groups if "control_step" in g]
        # An integer: torch.compile loses in-place additions to a 0-d float64 tensor, which it takes for a Python number.
        group["control_step"] = steps[0] if steps else torch.zeros((), dtype=torch.int64, device=group["params"][0].device)
        with torch.no_grad():
            group["norm0"] = measure(params, parse_scope(group["scope"]))
        self._check_references(index, group)

    def _check_settings(self, index: int, group: dict[str, Any]) -> None:
        check(target_kind(group), group[target_kind(group)], 0.0, 1e300, "a norm cannot be negative, infinite or NaN. Give 0 or more.")
        why = "a rate outside [0, 1] overshoots the target (from 2 on it diverges) or runs away from it. Give a rate within [0, 1]."
        check("rate", group["rate"], 0.0, 1.0, why)
        parse_scope(group["scope"])
        if group["law"] not in LAWS:
            raise ValueError(f"law={group['law']!r} is not known: give one of {', '.join(map(repr, LAWS))}.")
        if group["order"] not in ("after", "before"):
            raise ValueError(f"order={group['order']!r} is not known: give 'after' (Algorithm 1) or 'before' (as torch's AdamW decays).")
        closure = inspect.signature(type(self.optimizer).step).parameters.get("closure")
        if group["order"] == "before" and closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"order='before' scales the weights between the closure and the step, but {type(self.optimizer).__name__} calls its "
                "closure itself. Use order='after'."
            )
        self._check_decay(index, group)

    def _check_decay(self, index: int, group: dict[str, Any]) -> None:
        decay = group.get("weight_decay", 0)
        if not isinstance(decay, Tensor) and decay and any(is_controlled(group, p) for p in group["params"]):
            raise ValueError(
                f"Group {index} is under norm control and {type(self.optimizer).__name__} still decays it with weight_decay={decay}: "
                "the two would pull against each other. Set weight_decay=0 there, or controlled=False to only decay it."
            )

    def _check_references(self, index: int, group: dict[str, Any]) -> None:
        scope = parse_scope(group["scope"])
        if scope.joint or target_kind(group) != "ratio" or not len(group["norm0"]) or bool((group["norm0"] > 0).all()):
            return
        sizes = scope.sizes([p for _, p in self._members(index)])
        for name, parts in zip(self._names(index), group["norm0"].split(sizes), strict=True):
            zeros = int((~(parts > 0)).sum())
            if zeros:
                raise ValueError(
                    f"{name} has an initial norm of zero{f' in {zeros} of its {len(parts)} parts' if len(parts) > 1 else ''}, so no ratio "
                    f"to it can be held in scope={group['scope']!r}. Give it an absolute target (norm= or rms=), or leave it out with "
                    "controlled=False."
                )

    def _members(self, index: int) -> list[tuple[int, Tensor]]:
        """The tensors of a group that are controlled, each once even if it is tied to another."""
        seen: set[Any] = set()
        for i, group in enumerate(self.param_groups):
            members = []
            for j, p in enumerate(group["params"]):
                if "controlled" in group and is_controlled(group, p):
                    key = (p.device, p.data_ptr(), p.shape, p.stride()) if not p.is_meta else id(p)
                    if key not in seen:
                        members.append((j, p))
                    seen.add(key)
            if i == index:
                return members
        return []

    def _names(self, index: int) -> list[str]:
        names = self.param_groups[index].get("param_names")
        return [names[j] if names else f"group{index}.tensor{j}" for j, _ in self._members(index)]

    def _build(self) -> None:
        """Sort the controlled weights into the sets that share settings."""
        self._step = self.param_groups[0]["control_step"]
        shared: list[int] = []
        sets: list[list[int]] = []
        for index, group in enumerate(self.param_groups):
            if not self._members(index):
                continue
            if group["scope"] == "global":
                if not shared:
                    sets.append(shared)
                shared.append(index)
            else:
                sets.append([index])
        if not sets:
            raise ValueError(
                "Nothing would be controlled: no tensor has two or more dimensions in a group that is not left alone. Say which are, "
                "with controlled=True in their group."
            )
        for index in shared[1:]:
            first, other = self.param_groups[shared[0]], self.param_groups[index]
            for name in SHARED:
                if first[name] != other[name]:
                    raise ValueError(
                        f"Groups {shared[0]} and {index} share the global norm, but have {name}={first[name]!r} and {other[name]!r}. Use "
                        "scope='group' in one of them, so that it has a norm of its own."
                    )
        self._membership = [p.requires_grad for g in self.param_groups for p in g["params"]]
        built = [self._weight_set(indices) for indices in sets]
        self._sets = [s for s in built if s.params]

    def _weight_set(self, indices: list[int]) -> WeightSet:
        names, params, initial = [], [], []
        for index in indices:
            group = self.param_groups[index]
            members = [p for _, p in self._members(index)]
            parts = group["norm0"].split(parse_scope(group["scope"]).sizes(members))
            for name, p, part in zip(self._names(index), members, parts, strict=True):
                if p.requires_grad:  # a frozen tensor is neither counted nor scaled
                    names.append(name)
                    params.append(p)
                    initial.append(part)
        whole = torch.cat([part.to(initial[0].device) for part in initial]) if initial else self.param_groups[0]["norm0"][:0]
        return WeightSet([self.param_groups[i] for i in indices], names, params, whole)

    def _check_unchanged(self) -> None:
        """Notice what people change in place: frozen tensors, and a decay that has come back."""
        for index, group in enumerate(self.param_groups):
            if group.get("weight_decay"):
                self._check_decay(index, group)
        if self._membership != [p.requires_grad for g in self.param_groups for p in g["params"]]:
            self._rebuild()

    @torch.compiler.disable
    def _rebuild(self) -> None:
        self._build()

    @torch.compiler.disable
    def _begin(self) -> None:
        """The first step: the weights as they are now, loaded, broadcast or moved since construction, are theta_0."""
        for index, group in enumerate(self.param_groups):
            members = [p for _, p in self._members(index)]
            with torch.no_grad():
                group["norm0"] = measure(members, parse_scope(group["scope"]))
            self._check_references(index, group)
        home = next(g["norm0"].device for g in self.param_groups if len(g["norm0"]))
        step = self._step.to(home)
        for group in self.param_groups:
            group["control_step"] = step
        self._fresh = False
        self._build()

    @torch.compiler.disable
    def _is_dry_run(self) -> bool:
        """Whether this first step only fills the optimizer's state, as torch.distributed.checkpoint makes it do: the
        learning rate and all gradients are zero. Control must not move the weights then."""
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        if any(not isinstance(g.get("lr", 1), float | int | Tensor) or float(g.get("lr", 1)) != 0 for g in self.param_groups):
            return False
        return bool(grads) and not any(bool(g.any()) for g in grads if not g.is_sparse)


def target_kind(group: dict[str, Any]) -> str:
    """Which of ratio, norm and rms a group's target is given as."""
    return next(name for name in TARGETS if group[name] is not None)
