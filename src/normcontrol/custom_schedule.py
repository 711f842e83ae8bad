"""What users give as a schedule that is none of ``schedule.py``: a number, or a function of the
step; and the check of its values. It knows nothing about optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normcontrol.numbers import is_jax, plain, takes_a_number
from normcontrol.schedule import Schedule, Value


@dataclass(frozen=True)
class custom(Schedule):
    """Any function of the step. It receives a 0-d tensor and returns a number or a 0-d tensor.

    Python arithmetic and comparisons work. A function that uses torch operations alone also works
    in a compiled step or a CUDA graph. A function cannot be stored in a checkpoint: construct the
    optimizer with the same function when you resume.
    """

    function: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"custom got {self.function!r}, which cannot be called: give a function of the "
                "step."
            )
        if not takes_a_number(self.function):
            raise TypeError(
                f"custom got {self.function!r}, which cannot be called with a step: give a "
                "function of the step. If it makes a schedule, give what it returns, as in "
                "paper_ratio()."
            )

    def value(self, step: Tensor) -> Tensor:
        value = self.function(step)
        if not torch.compiler.is_compiling():
            self._check(value, step)
        return torch.as_tensor(value, dtype=step.dtype, device=step.device)

    def _check(self, value: Any, step: Tensor) -> None:
        try:
            fits = torch.as_tensor(value).numel() in (1, step.numel())
        except (TypeError, ValueError, RuntimeError):
            fits = False
        if not fits:
            raise ValueError(
                f"{self!r} returned {value!r}, which is no number: a schedule is a function of the "
                "step that returns a number for every step. Correct the function."
            )

    def __repr__(self) -> str:
        return f"custom({getattr(self.function, '__name__', type(self.function).__name__)!r})"


def as_schedule(given: Value, name: str = "value") -> float | Schedule:
    """Return a schedule as it is, a number as a float, and any other function as :class:`custom`.

    A number in a tensor or an array is read here, once.
    """
    if isinstance(given, Schedule):
        return given
    if is_jax(given):
        what = "an optax schedule" if callable(given) else "a JAX array"
        raise TypeError(
            f"{given!r} is {what}, and this is torch: give a number or a schedule of normcontrol, "
            "such as linear(1.0, 2.0, steps=2500). For JAX use normcontrol.optax."
        )
    if callable(given) and not isinstance(given, Tensor):
        return custom(given)
    number = plain(given)
    if not isinstance(number, bool | complex):
        with suppress(TypeError, ValueError, RuntimeError):  # torch warns of a lost gradient
            return float(given if isinstance(given, Tensor) else number)
    raise TypeError(
        f"{name}={given!r} is no number: give a number, a schedule such as linear(1.0, 2.0, "
        "steps=2500), or a function of the step."
    )


def check_range(name: str, schedule: float | Schedule, low: float, high: float, why: str) -> None:
    """Raise an error if a value of the schedule that is known before training is NaN or outside
    ``[low, high]``."""
    if isinstance(schedule, custom):
        values: Sequence[float] = [schedule(1)]
    elif isinstance(schedule, Schedule):
        values = schedule.extremes()
    else:
        values = [schedule]
    for value in values:
        if not low <= value <= high:
            raise ValueError(f"{name}={schedule} takes the value {value:g}: {why}")
