"""The learning rate of every step of a planned run, from a number, a function, a list, a schedule
or a scheduler of torch. It may not know what the learning rates are used for.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from normcontrol.custom_schedule import custom
from normcontrol.schedule import Schedule, lr_times

LearningRate = float | Tensor | Callable[[int], float] | Sequence[float] | Schedule | LRScheduler
"""A number, a function of the step (1, 2, ...), one number for every step, a schedule of
normcontrol, or a learning rate scheduler of torch."""


def learning_rates(lr: LearningRate, steps: int | None) -> list[list[float]]:
    """The learning rates of steps 1, 2, ... ``steps``: one list for all groups, or for a scheduler
    one list for each group of its optimizer.

    >>> learning_rates([0.1, 0.2], steps=None)
    [[0.1, 0.2]]
    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.4)
    >>> learning_rates(torch.optim.lr_scheduler.LambdaLR(sgd, lambda i: 1 / (i + 1)), steps=4)
    [[0.4, 0.2, 0.13333333333333333, 0.1]]
    """
    if getattr(lr, "ndim", 0) == 1:  # tensors and NumPy arrays
        lr = lr.tolist()  # type: ignore[union-attr]
    if steps is None and isinstance(lr, Sequence):
        steps = len(lr)
    if not is_finite(steps) or steps != int(steps) or steps < 1:  # type: ignore[arg-type]
        raise ValueError(
            f"steps={steps!r}: it is the length of the run, a whole number of steps, 1 or more. "
            "Give such a number."
        )
    rates = _rates(lr, int(steps))  # type: ignore[arg-type]
    for one in rates:
        for step, value in enumerate(one, 1):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"The learning rate is {value} at step {step}: it must be finite, and 0 or "
                    "more. Correct the schedule."
                )
    if not any(map(any, rates)):
        raise ValueError(
            f"The learning rate is 0 at all {int(steps):,} steps, so no weight would change. Give "
            "the learning rates of the run. A function is called with the steps 1, 2, ... and "
            "returns the learning rate, not a multiplier."
        )
    return rates


def _rates(lr: LearningRate, steps: int) -> list[list[float]]:
    if isinstance(lr, LRScheduler):
        return _simulated(lr, steps)
    if isinstance(lr, custom):
        lr = lr.function
    if isinstance(lr, lr_times):
        raise ValueError(
            f"lr={lr!r} is a multiple of the learning rate, so it cannot define the learning rate. "
            "Give the schedule of the learning rate."
        )
    if isinstance(lr, Schedule):
        numbers = torch.arange(1, steps + 1, dtype=torch.float64, device="cpu")
        return [lr.value(numbers).tolist()]
    if isinstance(lr, Sequence) and not isinstance(lr, str):
        if len(lr) < steps:
            raise ValueError(
                f"lr contains {len(lr)} learning rates, but the run has {steps} steps. Give one "
                "for every step."
            )
        return [[_number(value) for value in lr[:steps]]]
    if callable(lr) and not isinstance(lr, Tensor):
        return [[_number(lr(step)) for step in range(1, steps + 1)]]
    return [[_number(lr)] * steps]


def is_finite(given: Any) -> bool:
    """Return whether this is a number that is finite."""
    return is_number(given) and math.isfinite(given)


def is_number(given: Any) -> bool:
    """Return whether this is one number."""
    return hasattr(given, "__float__") and getattr(given, "ndim", 0) == 0


def _number(given: Any) -> float:
    if not is_number(given):
        raise TypeError(
            f"The learning rate {given!r} is no number. Give a number, one for every step, a "
            "function of the step that returns one, or a schedule."
        )
    return float(given)


def _simulated(scheduler: LRScheduler, steps: int) -> list[list[float]]:
    """The learning rates that a scheduler will set from now on. They are computed with a copy of
    the scheduler and an optimizer without weights, so that the scheduler does not advance."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau depends on the loss, which is not known before the run. Give the "
            "learning rates that you expect."
        )
    groups: list[dict[str, Any]] = scheduler.optimizer.param_groups
    nothing = torch.zeros((), device="cpu")
    optimizer = torch.optim.SGD([{"params": [nothing.clone()]} for _ in groups], lr=0.0)
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        own.update({key: copy.deepcopy(value) for key, value in group.items() if key != "params"})
    simulated = copy.deepcopy(scheduler, {id(scheduler.optimizer): optimizer})
    rates: list[list[float]] = [[] for _ in groups]
    with warnings.catch_warnings():
        # torch warns if the optimizer does not step between two steps of the scheduler.
        warnings.simplefilter("ignore")
        for _ in range(steps):
            for values, group in zip(rates, optimizer.param_groups, strict=True):
                values.append(float(group["lr"]))
            simulated.step()
    return rates
