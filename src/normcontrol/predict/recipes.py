"""Converts settings between methods.

The decay of AdamW becomes a ratio for AdamWN, a decay for AdamC or a learning rate for AdamH; and
back. :func:`transfer` converts settings to another size of a run. This file may not know how these
methods are implemented.

No two of these methods are equivalent, so only one quantity can be made equal: the final norm, or
the size of the updates relative to the weights. Every :class:`Recipe` says which. The conversions
use the predictions of :mod:`normcontrol.predict`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normcontrol.groups.classes import classes_of
from normcontrol.predict import random_walk
from normcontrol.predict.calibration import Constants
from normcontrol.predict.learning_rates import LearningRate
from normcontrol.predict.prediction import ClassPrediction, Prediction
from normcontrol.predict.random_walk import EXACT, Weights, decay_for, decays, solve, walk
from normcontrol.predict.recipe import Recipe
from normcontrol.predict.transfer import Size, transfer
from normcontrol.schedule import Schedule, Value, trace
from normcontrol.schedule_text import given_schedule

__all__ = ["Recipe", "Size", "adamc", "adamh", "adamw", "adamwn", "transfer", "update_size"]


def adamwn(plan: Prediction, equal: str = "norm") -> Recipe:
    """Return settings of AdamWN that replace a predicted AdamW.

    Use them as ``AdamWN(params, lr=lr, **adamwn(plan).settings)``. ``equal="norm"`` makes the final
    norm equal, and ``equal="update"`` the norm at every step.

    >>> from normcontrol import predict
    >>> plan = predict.adamw([predict.TensorClass("matrices", 1000, 0.02)], 1e-3, 0.1, steps=10_000)
    >>> print(adamwn(plan))
    AdamWN(ratio=linear(start=1.0, end=3.308..., steps=500))
    equal: the joint norm at the end, 3.308 times the initial one
    """
    if _known(plan, equal) == "norm":
        return Recipe("AdamWN", {"ratio": plan.final()}, _end_norm(plan.ratio), plan.doubts)
    same = "the joint norm at every step, and so the size of every update relative to it"
    return Recipe("AdamWN", {"ratio": plan.curve()}, same, plan.doubts)


def adamc(plan: Prediction, equal: str = "norm") -> Recipe:
    """Return settings of AdamC that replace a predicted AdamW.

    They are the ``weight_decay`` of AdamC's rule ``weight_decay * lr_t^2 / max(lr)``. At a constant
    learning rate the two methods are the same.

    >>> from normcontrol import predict
    >>> plan = predict.adamw([predict.TensorClass("matrices", 1000, 0.02)], 1e-3, 0.1, steps=10_000)
    >>> round(adamc(plan).settings["weight_decay"], 6)
    0.1
    """
    if _known(plan, equal) == "norm":
        decay = _decay_for(plan, plan.ratio, "AdamC")
        return Recipe("AdamC", {"weight_decay": decay}, _end_norm(plan.ratio), plan.doubts)
    rates = torch.tensor(_rates(plan), **EXACT)

    def inverse_update(decay: float) -> float:
        fractions = decays("AdamC", rates, decay)
        squares = []
        for c in plan.classes:
            kept, noise = walk(rates, fractions, c.constant.exponent, c.constant.lr)
            squares.append(kept * c.weights.rms**2 + c.constant.value * noise)
        return 1 / _root_mean_square(_relative_updates(plan, plan.classes, squares))

    wanted = _root_mean_square(_relative_updates(plan, plan.classes))
    decay = solve(
        inverse_update, 1 / wanted, 1 / float(rates.max()), "AdamC so large a relative update"
    )
    same = "the size of the updates relative to the joint norm, as a root mean square over the run"
    return Recipe("AdamC", {"weight_decay": decay}, same, plan.doubts)


def adamh(plan: Prediction, equal: str = "update", beta1: float = 0.9) -> Recipe:
    """Return settings of AdamH (Hyperball) that replace a predicted AdamW, for the hidden matrices.

    AdamH keeps the norm constant, and the norm of every update is ``lr`` times that of the weights.
    Under Adam it is ``sqrt((1 - beta1) / (1 + beta1)) * lr / rms`` times that of the weights, if
    the gradients of different steps are independent (Kosson, 2023).
    """
    equal = _known(plan, equal)
    classes = _hidden(plan)
    update = update_size(beta1) * _relative_updates(plan, classes)
    at = sorted({1 + round(i * (plan.steps - 1) / 200) for i in range(201)})
    settings: dict[str, Any] = {"lr": trace([float(update[t - 1]) for t in at], at)}
    same = "the size of every update relative to the norm, for the hidden matrices together"
    if equal == "norm":
        start = sum(c.weights.count * c.weights.rms**2 for c in classes)
        end = sum(c.weights.count * c.rms**2 for c in classes)
        settings["init_scale"] = math.sqrt(end / start)
        same += (
            ", and their norm at the end, if they are multiplied by init_scale before training, "
            "since AdamH keeps it constant"
        )
    return Recipe("AdamH", settings, same, plan.doubts)


def adamw(
    weights: Weights,
    lr: LearningRate,
    *,
    steps: int | None = None,
    ratio: Value | None = None,
    adamc_decay: float | None = None,
    adamh_lr: float | None = None,
    beta1: float = 0.9,
    constants: Constants = 1.0,
) -> Recipe:
    """Return settings of AdamW that replace AdamWN, AdamC or AdamH.

    Give the ``ratio`` of AdamWN, the decay of AdamC, or the peak learning rate of AdamH. ``lr`` is
    the learning rate of AdamW.

    For AdamWN and AdamC the final norm is made equal. For AdamH it is the relative size of the
    updates of the hidden matrices at the end; its learning rate is assumed to have the shape of
    ``lr``.

    >>> from normcontrol import predict
    >>> recipe = adamw([predict.TensorClass("matrices", 1000, 0.02)], 1e-3, steps=10_000, ratio=3.0)
    >>> print(recipe)
    AdamW(weight_decay=0.129...)
    equal: the joint norm at the end, 3 times the initial one
    """
    given = [x for x in (ratio, adamc_decay, adamh_lr) if x is not None]
    if len(given) != 1:
        raise ValueError(
            f"{len(given)} of ratio=, adamc_decay= and adamh_lr= were given. Give exactly one: "
            "that of the method to be replaced."
        )
    if adamh_lr is not None and not adamh_lr > 0:
        raise ValueError(
            f"adamh_lr={adamh_lr}: it is the relative size of an update. Give a number above 0."
        )
    found = [c for c in classes_of(weights) if c.hidden or adamh_lr is None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the final prediction below warns
        free = random_walk.adamw(found, lr, 0.0, steps=steps, constants=constants)
        if adamh_lr is not None:
            rms = update_size(beta1) * max(map(max, free.lrs)) / adamh_lr
            end = rms / math.sqrt(
                sum(c.count * c.rms**2 for c in found) / sum(c.count for c in found)
            )
        elif adamc_decay is not None:
            end = random_walk.adamc(found, lr, adamc_decay, steps=steps, constants=constants).ratio
        else:
            target = given_schedule(ratio, "ratio")
            end = target(free.steps) if isinstance(target, Schedule) else target
        decay = decay_for(found, end, lr, steps=steps, constants=constants)
    doubts = random_walk.adamw(found, lr, decay, steps=steps, constants=constants).doubts
    same = _end_norm(end)
    if adamh_lr is not None:
        same = (
            "the relative size of the updates at the end, for the hidden matrices together, whose "
            f"norm is then {end:.4g} times the initial one"
        )
    return Recipe("AdamW", {"weight_decay": decay}, same, doubts)


def _end_norm(ratio: float) -> str:
    return f"the joint norm at the end, {ratio:.4g} times the initial one"


def update_size(beta1: float) -> float:
    """The root mean square of Adam's update at a learning rate of 1, for independent gradients. It
    is below 1 because momentum averages them."""
    if not 0 <= beta1 < 1:
        raise ValueError(f"beta1={beta1}: it must be in [0, 1).")
    return math.sqrt((1 - beta1) / (1 + beta1))


def _relative_updates(
    plan: Prediction,
    classes: Sequence[ClassPrediction],
    squares: Sequence[Tensor] | None = None,
) -> Tensor:
    """lr_t divided by the rms of the weights before step t, for steps 1, 2, ..., over some classes
    together. ``squares`` replaces the predicted mean squares."""
    squares = [c.squares for c in classes] if squares is None else squares
    moved = [
        c.weights.count * torch.tensor(plan.lrs[c.weights.group], **EXACT).square() for c in classes
    ]
    before = [c.weights.count * q[:-1] for c, q in zip(classes, squares, strict=True)]
    return (torch.stack(moved).sum(0) / torch.stack(before).sum(0)).sqrt()


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _decay_for(plan: Prediction, ratio: float, method: str) -> float:
    weights = [c.weights for c in plan.classes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the plan contains the doubts already
        constants = {c.weights.name: c.constant for c in plan.classes}
        rates, steps = _rates(plan), plan.steps
        return decay_for(weights, ratio, rates, steps=steps, constants=constants, method=method)


def _rates(plan: Prediction) -> list[float]:
    """The learning rates, which must be the same in all groups."""
    used = [plan.lrs[g] for g in sorted({c.weights.group for c in plan.classes})]
    if any(one != used[0] for one in used):
        raise ValueError(
            "The groups have different learning rates, so that one decay for AdamC is not enough. "
            "Convert each group separately."
        )
    return used[0]


def _hidden(plan: Prediction) -> list[ClassPrediction]:
    found = [c for c in plan.classes if c.weights.hidden]
    if not found:
        raise ValueError(
            "There are no hidden matrices, which AdamH would control: all weights are embeddings. "
            "Give a model or an optimizer with other matrices."
        )
    return found


def _known(plan: Prediction, equal: str) -> str:
    """Check the arguments of a conversion, and return ``equal``."""
    if not isinstance(plan, Prediction):
        raise TypeError(
            f"A recipe converts a prediction, but got a {type(plan).__name__}. Give what "
            "predict.adamw(model, lr, weight_decay, steps=...) returned."
        )
    if equal not in ("norm", "update"):
        raise ValueError(
            f"equal={equal!r} is not known. Give 'norm' (the final norm) or 'update' (the size of "
            "the updates relative to the weights)."
        )
    return equal
