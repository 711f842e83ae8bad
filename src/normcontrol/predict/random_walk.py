"""Predicts the norm that AdamW will reach, before training: a target norm without a pilot run.

The model: under Adam every weight makes nearly a random walk with steps of size ``lr``, and decay
makes the weights smaller. So the mean square q of each class of tensors follows ``q <- (1 - lr *
decay)^2 q + C * lr^2``, where C is 1 if the gradients of all steps are independent. A calibrated C
depends on the learning rate of the step. This file may not know how tensors are sorted into
classes, or how C is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normcontrol.groups.classes import TensorClass, classes_of
from normcontrol.predict.calibration import (
    Constants,
    assumptions,
    constant_of,
    doubts,
    law_of,
    with_untrained,
)
from normcontrol.predict.learning_rates import LearningRate, is_finite, learning_rates
from normcontrol.predict.prediction import ClassPrediction, Prediction
from normcontrol.warn import warn

Weights = nn.Module | Optimizer | Iterable[TensorClass]
"""What a prediction is made for: a model, an optimizer, or classes of tensors."""

EXACT: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
"""What learning rates are computed in, whatever the default device is: not all have float64."""

METHODS = ("AdamW", "AdamC")
"""The methods whose decay :func:`decays` knows."""


def adamw(
    weights: Weights,
    lr: LearningRate | None = None,
    weight_decay: float | None = None,
    *,
    steps: int | None = None,
    constants: Constants = 1.0,
    tied: Sequence[str] = (),
) -> Prediction:
    """Predict the norm that ``torch.optim.AdamW`` will reach.

    Args:
        weights: a model (its matrices), an optimizer (the tensors that its groups decay), or a list
            of ``TensorClass(name, count, rms)``.
        lr: a number, a function of the step (1, 2, ...), one number for every step, a schedule of
            normcontrol, or a learning rate scheduler of torch, which does not advance. Default: the
            learning rate of the optimizer, constant.
        weight_decay: the decay of all regularised tensors. Default: that of the optimizer, group by
            group.
        steps: the number of steps. Default: the number of learning rates, if a list is given.
        constants: the result of :func:`calibrate`, or one number for all classes.
        tied: names of embeddings that are also the output head, if the model does not show it (see
            :func:`classes_of`).

    >>> gpt2 = [TensorClass("others", 88_965_120, 0.02)]
    >>> gpt2 += [TensorClass("c_proj", 35_389_440, 0.02 / 24**0.5)]
    >>> def lr(t):  # nanoGPT's schedule
    ...     cosine = math.cos(math.pi * (t - 2000) / 48_000)
    ...     return 1e-3 * (t / 2000 if t < 2000 else 0.55 + 0.45 * cosine)
    >>> prediction = adamw(gpt2, lr, weight_decay=0.1, steps=50_000, constants=0.84)
    >>> round(prediction.ratio, 3)     # the paper measured 2.415
    2.427
    >>> prediction.final()     # for AdamWN(ratio=...)
    linear(start=1.0, end=2.427..., steps=2500)
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
    """Predict the norm that AdamC will reach.

    AdamC decays the weights by ``weight_decay * lr_t^2 / max(lr)`` in each step. The arguments are
    those of :func:`adamw`.
    """
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
    """Return the decay for which the predicted final norm is ``ratio`` times the initial one.

    ``method`` is "AdamW" or "AdamC".

    >>> matrices = [TensorClass("matrices", 1000, 0.02)]
    >>> decay = decay_for(matrices, 2.0, 1e-3, steps=20_000)
    >>> round(adamw(matrices, 1e-3, decay, steps=20_000).ratio, 6)
    2.0
    """
    if not (is_finite(ratio) and ratio > 0):
        raise ValueError(
            f"ratio={ratio!r}: the final norm is a positive multiple of the initial one. Give a "
            "number above 0."
        )
    found = classes_of(weights, tied)
    lrs = _lrs(lr, steps, found)
    constants = with_untrained(constants, found, lrs)
    start = sum(c.count * c.rms**2 for c in found)
    rates = {c.group: torch.tensor(lrs[c.group], **EXACT) for c in found}
    laws = [(c.group, *law_of(c, constants)) for c in found]

    def reached(decay: float) -> float:
        ends = {
            (g, *law): [float(x[-1]) for x in walk(rates[g], decays(method, rates[g], decay), *law)]
            for g, *law in set(laws)
        }
        squares = (
            c.count
            * (ends[key][0] * c.rms**2 + constant_of(c, constants, 0.0).value * ends[key][1])
            for c, key in zip(found, laws, strict=True)
        )
        return math.sqrt(max(sum(squares), 0.0) / start)

    decay = solve(
        reached,
        ratio,
        1 / max(map(max, lrs)),
        f"a ratio of {ratio:.4g} at the end of {len(lrs[0]):,} steps of {method}",
    )
    _predict(method, found, lr, decay, steps, constants, ())  # warns if there are doubts
    return decay


def solve(value: Callable[[float], float], wanted: float, most: float, what: str) -> float:
    """The decay between 0 and ``most`` at which a function of the decay has the value ``wanted``.
    The function must be decreasing. ``what`` describes the value in the error message."""
    high, low = value(0.0), value(most)
    if not low <= wanted <= high:
        limit = (
            f"without decay it is predicted to be {high:.4g}"
            if wanted > high
            else f"with a decay of {most:.4g} it is still {low:.4g}"
        )
        raise ValueError(
            f"No decay gives {what}: {limit}. Change the learning rate or the number of steps, or "
            "control the norm with AdamWN."
        )
    left, right = 0.0, most
    for _ in range(60):
        middle = (left + right) / 2
        left, right = (middle, right) if value(middle) > wanted else (left, middle)
    return (left + right) / 2


def decays(method: str, lrs: Sequence[float] | Tensor, weight_decay: float) -> Tensor:
    """The fraction of the weights that decay subtracts in each step."""
    if method not in METHODS:
        raise ValueError(
            f"method={method!r} is not known: give one of {', '.join(map(repr, METHODS))}."
        )
    lrs = torch.as_tensor(lrs, **EXACT)
    peak = lrs.max().clamp(min=torch.finfo(lrs.dtype).tiny)  # 0 in a group that is frozen
    fractions = weight_decay * (lrs if method == "AdamW" else lrs.square() / peak)
    if fractions.max() > 1 + 1e-12:
        raise ValueError(
            f"weight_decay={weight_decay:g} at a learning rate of {lrs.max():g} subtracts "
            f"{fractions.max():.3g} times the weights in one step, so that they would change sign. "
            "Give a decay of at most 1 / lr."
        )
    return fractions


def walk(
    lrs: Sequence[float] | Tensor, fractions: Tensor, exponent: float = 0.0, reference: float = 1.0
) -> tuple[Tensor, Tensor]:
    """``kept`` and ``noise`` at every step from 0 on, for the learning rates of steps 1, 2, ... and
    the fractions of :func:`decays`. The mean square of a class is ``kept * initial + C * noise``,
    where C is that of the learning rate ``reference``; it is proportional to ``lr^-exponent``.

    This is the recursion in closed form. What a step adds is reduced by the decay of all later
    steps; the products of these factors are computed as sums of logarithms.
    """
    lrs = torch.as_tensor(lrs, **EXACT)
    logs = 2 * (1 - fractions).clamp(min=1e-12).log().cumsum(0)
    added = (2 - exponent) * lrs.log() + exponent * math.log(reference)
    noise = (logs + torch.logcumsumexp(added - logs, 0)).exp()
    first = torch.zeros(1, **EXACT)
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
    constants = with_untrained(constants, found, lrs)
    walks: dict[tuple[float, ...], tuple[Tensor, Tensor]] = {}
    classes = []
    for c in found:
        decay, law = _decay(c, weight_decay), law_of(c, constants)
        key = c.group, decay, *law
        if key not in walks:
            walks[key] = walk(lrs[c.group], decays(method, lrs[c.group], decay), *law)
        classes.append(_class(c, *walks[key], constants))
    start = sum(c.weights.count * c.weights.rms**2 for c in classes)
    ends = [
        sum(c.weights.count * getattr(c, name) ** 2 for c in classes)
        for name in ("rms", "low", "high")
    ]
    if not start > 0:
        raise ValueError(
            "All weights are zero, so a ratio to the initial norm is not defined. Initialise the "
            "model first."
        )
    ratio, low, high = (math.sqrt(end / start) for end in ends)
    calibrated = isinstance(constants, Mapping)
    doubted = tuple(
        doubt
        for c in classes
        if any(lrs[c.weights.group])
        for doubt in doubts(c.weights, c.constant, c.kept, calibrated)
    )
    for doubt in doubted:
        warn(doubt)
    assumed = assumptions(found, constants, shown=isinstance(weights, nn.Module))
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
                "No learning rate was given, and a model has none. Give lr=, or an optimizer."
            )
        rates = [own.get(g) or 0.0 for g in range(groups)]
        count = len(learning_rates(max(rates), steps)[0])  # of a frozen group the rate may be 0
        return [[rate] * count for rate in rates]
    lrs = learning_rates(lr, steps)
    if len(lrs) == 1:
        different = sorted({rate for rate in own.values() if rate is not None})
        if len(different) > 1:
            raise ValueError(
                f"One learning rate was given, but the groups have different ones: {different}. "
                "Give a scheduler of torch, which has one for each group."
            )
        return lrs * groups
    if len(lrs) < groups or (groups == 1 and any(one != lrs[0] for one in lrs)):
        raise ValueError(
            f"The scheduler has {len(lrs)} groups, which do not match the given weights. Give its "
            "optimizer in place of the model."
        )
    return lrs


def _decay(c: TensorClass, given: float | None) -> float:
    decay = c.weight_decay if given is None else given
    if decay is None:
        raise ValueError(
            "No weight decay was given, and a model has none, nor has an optimizer under norm "
            "control. Give weight_decay=, or an optimizer that decays."
        )
    if not (is_finite(decay) and decay >= 0):
        raise ValueError(
            f"weight_decay={decay!r}: it must be finite and not negative. Give a number, 0 or more."
        )
    return decay
