"""The learning rate of every step of a run that has not been run, from whatever form people have it
in."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from normcontrol.schedule import Schedule, custom, lr_times

LearningRate = float | Tensor | Callable[[int], float] | Sequence[float] | Schedule | LRScheduler
"""A number, a function of the step (1, 2, ...), one number for every step, a schedule of ours, or
one of torch's schedulers."""


def learning_rates(lr: LearningRate, steps: int | None) -> list[list[float]]:
    """The learning rates of steps 1, 2, ... ``steps``: one list for all groups, or one for each
    group of a scheduler's optimizer.

    >>> learning_rates([0.1, 0.2], steps=None)
    [[0.1, 0.2]]
    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.4)
    >>> learning_rates(torch.optim.lr_scheduler.LambdaLR(sgd, lambda i: 1 / (i + 1)), steps=4)
    [[0.4, 0.2, 0.13333333333333333, 0.1]]
    """
    if getattr(lr, "ndim", 0) == 1:  # NumPy's arrays, and tensors
        lr = lr.tolist()  # type: ignore[union-attr]
    if steps is None and isinstance(lr, Sequence):
        steps = len(lr)
    if steps is None or steps != int(steps) or steps < 1:
        raise ValueError(
            f"steps={steps}: a horizon is a whole number of steps, 1 or more. Say how long the run "
            "will be."
        )
    rates = _rates(lr, int(steps))
    for one in rates:
        for step, value in enumerate(one, 1):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"The learning rate is {value} at step {step}: it must be a number, 0 or more. "
                    "Mend the schedule."
                )
    if not any(map(any, rates)):
        raise ValueError(
            f"The learning rate is 0 at every one of the {int(steps):,} steps: no weight would "
            "move, and no norm follows from that. "
            "Give the learning rates of the run; a function gets the steps 1, 2, ... and returns "
            "the rate itself."
        )
    return rates


def _rates(lr: LearningRate, steps: int) -> list[list[float]]:
    if isinstance(lr, LRScheduler):
        return _simulated(lr, steps)
    if isinstance(lr, custom):
        lr = lr.function
    if isinstance(lr, lr_times):
        raise ValueError(
            f"lr={lr!r} follows the learning rate, and so cannot be it. Give the learning rate's "
            "own schedule."
        )
    if isinstance(lr, Schedule):
        return [lr.value(torch.arange(1, steps + 1, dtype=torch.float64)).tolist()]
    if isinstance(lr, Sequence):
        if len(lr) < steps:
            raise ValueError(
                f"lr holds {len(lr)} learning rates, but the run has {steps} steps: give one for "
                "every step."
            )
        return [[float(value) for value in lr[:steps]]]
    if callable(lr) and not isinstance(lr, Tensor):
        return [[float(lr(step)) for step in range(1, steps + 1)]]
    return [[float(lr)] * steps]


def _simulated(scheduler: LRScheduler, steps: int) -> list[list[float]]:
    """What a scheduler would do from here on. A copy does it, to a stand-in for its optimizer
    without any weights."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau follows the loss, which nobody knows before the run. Give the "
            "learning rates that you expect."
        )
    groups: list[dict[str, Any]] = scheduler.optimizer.param_groups
    stand_in = torch.optim.SGD([{"params": [torch.zeros(())]} for _ in groups], lr=0.0)
    for ours, theirs in zip(stand_in.param_groups, groups, strict=True):
        ours.update({key: copy.deepcopy(value) for key, value in theirs.items() if key != "params"})
    twin = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
    rates: list[list[float]] = [[] for _ in groups]
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # that no optimizer steps between the steps of the scheduler
        for _ in range(steps):
            for kept, group in zip(rates, stand_in.param_groups, strict=True):
                kept.append(float(group["lr"]))
            twin.step()
    return rates
