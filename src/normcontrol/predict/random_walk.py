"""The norm that AdamW will reach, before it is trained: the norm to aim at, without a pilot run.

Adam's steps are nearly a random walk with steps of ``lr`` for every weight, and decay shortens what
has been walked. So the mean square q of each class of tensors follows ``q <- (1 - lr * decay)^2 q +
C * lr^2``, where C is 1 if the gradients of all steps are independent. A :class:`Prediction` says
what that gives, within which bounds, and where the model is known not to hold.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normcontrol.groups.classes import TensorClass, classes_of
from normcontrol.predict.calibration import (
    ALL,
    Constant,
    Constants,
    assumptions,
    calibrate,
    constant_of,
    doubts,
)
from normcontrol.predict.learning_rates import LearningRate, learning_rates
from normcontrol.schedule import linear, trace

Weights = nn.Module | Optimizer | Iterable[TensorClass]

__all__ = [
    "ALL",
    "ClassPrediction",
    "Constant",
    "Constants",
    "Prediction",
    "TensorClass",
    "adamc",
    "adamw",
    "calibrate",
    "decay_for",
    "decays",
    "solve",
    "walk",
]


@dataclass(frozen=True)
class ClassPrediction:
    """What becomes of one class: the root mean square of its weights at the end, and its bounds."""

    weights: TensorClass
    constant: Constant
    kept: float  # share of the initial mean square that decay leaves
    rms: float
    low: float
    high: float
    squares: Tensor = field(repr=False, compare=False)  # the mean square at every step, from 0 on

    @property
    def ratio(self) -> float:
        """Of the norm at the end to the initial one."""
        return self.rms / self.weights.rms if self.weights.rms else math.inf


@dataclass(frozen=True)
class Prediction:
    """The predicted norm of all regularised weights together, as a ratio to the initial one with
    its bounds, and of each class.

    ``doubts`` says where the model is known not to hold. A prediction is used like a recorded run:
    ``final()`` and ``curve()`` are schedules for AdamWN's ``ratio``.
    """

    method: str
    steps: int
    ratio: float
    low: float
    high: float
    norm: float
    classes: tuple[ClassPrediction, ...]
    assumptions: tuple[str, ...]
    doubts: tuple[str, ...]
    lrs: list[list[float]] = field(repr=False, compare=False)  # of each group, at steps 1, 2, ...

    @property
    def holds(self) -> bool:
        """Whether nothing is known that speaks against it."""
        return not self.doubts

    @property
    def ratios(self) -> list[float]:
        """The predicted ratio at every step, from 0 on."""
        total = torch.stack([c.weights.count * c.squares for c in self.classes]).sum(0)
        return (total / total[0]).sqrt().tolist()

    def final(self, ramp: float | None = None) -> linear:
        """From 1 to the final ratio over ``ramp`` steps (default: 5 % of the run, as the paper's),
        then constant."""
        return linear(
            1.0, self.ratio, steps=max(1, round(0.05 * self.steps)) if ramp is None else ramp
        )

    def curve(self, points: int = 200) -> trace:
        """The whole predicted curve as a schedule, thinned to about so many points."""
        ratios, at = (
            self.ratios,
            sorted({round(i * self.steps / points) for i in range(points + 1)}),
        )
        return trace([ratios[i] for i in at], at)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("class", "weights", "rms before", "rms after", "from", "to", "ratio", "C")
        ]
        for c in self.classes:
            name = c.weights.name + (" (tied)" if c.weights.tied else "")
            sizes = (f"{x:.4g}" for x in (c.weights.rms, c.rms, c.low, c.high))
            rows.append(
                (name, f"{c.weights.count:,}", *sizes, f"{c.ratio:.3f}", f"{c.constant.value:.3g}")
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join(
                cell.rjust(w) if i else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(r, widths, strict=True))
            )
            for r in rows
        ]
        bounds = f"{self.ratio:.3f} times the initial norm, from {self.low:.3f} to {self.high:.3f}"
        return "\n".join(
            [
                f"{self.method} after {self.steps:,} steps: {bounds}",
                *table,
                *(f"assumed: {a}" for a in self.assumptions),
            ]
            + [f"DOUBTFUL: {d}" for d in self.doubts]
        )


def adamw(
    weights: Weights,
    lr: LearningRate | None = None,
    weight_decay: float | None = None,
    *,
    steps: int | None = None,
    constants: Constants = 1.0,
    tied: Sequence[str] = (),
) -> Prediction:
    """The norm that ``torch.optim.AdamW`` will reach.

    Args: weights: a model (its matrices), an optimizer (what its groups decay), or a list of
        ``TensorClass(name, count, rms)``. lr: a number, a function of the step (1, 2, ...), one
        number for every step, a schedule of ours, or any learning rate scheduler
            of torch's, which is not moved. Default: the optimizer's own, constant.
        weight_decay: of all that is regularised. Default: the optimizer's own, group by group.
        steps: the horizon. Default: the number of learning rates, if a list is given. constants:
        what :func:`calibrate` found, or one number for all classes. tied: names of embeddings that
        serve as the head, where the model does not show it (see :func:`classes_of`).

    >>> gpt2 = [TensorClass("most", 88_965_120, 0.02), TensorClass("c_proj", 35_389_440, 0.02 / 24**0.5)]
    >>> lr = lambda t: 1e-3 * (t / 2000 if t < 2000 else 0.55 + 0.45 * math.cos(math.pi * (t - 2000) / 48_000))     # nanoGPT's
    >>> prediction = adamw(gpt2, lr, weight_decay=0.1, steps=50_000, constants=0.84)
    >>> round(prediction.ratio, 3)     # the paper measured 2.415
    2.427
    >>> ratio = prediction.final()     # for AdamWN(ratio=...): linear(start=1.0, end=2.427, steps=2500)
    """
    return _predict("AdamW", weights, lr, weight_decay, steps, constants, tied)


def adamc(
    weights: Weights,
    lr: LearningRate | None = None,
    weight_decay: float | None = None,
    *,
    steps: int | None = None,
    constants: Constants = 1.0,
    tied: Sequence[str] = (),
) -> Prediction:
    """The norm that AdamC will reach, whose decay a step is ``weight_decay * lr_t^2 / max(lr)``.
    Arguments as for :func:`adamw`."""
    return _predict("AdamC", weights, lr, weight_decay, steps, constants, tied)


def decay_for(
    weights: Weights,
    ratio: float,
    lr: LearningRate | None = None,
    *,
    steps: int | None = None,
    constants: Constants = 1.0,
    tied: Sequence[str] = (),
    method: str = "AdamW",
) -> float:
    """The decay with which AdamW (or ``method="AdamC"``) is predicted to end at this ratio to the
    initial norm.

    >>> matrices = [TensorClass("matrices", 1000, 0.02)]
    >>> decay = decay_for(matrices, 2.0, 1e-3, steps=20_000)
    >>> round(adamw(matrices, 1e-3, decay, steps=20_000).ratio, 6)
    2.0
    """
    if not (math.isfinite(ratio) and ratio > 0):
        raise ValueError(
            f"ratio={ratio}: a norm is a positive multiple of the initial one. Give a number above "
            "0."
        )
    found = classes_of(weights, tied)
    lrs = _lrs(lr, steps, found)
    start = sum(c.count * c.rms**2 for c in found)

    rates = {c.group: torch.tensor(lrs[c.group], dtype=torch.float64) for c in found}

    def reached(decay: float) -> float:
        ends = {
            g: [float(x[-1]) for x in walk(rates[g], decays(method, rates[g], decay))]
            for g in rates
        }
        squares = (
            c.count
            * (
                ends[c.group][0] * c.rms**2
                + constant_of(c, constants, 0.0).value * ends[c.group][1]
            )
            for c in found
        )
        return math.sqrt(max(sum(squares), 0.0) / start)

    decay = solve(
        reached,
        ratio,
        1 / max(map(max, lrs)),
        f"a ratio of {ratio:.4g} at the end of {len(lrs[0]):,} steps of {method}",
    )
    _predict(method, found, lr, decay, steps, constants, ())  # which says what is doubtful about it
    return decay


def solve(value: Callable[[float], float], wanted: float, most: float, what: str) -> float:
    """The decay from 0 to ``most`` at which a function that falls with the decay has the wanted
    value."""
    high, low = value(0.0), value(most)
    if not low <= wanted <= high:
        end = (
            f"without any decay it is predicted to be {high:.4g}"
            if wanted > high
            else f"with a decay of {most:.4g} it is still {low:.4g}"
        )
        raise ValueError(
            f"No decay gives {what}: {end}. Change the learning rate or the horizon, or hold the "
            "norm there with AdamWN."
        )
    left, right = 0.0, most
    for _ in range(60):
        middle = (left + right) / 2
        left, right = (middle, right) if value(middle) > wanted else (left, middle)
    return (left + right) / 2


def decays(method: str, lrs: Sequence[float] | Tensor, weight_decay: float) -> Tensor:
    """What each step takes off the weights, as a share of them."""
    lrs = torch.as_tensor(lrs, dtype=torch.float64)
    shares = weight_decay * (lrs if method == "AdamW" else lrs.square() / lrs.max())
    if shares.max() > 1 + 1e-12:
        raise ValueError(
            f"weight_decay={weight_decay:g} at a learning rate of {lrs.max():g} takes "
            f"{shares.max():.3g} times the weights off in one "
            "step: they would change sign. Give a decay of at most 1 / lr."
        )
    return shares


def walk(lrs: Sequence[float] | Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """(kept, noise) at every step from 0 on: the mean square of a class is then ``kept * initial +
    C * noise``.

    This is the recursion in closed form: of what a step adds, the decay of all later steps is kept,
    and products become sums of logarithms.
    """
    lrs = torch.as_tensor(lrs, dtype=torch.float64)
    logs = 2 * (1 - shares).clamp(min=1e-12).log().cumsum(0)
    noise = (logs + torch.logcumsumexp(2 * lrs.log() - logs, 0)).exp()
    first = torch.zeros(1, dtype=torch.float64)
    return torch.cat([first, logs]).exp(), torch.cat([first, noise])


def _predict(
    method: str,
    weights: Weights,
    lr: LearningRate | None,
    weight_decay: float | None,
    steps: int | None,
    constants: Constants,
    tied: Sequence[str],
) -> Prediction:
    found = classes_of(weights, tied)
    lrs = _lrs(lr, steps, found)
    walks: dict[tuple[int, float], tuple[Tensor, Tensor]] = {}
    classes = []
    for c in found:
        place = c.group, _decay(c, weight_decay)
        if place not in walks:
            walks[place] = walk(lrs[c.group], decays(method, lrs[c.group], place[1]))
        classes.append(_class(c, *walks[place], constants))
    start = sum(c.weights.count * c.weights.rms**2 for c in classes)
    ends = [
        sum(c.weights.count * x(c) ** 2 for c in classes)
        for x in (attrgetter("rms"), attrgetter("low"), attrgetter("high"))
    ]
    if not start > 0:
        raise ValueError(
            "All the weights are zero, so there is no initial norm to give a ratio to. Initialise "
            "the model first."
        )
    ratio, low, high = (math.sqrt(end / start) for end in ends)
    calibrated = isinstance(constants, Mapping)
    doubted = tuple(
        doubt for c in classes for doubt in doubts(c.weights, c.constant, c.kept, calibrated)
    )
    for doubt in doubted:
        warnings.warn(doubt, stacklevel=3)
    assumed = assumptions(found, calibrated, shown=isinstance(weights, nn.Module))
    return Prediction(
        method,
        len(lrs[0]),
        ratio,
        low,
        high,
        math.sqrt(ends[0]),
        tuple(classes),
        assumed,
        doubted,
        lrs,
    )


def _class(c: TensorClass, kept: Tensor, noise: Tensor, constants: Constants) -> ClassPrediction:
    left = float(kept[-1])
    constant = constant_of(c, constants, left)
    bounds = (constant.value, constant.low, constant.high)
    rms, low, high = (math.sqrt(max(left * c.rms**2 + x * float(noise[-1]), 0.0)) for x in bounds)
    return ClassPrediction(
        c, constant, left, rms, low, high, (kept * c.rms**2 + constant.value * noise).clamp(min=0)
    )


def _lrs(
    lr: LearningRate | None, steps: int | None, classes: list[TensorClass]
) -> list[list[float]]:
    """The learning rates of every group that a class is in."""
    groups = 1 + max(c.group for c in classes)
    own = {c.group: c.lr for c in classes}
    if lr is None:
        if None in own.values():
            raise ValueError(
                "No learning rate was given, and a model has none: give lr=, or an optimizer."
            )
        return [learning_rates(own[g] or 0.0, steps)[0] if g in own else [] for g in range(groups)]
    lrs = learning_rates(lr, steps)
    if len(lrs) == 1:
        different = sorted({rate for rate in own.values() if rate is not None})
        if len(different) > 1:
            raise ValueError(
                f"One learning rate was given, but the groups have different ones: {different}. "
                "Give torch's scheduler, which knows that "
                "of each group."
            )
        return lrs * groups
    if len(lrs) < groups or (groups == 1 and any(one != lrs[0] for one in lrs)):
        raise ValueError(
            f"The scheduler is of {len(lrs)} groups, which do not fit the weights given: give its "
            "optimizer in place of the model."
        )
    return lrs


def _decay(c: TensorClass, given: float | None) -> float:
    decay = c.weight_decay if given is None else given
    if decay is None:
        raise ValueError(
            "No weight decay was given, and a model has none: give weight_decay=, or an optimizer."
        )
    if not (math.isfinite(decay) and decay >= 0):
        raise ValueError(
            f"weight_decay={decay}: decay shortens weights, so it cannot be negative or NaN. Give "
            "0 or more."
        )
    return decay
