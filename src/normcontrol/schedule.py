"""Schedules: a value for every step, for the ratio r_t, the rate k_t or an absolute target.

A schedule is a small immutable callable of the step. Called with a number, it returns a number.
Called with the 0-d step of a running optimizer, it returns a tensor on the same device. It uses
tensor operations only, so that a compiled step or a CUDA graph needs no new trace when the value
changes. Some schedules read the learning rate of a parameter group; none knows about weights or
norms. The ``repr`` of a schedule is the call that constructs it, and ``schedule_text.py`` stores
that. A new schedule is a subclass of :class:`Schedule`, added to ``SCHEDULES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normcontrol.numbers import check_finite, is_number, numbers, plain
from normcontrol.warn import warn

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Schedule:
    """Base class of all schedules. Steps count from 1; step 0 is the state before training."""

    def __post_init__(self) -> None:
        """Convert numbers of numpy and torch to Python's, and check that they are finite."""
        kind = type(self).__name__
        for name, value in vars(self).items():
            object.__setattr__(self, name, plain(value))
        for name, f in getattr(self, "__dataclass_fields__", {}).items():
            value = getattr(self, name)
            if f.type != "float":
                continue
            if not is_number(value):
                raise TypeError(f"{kind} got {name}={value!r}, which is no number. Give one.")
            if not math.isfinite(value):
                raise ValueError(f"{kind} got {name}={value}: give a finite number.")

    def value(self, step: Tensor) -> Tensor:
        """Return the value at ``step``, a float tensor. Subclasses must define this.

        It is of any shape for the schedules of this file, and 0-d for those of a user's own class.
        """
        raise TypeError(f"{type(self).__name__} does not define value(step): a schedule must.")

    def extremes(self) -> Sequence[float]:
        """Return values that bound the schedule from both sides, to check it before training."""
        return ()

    def at(self, step: Tensor, group: dict[str, Any]) -> Tensor | float:
        """Return the value at ``step`` for a parameter group. Some schedules use its ``lr``."""
        return self.value(_floating(step))

    @property
    def is_known_ahead(self) -> bool:
        """Whether the values of many steps can be computed at once, before these steps.

        A user's function or class may know one step at a time, and depend on more than the step.
        """
        return type(self).value.__module__ == __name__ and type(self).at is Schedule.at

    def __call__(self, step: Tensor | float) -> Any:
        if isinstance(step, Tensor):
            return self.value(_floating(step))
        return plain(self.value(torch.tensor(step, dtype=torch.float64, device="cpu")))

    def plot(self, steps: int, ax: Axes | None = None, **style: Any) -> Axes:
        """Plot the schedule from step 0 to ``steps`` with matplotlib, and return the axes."""
        try:
            import matplotlib.pyplot as plt
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "plot needs matplotlib, which is not installed: pip install 'normcontrol[plot]'."
            ) from None
        axes = ax if ax is not None else plt.subplots(figsize=(5, 3))[1]
        grid = sorted({round(i * steps / 400) for i in range(401)})
        style.setdefault("label", str(self))
        axes.plot(grid, [self(step) for step in grid], **style)
        axes.set_xlabel("step")
        return axes


def _floating(step: Tensor) -> Tensor:
    """Return a tensor of whole steps as float64: a value is computed in the type of its step."""
    return step if step.is_floating_point() else step.double()


@dataclass(frozen=True)
class constant(Schedule):
    """The same value at every step. You can give a number in place of it."""

    level: float

    def value(self, step: Tensor) -> Tensor:
        return torch.full_like(step, self.level)

    def extremes(self) -> Sequence[float]:
        return (self.level,)


@dataclass(frozen=True)
class Ramp(Schedule):
    """Base class of schedules from ``start`` to ``end`` over ``steps`` steps, then constant."""

    start: float
    end: float
    steps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps <= 0:
            kind = type(self).__name__
            raise ValueError(f"{kind} got steps={self.steps}: a ramp needs at least one step.")

    def extremes(self) -> Sequence[float]:
        return self.start, self.end


@dataclass(frozen=True)
class linear(Ramp):
    """A straight line from ``start`` to ``end`` over ``steps`` steps, then constant.

    >>> [linear(1.0, 2.0, steps=100)(step) for step in (0, 50, 100, 101)]
    [1.0, 1.5, 2.0, 2.0]
    """

    def value(self, step: Tensor) -> Tensor:
        return self.end - (self.end - self.start) * (1 - step / self.steps).clamp(min=0)


def paper_ratio() -> linear:
    """Return the ratio of the paper's Figure 1 and best run. The paper's rate is 0.01."""
    return linear(1.0, 2.0, steps=2500)


@dataclass(frozen=True)
class cosine(Ramp):
    """Half a cosine from ``start`` to ``end`` over ``steps`` steps, then constant.

    >>> [cosine(1.0, 3.0, steps=100)(step) for step in (0, 50, 100, 101)]
    [1.0, 2.0, 3.0, 3.0]
    """

    def value(self, step: Tensor) -> Tensor:
        done = (step / self.steps).clamp(max=1)
        return self.end + (self.start - self.end) * (1 + torch.cos(math.pi * done)) / 2


def increases(steps: Sequence[float]) -> bool:
    """Return whether there are steps, all of them finite, and each is above the one before."""
    in_order = all(a < b for a, b in pairwise(steps))
    return len(steps) > 0 and in_order and all(map(math.isfinite, steps))


@dataclass(frozen=True, init=False)
class piecewise(Schedule):
    """Straight lines between ``(step, value)`` points.

    The value is constant before the first point and after the last.

    >>> r = piecewise((0, 1.0), (100, 2.0), (200, 2.0), (300, 1.0))     # up, constant, down
    >>> r(50), r(150), r(250), r(999)
    (1.5, 2.0, 1.5, 1.0)
    """

    points: tuple[tuple[float, float], ...]

    def __init__(self, *points: tuple[float, float]) -> None:
        try:
            pairs = tuple((s, v) for s, v in map(numbers, points))
        except (TypeError, ValueError):
            raise TypeError(
                f"piecewise got {', '.join(map(short, points))}: every point is a pair of numbers, "
                "(step, value). Give such pairs, as in piecewise((0, 1.0), (100, 2.0))."
            ) from None
        object.__setattr__(self, "points", pairs)
        steps = [s for s, _ in self.points]
        if not increases(steps):
            raise ValueError(
                f"piecewise got points at steps {steps}: it needs at least one point, and the "
                "steps must increase and be finite. Give (step, value) pairs in the order of their "
                "steps."
            )
        check_finite("piecewise", [v for _, v in self.points])

    def value(self, step: Tensor) -> Tensor:
        # A sum of ramps needs no table on the device and no branch, so that it can be compiled.
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
    """Recorded values, linearly interpolated: ``values[i]`` belongs to ``steps[i]``, or to step i.

    The value is constant before the first record and after the last. The optimizer warns once when
    a run continues past the last record.

    >>> r = trace([1.0, 1.2, 1.6], steps=[0, 10, 20])
    >>> r(5), r(20)
    (1.1, 1.6)
    """

    values: tuple[float, ...]
    steps: tuple[float, ...]
    # Steps and values as tensors, by device and type: filled once, since a captured graph cannot
    # make them.
    _tables: dict[Any, tuple[Tensor, Tensor]] = field(compare=False, repr=False)
    _end_was_noted: bool = field(default=False, compare=False, repr=False)

    def __init__(self, values: Iterable[float], steps: Iterable[float] | None = None) -> None:
        try:
            recorded = numbers(values)
            at = numbers(range(len(recorded)) if steps is None else steps)
        except (TypeError, ValueError):
            found = f"the values {short(values)}" + f" at {short(steps)}" * (steps is not None)
            raise TypeError(
                f"trace got {found}: both are lists of numbers. Give such lists, as in "
                "trace([1.0, 1.2], steps=[0, 10])."
            ) from None
        if len(recorded) != len(at) or not increases(at):
            raise ValueError(
                f"trace got {len(recorded)} values at {len(at)} steps: it needs at least one "
                "value, a step for each value, and steps that increase and are finite."
            )
        check_finite("trace", recorded)
        object.__setattr__(self, "values", recorded)
        object.__setattr__(self, "steps", at)
        object.__setattr__(self, "_tables", {})

    def value(self, step: Tensor) -> Tensor:
        steps, values = self._table(step)
        right = torch.searchsorted(steps, step.reshape(-1)).clamp(1, max(len(self.values) - 1, 1))
        left = right - 1
        right = right.clamp(max=len(self.values) - 1)
        s0, s1, v0, v1 = steps[left], steps[right], values[left], values[right]
        least = torch.finfo(step.dtype).tiny  # of one record, both are the same
        done = ((step.reshape(-1) - s0) / (s1 - s0).clamp(min=least)).clamp(0, 1)
        return (v0 + (v1 - v0) * done).reshape(step.shape)

    def _table(self, step: Tensor) -> tuple[Tensor, Tensor]:
        key = step.device, step.dtype
        if key not in self._tables:
            self._tables[key] = (
                torch.tensor(self.steps, dtype=step.dtype, device=step.device),
                torch.tensor(self.values, dtype=step.dtype, device=step.device),
            )
        return self._tables[key]

    def extremes(self) -> Sequence[float]:
        return self.values

    def note_end(self, step: int) -> None:
        """Warn once if ``step`` is past the last record."""
        if step > self.steps[-1] and not self._end_was_noted:
            object.__setattr__(self, "_end_was_noted", True)
            warn(
                f"The trace ends at step {self.steps[-1]:g}, but the run continues: from now on "
                f"the last value, {self.values[-1]:g}, is used. If you do not want that, record a "
                "longer trace, or use its final value with a ramp."
            )

    def __repr__(self) -> str:
        return f"trace({list(self.values)!r}, steps={list(self.steps)!r})"

    def __str__(self) -> str:
        ends = f"from {self.values[0]:.4g} to {self.values[-1]:.4g}"
        return f"trace of {len(self.values)} points {ends}"

    def __reduce__(self) -> Any:
        return trace, (self.values, self.steps)


@dataclass(frozen=True)
class lr_times(Schedule):
    """A rate proportional to the learning rate: ``k_t = lr_t * factor``.

    With ``ratio=0`` this is decoupled weight decay as torch implements it, line 13.a of
    Algorithm 1.
    """

    factor: float

    def at(self, step: Tensor, group: dict[str, Any]) -> Tensor | float:
        return group["lr"] * self.factor

    def __call__(self, step: Tensor | float) -> Any:
        raise TypeError(
            f"{self!r} follows the optimizer's learning rate, so a step alone does not give its "
            "value. Use at(step, group)."
        )

    def extremes(self) -> Sequence[float]:
        return (0.0,) if self.factor >= 0 else (self.factor,)


@dataclass(frozen=True)
class eta_times(lr_times):
    """A rate proportional to the learning rate schedule: ``k_t = eta_t * factor``.

    Here ``eta_t = lr_t / initial lr``. With ``ratio=0`` this is decoupled weight decay as in the
    AdamW paper, line 13.b of Algorithm 1. The initial learning rate is the group's ``initial_lr``,
    which torch's schedulers set. Without a scheduler it is the group's ``lr`` when it was added.
    """

    def at(self, step: Tensor, group: dict[str, Any]) -> Tensor | float:
        first = group.get("initial_lr", group["control"]["first_lr"])
        if isinstance(first, float | int) and first == 0:
            raise ValueError(
                f"{self!r} is a multiple of lr / initial lr, but the learning rate was 0 when the "
                "group was added. Give the group its largest learning rate before you add it, or "
                "set group['initial_lr'], or use lr_times."
            )
        return group["lr"] / first * self.factor


@dataclass(frozen=True)
class lr_squared_times(lr_times):
    """A rate proportional to the square of the learning rate: ``k_t = factor * lr_t^2 / lr_max``.

    With ``ratio=0`` this is AdamC (Defazio, 2025), whose decay is meant to keep the norm constant
    while the learning rate falls. Without ``lr_max`` it is ``factor * lr_t^2``.
    """

    lr_max: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lr_max > 0:
            raise ValueError(
                f"lr_squared_times got lr_max={self.lr_max}: it is the largest learning rate of "
                "the run. Give a positive number."
            )

    def at(self, step: Tensor, group: dict[str, Any]) -> Tensor | float:
        return self.factor * group["lr"] ** 2 / self.lr_max


@dataclass(frozen=True)
class sqrt_lr_times(lr_times):
    """A value proportional to the square root of the learning rate: ``sqrt(factor * lr_t)``.

    Use it for ``relative_step``: the angle of an AdamW step converges to such a value.
    """

    def at(self, step: Tensor, group: dict[str, Any]) -> Tensor | float:
        return (self.factor * group["lr"]) ** 0.5


@dataclass(frozen=True)
class every(Schedule):
    """``level`` at every n-th step, and 0 at the other steps.

    >>> [every(3)(step) for step in range(1, 7)]
    [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    """

    n: int
    level: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.n, int) or self.n is True or self.n < 1:
            raise ValueError(f"every got n={self.n!r}: give a whole number of steps, 1 or more.")

    def value(self, step: Tensor) -> Tensor:
        return torch.where(step.round() % self.n == 0, step.new_full((), self.level), 0.0)

    def extremes(self) -> Sequence[float]:
        return 0.0, self.level


Value = float | Schedule | Callable[[Any], Any]
"""The type of a ratio, a rate or an absolute target: a number, a schedule, or a function of the
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
"""The schedules that a checkpoint may contain, by name. Add your own here."""
