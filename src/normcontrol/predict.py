"""The norm that AdamW will reach, before it is trained: the norm to aim at, without a pilot run.

Adam's steps are nearly a random walk with steps of ``lr`` for every weight, and decay shortens what has been walked. So the mean
square q of each class of tensors follows ``q <- (1 - lr * decay)^2 q + C * lr^2``, where C is 1 if the gradients of all steps are
independent. A :class:`Prediction` says what that gives, within which bounds, and where the model is known not to hold.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normcontrol.classes import TensorClass, classes_of
from normcontrol.learning_rates import LearningRate, learning_rates
from normcontrol.record import ClassTrace, NormTrace
from normcontrol.schedule import linear, trace

SPREAD = (0.5, 1.4)
"""Within these bounds lay C of the matrices of the GPTs that were measured: the error bars where nothing is calibrated."""
TIED = 3.0
"""About what C was for an embedding tied to the head in a short run: its gradients agree from step to step."""
SHORT = 0.05
"""A run is short for a class if decay leaves more than this share of its initial mean square (three relaxation times leave as much):
then what the first steps did, when gradients agree most, is still in the norm."""
ALL = "all"
"""The name of a constant that holds for every class."""

Weights = nn.Module | Optimizer | Iterable[TensorClass]


@dataclass(frozen=True)
class Constant:
    """C of a class, and the bounds within which it may be."""

    value: float
    low: float
    high: float


Constants = float | Mapping[str, Constant]


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
    """The predicted norm of all regularised weights together, as a ratio to the initial one with its bounds, and of each class.

    ``doubts`` says where the model is known not to hold. A prediction is used like a recorded run: ``final()`` and ``curve()`` are
    schedules for AdamWN's ``ratio``.
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
        """From 1 to the final ratio over ``ramp`` steps (default: 5 % of the run, as the paper's), then constant."""
        return linear(1.0, self.ratio, steps=max(1, round(0.05 * self.steps)) if ramp is None else ramp)

    def curve(self, points: int = 200) -> trace:
        """The whole predicted curve as a schedule, thinned to about so many points."""
        ratios, at = self.ratios, sorted({round(i * self.steps / points) for i in range(points + 1)})
        return trace([ratios[i] for i in at], at)

    def __str__(self) -> str:
        rows = [("class", "weights", "rms before", "rms after", "from", "to", "ratio", "C")]
        for c in self.classes:
            name = c.weights.name + (" (tied)" if c.weights.tied else "")
            sizes = (f"{x:.4g}" for x in (c.weights.rms, c.rms, c.low, c.high))
            rows.append((name, f"{c.weights.count:,}", *sizes, f"{c.ratio:.3f}", f"{c.constant.value:.3g}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(r, widths, strict=True))) for r in rows]
        bounds = f"{self.ratio:.3f} times the initial norm, from {self.low:.3f} to {self.high:.3f}"
        return "\n".join(
            [f"{self.method} after {self.steps:,} steps: {bounds}", *table, *(f"assumed: {a}" for a in self.assumptions)]
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

    Args:
        weights: a model (its matrices), an optimizer (what its groups decay), or a list of ``TensorClass(name, count, rms)``.
        lr: a number, a function of the step (1, 2, ...), one number for every step, a schedule of ours, or any learning rate scheduler
            of torch's, which is not moved. Default: the optimizer's own, constant.
        weight_decay: of all that is regularised. Default: the optimizer's own, group by group.
        steps: the horizon. Default: the number of learning rates, if a list is given.
        constants: what :func:`calibrate` found, or one number for all classes.
        tied: names of embeddings that serve as the head, where the model does not show it (see :func:`classes_of`).

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
    """The norm that AdamC will reach, whose decay a step is ``weight_decay * lr_t^2 / max(lr)``. Arguments as for :func:`adamw`."""
    return _predict("AdamC", weights, lr, weight_decay, steps, constants, tied)


def decay_for(
    weights: Weights,
    ratio: float,
    lr: LearningRate | None = None,
    *,
    steps: int | None = None,
    constants: Constants = 1.0,
    method: str = "AdamW",
) -> float:
    """The decay with which AdamW (or ``method="AdamC"``) is predicted to end at this ratio to the initial norm.

    >>> matrices = [TensorClass("matrices", 1000, 0.02)]
    >>> decay = decay_for(matrices, 2.0, 1e-3, steps=20_000)
    >>> round(adamw(matrices, 1e-3, decay, steps=20_000).ratio, 6)
    2.0
    """
    if not (math.isfinite(ratio) and ratio > 0):
        raise ValueError(f"ratio={ratio}: a norm is a positive multiple of the initial one. Give a number above 0.")
    found = classes_of(weights)
    lrs = _lrs(lr, steps, found)
    start = sum(c.count * c.rms**2 for c in found)

    def reached(decay: float) -> float:
        ends = {g: _end(lrs[g], decays(method, lrs[g], decay)) for g in {c.group for c in found}}
        squares = (c.count * (ends[c.group][0] * c.rms**2 + _constant(c, constants, 0.0).value * ends[c.group][1]) for c in found)
        return math.sqrt(max(sum(squares), 0.0) / start)

    return solve(reached, ratio, 1 / max(map(max, lrs)), f"a ratio of {ratio:.4g} at the end of {len(lrs[0]):,} steps of {method}")


def solve(value: Callable[[float], float], wanted: float, most: float, what: str) -> float:
    """The decay from 0 to ``most`` at which a function that falls with the decay has the wanted value."""
    high, low = value(0.0), value(most)
    if not low <= wanted <= high:
        end = (
            f"without any decay it is predicted to be {high:.4g}" if wanted > high else f"with a decay of {most:.4g} it is still {low:.4g}"
        )
        raise ValueError(f"No decay gives {what}: {end}. Change the learning rate or the horizon, or hold the norm there with AdamWN.")
    left, right = 0.0, most
    for _ in range(60):
        middle = (left + right) / 2
        left, right = (middle, right) if value(middle) > wanted else (left, middle)
    return (left + right) / 2


def calibrate(recorded: NormTrace | Mapping[str, ClassTrace]) -> dict[str, Constant]:
    """The constants C of one AdamW run, class by class, for predictions of other runs of the same model.

    Each is the C with which that run would have been predicted to end where it did. Its bounds are the least and the greatest that
    would have been found, had the run ended anywhere in its second half.

    >>> layer = nn.Linear(32, 32, bias=False)
    >>> optimizer = torch.optim.AdamW(layer.named_parameters(), lr=1e-2, weight_decay=0.1)
    >>> recorded = NormTrace(optimizer, every=10)
    >>> for _ in range(200):
    ...     layer.weight.grad = torch.randn(32, 32)
    ...     optimizer.step()
    >>> round(calibrate(recorded)["weight"].value)     # independent gradients
    1
    """
    classes = recorded.classes if isinstance(recorded, NormTrace) else recorded
    if not classes:
        raise ValueError(
            "The trace holds no norms of classes to find constants from: it is empty, or was saved as CSV, or is of an optimizer under "
            "norm control. Record a run of AdamW with NormTrace, and save it as JSON."
        )
    constants = {}
    for name, c in classes.items():
        if len(c.norms) < 2 or not c.noise[-1] > 0:
            raise ValueError(f"The trace of {name} is empty: no step that moved it is recorded. Record at least one.")
        first = c.norms[0] ** 2
        seen = [(n**2 - k * first) / (c.count * s) for n, k, s in zip(c.norms[1:], c.kept[1:], c.noise[1:], strict=True) if s > 0]
        late = seen[len(seen) // 2 :]
        constants[name] = Constant(late[-1], min(late), max(late))
    return constants


def decays(method: str, lrs: Sequence[float], weight_decay: float) -> list[float]:
    """What each step takes off the weights, as a share of them."""
    most = max(lrs)
    shares = [lr * weight_decay for lr in lrs] if method == "AdamW" else [weight_decay * lr * lr / most for lr in lrs]
    if max(shares) > 1 + 1e-12:
        raise ValueError(
            f"weight_decay={weight_decay:g} at a learning rate of {most:g} takes {max(shares):.3g} times the weights off in one step: they "
            "would change sign. Give a decay of at most 1 / lr."
        )
    return shares


def walk(lrs: Sequence[float], shares: Sequence[float]) -> tuple[list[float], list[float]]:
    """(kept, noise) at every step from 0 on: the mean square of a class is then ``kept * initial + C * noise``, exactly."""
    kept = list(accumulate(shares, lambda left, k: left * (1 - k) ** 2, initial=1.0))
    noise = list(accumulate(zip(lrs, shares, strict=True), lambda sum_, move: sum_ * (1 - move[1]) ** 2 + move[0] ** 2, initial=0.0))
    return kept, noise  # type: ignore[return-value]


def _end(lrs: Sequence[float], shares: Sequence[float]) -> tuple[float, float]:
    """The last of :func:`walk`, in vectors."""
    logs = torch.tensor(shares, dtype=torch.float64).neg().log1p().mul(2).cumsum(0)
    later = torch.where(logs.isinf(), -math.inf, logs[-1] - logs)  # of what each step added, decay in later steps leaves exp(later)
    later[-1] = 0.0
    return float(logs[-1].exp()), float((torch.tensor(lrs, dtype=torch.float64).square() * later.exp()).sum())


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
    walks: dict[tuple[int, float], tuple[list[float], list[float]]] = {}
    classes = []
    for c in found:
        place = c.group, _decay(c, weight_decay)
        if place not in walks:
            walks[place] = walk(lrs[c.group], decays(method, lrs[c.group], place[1]))
        classes.append(_class(c, *walks[place], constants))
    start = sum(c.weights.count * c.weights.rms**2 for c in classes)
    ends = [sum(c.weights.count * x(c) ** 2 for c in classes) for x in (attrgetter("rms"), attrgetter("low"), attrgetter("high"))]
    if not start > 0:
        raise ValueError("All the weights are zero, so there is no initial norm to give a ratio to. Initialise the model first.")
    ratio, low, high = (math.sqrt(end / start) for end in ends)
    doubts = tuple(doubt for c in classes for doubt in _doubts(c, isinstance(constants, Mapping)))
    for doubt in doubts:
        warnings.warn(doubt, stacklevel=3)
    assumptions = _assumptions(isinstance(constants, Mapping), any(_is_doubtful(c.weights, c.kept) for c in classes))
    return Prediction(method, len(lrs[0]), ratio, low, high, math.sqrt(ends[0]), tuple(classes), assumptions, doubts, lrs)


def _class(c: TensorClass, kept: list[float], noise: list[float], constants: Constants) -> ClassPrediction:
    constant = _constant(c, constants, kept[-1])
    rms, low, high = (math.sqrt(max(kept[-1] * c.rms**2 + x * noise[-1], 0.0)) for x in (constant.value, constant.low, constant.high))
    squares = torch.tensor(kept, dtype=torch.float64) * c.rms**2 + constant.value * torch.tensor(noise, dtype=torch.float64)
    return ClassPrediction(c, constant, kept[-1], rms, low, high, squares.clamp(min=0))


def _lrs(lr: LearningRate | None, steps: int | None, classes: list[TensorClass]) -> list[list[float]]:
    """The learning rates of every group that a class is in."""
    groups = 1 + max(c.group for c in classes)
    own = {c.group: c.lr for c in classes}
    if lr is None:
        if None in own.values():
            raise ValueError("No learning rate was given, and a model has none: give lr=, or an optimizer.")
        return [learning_rates(own[g] or 0.0, steps)[0] if g in own else [] for g in range(groups)]
    lrs = learning_rates(lr, steps)
    if len(lrs) == 1:
        if len({rate for rate in own.values() if rate is not None}) > 1:
            raise ValueError(
                f"One learning rate was given, but the groups have different ones: {sorted(set(own.values()))}. Give torch's scheduler, "
                "which knows that of each group."
            )
        return lrs * groups
    if len(lrs) < groups or (groups == 1 and any(one != lrs[0] for one in lrs)):
        raise ValueError(
            f"The scheduler is of {len(lrs)} groups, which do not fit the weights given: give its optimizer in place of the model."
        )
    return lrs


def _decay(c: TensorClass, given: float | None) -> float:
    decay = c.weight_decay if given is None else given
    if decay is None:
        raise ValueError("No weight decay was given, and a model has none: give weight_decay=, or an optimizer.")
    if not (math.isfinite(decay) and decay >= 0):
        raise ValueError(f"weight_decay={decay}: decay shortens weights, so it cannot be negative or NaN. Give 0 or more.")
    return decay


def _constant(c: TensorClass, constants: Constants, kept: float) -> Constant:
    if isinstance(constants, Mapping):
        found = constants.get(c.name, constants.get(ALL))
        if found is None:
            raise ValueError(
                f"The constants are of the classes {', '.join(constants)}; there is none for {c.name}. Calibrate on a run of the same "
                "model, and give both optimizers names: AdamW(model.named_parameters())."
            )
        return found
    value = float(constants)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"constants={constants}: C is the mean square that a step of lr 1 adds, a positive number near 1.")
    return Constant(value, min(SPREAD[0], value), max(TIED if _is_doubtful(c, kept) else SPREAD[1], value))


def _is_doubtful(c: TensorClass, kept: float) -> bool:
    return c.tied and kept > SHORT


def _doubts(c: ClassPrediction, calibrated: bool) -> list[str]:
    name, value = c.weights.name, c.constant.value
    if calibrated and value <= 0:
        return [
            f"The calibrated C of {name} is {value:.3g}: gradients shortened it by more than noise lengthens it, which is no random "
            "walk. Its norm is predicted for runs like the one calibrated on, and for no others."
        ]
    if not calibrated and _is_doubtful(c.weights, c.kept):
        return [
            f"{name} is an embedding tied to the head, and the run is short: decay leaves {c.kept:.0%} of what the first steps did. There "
            f"the random walk is known not to hold (C of about {TIED:g} was measured, not {value:g}), and the norm comes out too low. "
            "Calibrate on a run of this model, or record AdamW's norm with NormTrace."
        ]
    return []


def _assumptions(calibrated: bool, doubtful: bool) -> tuple[str, ...]:
    bounds = f"from {SPREAD[0]:g} to {SPREAD[1]:g}, as measured for matrices of GPTs{f', to {TIED:g} where doubtful' if doubtful else ''}"
    return (
        "each step adds C * lr^2 to the mean square of a class, with one C for the whole run, and decay takes its share",
        "C as calibrated; bounds: its range over the second half of that run"
        if calibrated
        else f"gradients of different steps are nearly independent (C = 1 if they are); bounds: C {bounds}",
    )
