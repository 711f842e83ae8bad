"""Schedules: the ratio r_t and the rate k_t as functions of the step.

A schedule is a small immutable callable. Given a number it answers with a number; given the 0-d
step tensor of a running optimizer it answers with a tensor on the same device, computed by tensor
operations alone, so that compiled steps and CUDA graphs see it move. Its ``repr`` is the call that
made it, which is also how checkpoints store it.
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Schedule:
    """A value for every step; steps count from 1, and 0 is the state before training."""

    def value(self, step: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define value(step): a schedule must.")

    def extremes(self) -> Sequence[float]:
        """The values between which the schedule stays, for checking before training."""
        return ()

    def at(self, step: Tensor, group: dict[str, Any]) -> Tensor | float:
        """The value at ``step`` for a parameter group, whose learning rate some schedules
        follow."""
        return self.value(step)

    def __call__(self, step: Tensor | float) -> Any:
        if isinstance(step, Tensor):
            return self.value(step)
        return self.value(torch.tensor(step, dtype=torch.float64)).item()

    def plot(self, steps: int, ax: Axes | None = None, **style: Any) -> Axes:
        """Draw the schedule over ``steps`` steps with matplotlib and return the axes."""
        import matplotlib.pyplot as plt

        axes = ax if ax is not None else plt.subplots(figsize=(5, 3))[1]
        grid = sorted({round(i * steps / 400) for i in range(401)})
        style.setdefault("label", repr(self))
        axes.plot(grid, [self(step) for step in grid], **style)
        axes.set_xlabel("step")
        return axes


@dataclass(frozen=True)
class constant(Schedule):
    """The same value at every step. A plain number means the same."""

    level: float

    def value(self, step: Tensor) -> Tensor:
        return torch.full_like(step, self.level)

    def extremes(self) -> Sequence[float]:
        return (self.level,)


@dataclass(frozen=True)
class linear(Schedule):
    """From ``start`` to ``end`` in a straight line over ``steps`` steps, then constant.

    >>> r = linear(1.0, 2.0, steps=2500)     # the paper's Figure 1
    >>> r(0), r(1250), r(2500), r(100_000)
    (1.0, 1.5, 2.0, 2.0)
    """

    start: float
    end: float
    steps: float

    def __post_init__(self) -> None:
        _check_steps(self)

    def value(self, step: Tensor) -> Tensor:
        return self.end - (self.end - self.start) * (1 - step / self.steps).clamp(min=0)

    def extremes(self) -> Sequence[float]:
        return self.start, self.end


@dataclass(frozen=True)
class cosine(Schedule):
    """From ``start`` to ``end`` along half a cosine over ``steps`` steps, then constant.

    >>> r = cosine(1.0, 3.0, steps=100)
    >>> r(0), r(50), r(100), r(101)
    (1.0, 2.0, 3.0, 3.0)
    """

    start: float
    end: float
    steps: float

    def __post_init__(self) -> None:
        _check_steps(self)

    def value(self, step: Tensor) -> Tensor:
        done = (step / self.steps).clamp(max=1)
        return self.end + (self.start - self.end) * (1 + torch.cos(math.pi * done)) / 2

    def extremes(self) -> Sequence[float]:
        return self.start, self.end


@dataclass(frozen=True, init=False)
class piecewise(Schedule):
    """Straight lines between ``(step, value)`` points, constant before the first and after the
    last.

    >>> r = piecewise((0, 1.0), (100, 2.0), (200, 2.0), (300, 1.0))     # up, hold, down
    >>> r(50), r(150), r(250), r(999)
    (1.5, 2.0, 1.5, 1.0)
    """

    points: tuple[tuple[float, float], ...]

    def __init__(self, *points: tuple[float, float]) -> None:
        object.__setattr__(self, "points", tuple((float(s), float(v)) for s, v in points))
        steps = [s for s, _ in self.points]
        if not steps or any(a >= b for a, b in pairwise(steps)):
            raise ValueError(
                f"piecewise got points at steps {steps}: they must be there and increase. Give "
                "(step, value) pairs in order of step."
            )

    def value(self, step: Tensor) -> Tensor:
        # A sum of ramps: no table on the device, and no branch that a compiled step would have to
        # know.
        value = torch.full_like(step, self.points[0][1])
        for (s0, v0), (s1, v1) in pairwise(self.points):
            value = value + (v1 - v0) / (s1 - s0) * (step - s0).clamp(0, s1 - s0)
        return value

    def extremes(self) -> Sequence[float]:
        return [v for _, v in self.points]

    def __repr__(self) -> str:
        return f"piecewise({', '.join(map(repr, self.points))})"


@dataclass(frozen=True, init=False)
class trace(Schedule):
    """Replay recorded values, linearly interpolated: ``values[i]`` belongs to ``steps[i]`` (or to
    step i).

    Past its end a trace holds its last value, and says so once.

    >>> r = trace([1.0, 1.2, 1.6], steps=[0, 10, 20])
    >>> r(5), r(20)
    (1.1, 1.6)
    """

    values: tuple[float, ...]
    steps: tuple[float, ...]
    _tables: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __init__(self, values: Iterable[float], steps: Iterable[float] | None = None) -> None:
        kept = tuple(float(v) for v in values)
        at = (
            tuple(float(s) for s in steps)
            if steps is not None
            else tuple(float(i) for i in range(len(kept)))
        )
        if len(kept) != len(at) or not kept or any(a >= b for a, b in pairwise(at)):
            raise ValueError(
                f"trace got {len(kept)} values at {len(at)} steps: it needs one increasing step "
                "for each value, and at least one."
            )
        object.__setattr__(self, "values", kept)
        object.__setattr__(self, "steps", at)
        object.__setattr__(self, "_tables", {})

    def value(self, step: Tensor) -> Tensor:
        steps, values = self._table(step)
        right = torch.searchsorted(steps, step.reshape(-1)).clamp(1, max(len(self.values) - 1, 1))
        left = right - 1
        right = right.clamp(max=len(self.values) - 1)
        s0, s1, v0, v1 = steps[left], steps[right], values[left], values[right]
        done = ((step.reshape(-1) - s0) / (s1 - s0).clamp(min=1e-300)).clamp(0, 1)
        return (v0 + (v1 - v0) * done).reshape(step.shape)

    def _table(self, step: Tensor) -> tuple[Tensor, Tensor]:
        if step.device not in self._tables:
            self._tables[step.device] = tuple(
                torch.tensor(x, dtype=step.dtype, device=step.device)
                for x in (self.steps, self.values)
            )
        return self._tables[step.device]

    def extremes(self) -> Sequence[float]:
        return self.values

    def note_end(self, step: int) -> None:
        """Say once that the run has outlived the trace."""
        if step > self.steps[-1] and "ended" not in self._tables:
            self._tables["ended"] = True
            warnings.warn(
                f"The replayed trace ends at step {self.steps[-1]:g} and the run goes on: its last "
                f"value, {self.values[-1]:g}, "
                "is held from here. Record a longer trace, or use its final value with a ramp, if "
                "that is not what you want.",
                stacklevel=3,
            )

    def __repr__(self) -> str:
        return f"trace({list(self.values)!r}, steps={list(self.steps)!r})"

    def __reduce__(self) -> Any:
        return trace, (self.values, self.steps)


@dataclass(frozen=True)
class lr_times(Schedule):
    """A rate tied to the learning rate: ``k_t = lr_t * factor``.

    With ``ratio=0`` this is decoupled weight decay as commonly implemented, line 13.a of Algorithm
    1.
    """

    factor: float

    def at(self, step: Tensor, group: dict[str, Any]) -> Tensor | float:
        return group["lr"] * self.factor

    def __call__(self, step: Tensor | float) -> Any:
        raise TypeError(
            f"{self!r} follows the optimizer's learning rate, so it has no value of its own at a "
            "step."
        )

    def extremes(self) -> Sequence[float]:
        return (0.0,) if self.factor >= 0 else (self.factor,)


@dataclass(frozen=True)
class eta_times(lr_times):
    """A rate tied to the learning rate *schedule*: ``k_t = eta_t * factor`` with ``eta_t = lr_t /
    initial lr``.

    With ``ratio=0`` this is decoupled weight decay as in the AdamW paper, line 13.b of Algorithm 1.
    The initial learning rate is the group's ``initial_lr``, which torch's schedulers set, or else
    the one the controller first saw.
    """

    def at(self, step: Tensor, group: dict[str, Any]) -> Tensor | float:
        return group["lr"] / group.get("initial_lr", group["control"]["first_lr"]) * self.factor


@dataclass(frozen=True)
class lr_squared_times(lr_times):
    """A rate tied to the learning rate's square: ``k_t = factor * lr_t^2 / lr_max``.

    With ``ratio=0`` this is AdamC (Defazio, 2025), whose decay holds the norm still as the learning
    rate falls.
    """

    lr_max: float

    def at(self, step: Tensor, group: dict[str, Any]) -> Tensor | float:
        return self.factor * group["lr"] ** 2 / self.lr_max


@dataclass(frozen=True)
class sqrt_lr_times(lr_times):
    """A value tied to the learning rate's root: ``sqrt(factor * lr_t)``, the angle that AdamW's
    steps settle at."""

    def at(self, step: Tensor, group: dict[str, Any]) -> Tensor | float:
        return (self.factor * group["lr"]) ** 0.5


@dataclass(frozen=True)
class every(Schedule):
    """A rate that acts at every n-th step, and is zero between.

    >>> [every(3)(step) for step in range(1, 7)]
    [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    """

    n: int
    level: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"every got n={self.n!r}: give a whole number of steps, 1 or more.")

    def value(self, step: Tensor) -> Tensor:
        return torch.where(step.round() % self.n == 0, self.level, 0.0).to(step)

    def extremes(self) -> Sequence[float]:
        return 0.0, self.level


@dataclass(frozen=True)
class custom(Schedule):
    """Any function of the step. It gets the step as a 0-d tensor and returns a number or a 0-d
    tensor.

    Ordinary Python arithmetic and comparisons work; written with torch operations it also works in
    a compiled step or a CUDA graph. It cannot be stored in a checkpoint: give the same function
    again when you resume.
    """

    function: Callable[[Any], Any]

    def value(self, step: Tensor) -> Tensor:
        return torch.as_tensor(self.function(step), dtype=step.dtype, device=step.device)

    def __repr__(self) -> str:
        return f"custom({getattr(self.function, '__name__', type(self.function).__name__)!r})"


Value = float | Schedule | Callable[[Any], Any]
"""What a ratio, a rate or a target may be given as: a number, a schedule, or a function of the
step."""

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    kind.__name__: kind
    for kind in (
        constant,
        linear,
        cosine,
        piecewise,
        trace,
        lr_times,
        eta_times,
        lr_squared_times,
        sqrt_lr_times,
        every,
    )
}


def is_jax(given: Any) -> bool:
    """Whether this comes from JAX or optax, told by its home and not by importing them."""
    home = getattr(given, "__module__", None) if callable(given) else type(given).__module__
    return str(home).partition(".")[0] in ("jax", "jaxlib", "optax")


def as_schedule(given: Value) -> float | Schedule:
    """A number stays a number, a function becomes a schedule."""
    if isinstance(given, Schedule):
        return given
    if is_jax(given):
        what = "an optax schedule" if callable(given) else "a JAX array"
        raise TypeError(
            f"{given!r} is {what}, and this is torch: give a number or a schedule of normcontrol, "
            "such as linear(1.0, 2.0, steps=2500). "
            "For JAX there is normcontrol.optax."
        )
    if callable(given) and not isinstance(given, Tensor):
        return custom(given)
    return float(given)


def check(name: str, schedule: float | Schedule, low: float, high: float, why: str) -> None:
    """Refuse a schedule that is not a number, or leaves [low, high], anywhere it can be seen
    without training."""
    if isinstance(schedule, custom):
        values: Sequence[float] = [schedule(1)]
    elif isinstance(schedule, Schedule):
        values = schedule.extremes()
    else:
        values = [schedule]
    for value in values:
        if not low <= value <= high:
            raise ValueError(f"{name}={schedule!r} takes the value {value:g}: {why}")


def to_plain(schedule: Any) -> Any:
    """What a checkpoint holds: the text of the call that made a schedule, or another callable;
    anything else as it is."""
    return repr(schedule) if callable(schedule) else schedule


def from_plain(plain: Any, current: Any = None) -> Any:
    """The reverse of :func:`to_plain`; a custom function cannot be stored, so ``current`` stands in
    for it.

    >>> from_plain("linear(start=1.0, end=2.0, steps=2500)")
    linear(start=1.0, end=2.0, steps=2500)
    """
    if not isinstance(plain, str):
        return plain
    call = ast.parse(plain, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(
            f"The checkpoint holds the schedule {plain!r}, which is not a call this version can "
            "read."
        )
    if call.func.id == "custom":
        if isinstance(current, custom):
            return current
        raise ValueError(
            f"The checkpoint was made with the function {plain[7:-1]} as a schedule, and a "
            "function cannot be stored. "
            "Construct the optimizer with the same function before loading."
        )
    if call.func.id not in SCHEDULES:
        raise ValueError(
            f"The checkpoint holds the schedule {plain!r}; known are {', '.join(SCHEDULES)}."
        )
    arguments = [ast.literal_eval(a) for a in call.args]
    return SCHEDULES[call.func.id](
        *arguments, **{k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
    )


def _check_steps(schedule: Any) -> None:
    for f in fields(schedule):
        if not math.isfinite(getattr(schedule, f.name)):
            raise ValueError(
                f"{type(schedule).__name__} got {f.name}={getattr(schedule, f.name)}: give a "
                "finite number."
            )
    if schedule.steps <= 0:
        raise ValueError(
            f"{type(schedule).__name__} got steps={schedule.steps}: a ramp needs at least one step."
        )
