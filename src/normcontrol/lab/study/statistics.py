"""Paired differences with their 95 % interval, and the other statistics of a verdict.

Arithmetic on lists of losses: this module does not know runs or studies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t, 97.5 % and 80 %, for 1 to 30 degrees of freedom.
T975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
T80 = (
    *(1.376, 1.061, 0.978, 0.941, 0.920, 0.906, 0.896, 0.889, 0.883, 0.879),
    *(0.876, 0.873, 0.870, 0.868, 0.866, 0.865, 0.863, 0.862, 0.861, 0.860),
    *(0.859, 0.858, 0.858, 0.857, 0.856, 0.856, 0.855, 0.855, 0.854, 0.854),
)


def student(table: Sequence[float], freedom: int, normal: float) -> float:
    """A quantile of Student's t; beyond the table, the normal distribution's."""
    return table[freedom - 1] if freedom <= len(table) else normal


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences; without an interval if there is only one pair."""

    n: int
    mean: float
    half: float | None  # half the width of the 95 % interval
    detectable: float | None = None
    """The true difference that ``n`` pairs with this spread would show in four of five studies."""

    @property
    def shown(self) -> bool:
        """True if zero is outside the interval."""
        return self.half is not None and abs(self.mean) > self.half

    @property
    def below(self) -> bool:
        return self.shown and self.mean < 0

    @property
    def above(self) -> bool:
        return self.shown and self.mean > 0

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" if self.half is None else f"{self.mean:+.4f} ± {self.half:.4f}"


def paired(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Differences of runs that share seeds.

    With a mean of -0.4, a standard deviation of 0.173, and t = 4.303:

    >>> print(paired([1.0, 2.0, 3.0], [1.5, 2.5, 3.2]))
    -0.4000 ± 0.4303
    >>> paired([1.0], [1.5])
    Difference(n=1, mean=-0.5, half=None, detectable=None)
    """
    differences = [a - b for a, b in zip(values, baseline, strict=True)]
    n, mean = len(differences), statistics.fmean(differences)
    if n < 2:
        return Difference(n, mean, None)
    error = statistics.stdev(differences) / math.sqrt(n)
    t = student(T975, n - 1, 1.96)
    return Difference(n, mean, t * error, (t + student(T80, n - 1, 0.842)) * error)


def steps_to(steps: Sequence[int], losses: Sequence[float], level: float) -> float | None:
    """The step at which a loss curve first reaches a level, interpolated between its points; None
    if it never does.

    >>> steps_to([0, 100, 200], [4.0, 3.0, 2.5], 2.75)
    150.0
    """
    for (start, high), (end, low) in zip(
        zip(steps, losses, strict=True), zip(steps[1:], losses[1:], strict=True), strict=False
    ):
        if high <= level:
            return float(start)
        if low <= level:
            return start + (end - start) * (high - level) / (high - low)
    return None


def best_of(losses: Sequence[float]) -> list[float]:
    """The expected lowest loss of k = 1, 2, ... trials drawn at random from those that were made.

    It shows how many trials a method needs. The loss of a trial that diverged is infinite.

    >>> [round(loss, 3) for loss in best_of([1.0, 2.0, 3.0])]
    [2.0, 1.333, 1.0]
    """
    ordered, n = sorted(losses), len(losses)
    curve = []
    for k in range(1, n + 1):
        weights = [math.comb(n - 1 - i, k - 1) / math.comb(n, k) for i in range(n)]
        curve.append(sum(w * x for w, x in zip(weights, ordered, strict=True) if w))
    return curve


def lowest_point(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The minimum of the parabola through the lowest point and its neighbours, or the lowest point
    itself if it is at an end of the grid.

    >>> round(lowest_point([0.0, 1.0, 2.0], [1.21, 0.01, 0.81]), 9)
    1.1
    >>> lowest_point([0.0, 1.0, 2.0], [1.0, 2.0, 3.0])
    0.0
    """
    points = sorted(zip(xs, ys, strict=True))
    best = min(range(len(points)), key=lambda i: points[i][1])
    if best in (0, len(points) - 1) or not all(
        math.isfinite(y) for _, y in points[best - 1 : best + 2]
    ):
        return points[best][0]
    (x0, y0), (x1, y1), (x2, y2) = points[best - 1 : best + 2]
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    return (x0 + x1) / 2 - left * (x2 - x0) / (2 * (right - left)) if right != left else x1
