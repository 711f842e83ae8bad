"""The result of a prediction: the predicted norms with their bounds, as text and as schedules.

It may not know how the numbers are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normcontrol.groups.classes import TensorClass
from normcontrol.predict.calibration import Constant
from normcontrol.schedule import linear, trace
from normcontrol.watch.trace import check_whole


@dataclass(frozen=True)
class ClassPrediction:
    """The prediction for one class.

    Attributes:
        weights: the class, with its initial rms.
        constant: its constant C.
        kept: the fraction of the initial mean square that decay leaves.
        rms: the root mean square of the weights at the end.
        low, high: the bounds of ``rms``.
        squares: the mean square of the weights at every step, from 0 on.
    """

    weights: TensorClass
    constant: Constant
    kept: float
    rms: float
    low: float
    high: float
    squares: Tensor = field(repr=False, compare=False)

    @property
    def ratio(self) -> float:
        """The final norm divided by the initial one."""
        return self.rms / self.weights.rms if self.weights.rms else math.inf


@dataclass(frozen=True)
class Prediction:
    """The predicted norm of all regularised weights together, and of each class.

    It is used like a recorded run: :meth:`final` and :meth:`curve` are schedules for the ``ratio``
    of AdamWN.

    Attributes:
        method: "AdamW" or "AdamC".
        steps: the number of steps.
        ratio: the final joint norm divided by the initial one.
        low, high: the bounds of ``ratio``.
        norm: the final joint norm.
        classes: the predictions for the classes.
        assumptions: what the prediction assumes.
        doubts: reasons why it may be wrong.
        lrs: the learning rates of steps 1, 2, ... for each parameter group.
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
    lrs: list[list[float]] = field(repr=False, compare=False)

    @property
    def holds(self) -> bool:
        """True if there are no doubts."""
        return not self.doubts

    @property
    def ratios(self) -> list[float]:
        """The predicted ratio at every step, from 0 on."""
        total = torch.stack([c.weights.count * c.squares for c in self.classes]).sum(0)
        return (total / total[0]).sqrt().tolist()

    def final(self, ramp: float | None = None) -> linear:
        """A schedule from 1 to the final ratio in ``ramp`` steps, then constant. Default: 5 % of
        the steps, as in the paper."""
        steps = max(1, round(0.05 * self.steps)) if ramp is None else ramp
        return linear(1.0, self.ratio, steps=steps)

    def curve(self, points: int = 200) -> trace:
        """The whole predicted curve as a schedule, with about this number of points."""
        return sampled(self.ratios, points)

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
                *(f"DOUBTFUL: {d}" for d in self.doubts),
            ]
        )


def sampled(ratios: Sequence[float], points: int) -> trace:
    """A schedule from the ratios at all steps, from 0 on, with about this number of points."""
    check_whole("points", points, "the number of points of the curve")
    steps = len(ratios) - 1
    at = sorted({round(i * steps / points) for i in range(points + 1)})
    return trace([ratios[i] for i in at], at)
