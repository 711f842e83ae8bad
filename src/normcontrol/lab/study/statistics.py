"""Paired differences with their 95 % interval, tests, and the other statistics of a verdict.

Arithmetic on lists of losses: this module does not know runs or studies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

LEVEL = 0.05
"""The share of studies in which noise alone may decide something, in one direction or the other."""


def student_below(t: float, freedom: int) -> float:
    """The probability that Student's t is below ``t``: the closed form for a whole number of
    degrees of freedom.

    >>> round(student_below(12.706, 1), 4), round(student_below(-2.776, 4), 4)
    (0.975, 0.025)
    """
    angle = math.atan(t / math.sqrt(freedom))
    cos, odd = math.cos(angle), freedom % 2
    term = total = (cos if odd else 1.0) if freedom > 1 else 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cos * cos * (k - 1) / k
        total += term
    within = math.sin(angle) * total
    share = (1 + ((angle + within) * 2 / math.pi if odd else within)) / 2
    return min(max(share, 0.0), 1.0)  # rounding may end beyond


@lru_cache
def student(share: float, freedom: int) -> float:
    """The value that Student's t is below with probability ``share``, from 0.5 on.

    >>> round(student(0.975, 2), 3), round(student(0.8, 30), 3)
    (4.303, 0.854)
    """
    return _reaches(share, lambda t: student_below(t, freedom))


def power(away: float, freedom: int) -> float:
    """The probability that zero is outside the 95 % interval if the true difference is ``away``
    standard errors from it: that of the noncentral t distribution, beyond Student's bounds.

    >>> round(power(0.0, 4), 4), round(power(2.8, 1000), 3)
    (0.05, 0.799)
    """
    bound = student(1 - LEVEL / 2, freedom)
    # An integral over s, the estimated standard error in units of the true one: its square is
    # chi-squared / freedom. For a given s, what is left is normal. Beyond nine standard deviations
    # of s there is nothing to add up.
    width, pieces = 9 / math.sqrt(2 * freedom), 1000
    start, end = max(1 - width, 0.0), 1 + width
    constant = math.log(2 * freedom) / 2 - math.lgamma(freedom / 2)
    total = 0.0
    for i in range(pieces):
        s = start + (end - start) * (i + 0.5) / pieces
        half = freedom * s * s / 2
        density = math.exp(constant - half + math.log(half) * (freedom - 1) / 2)
        beyond = _normal_below(away - bound * s) + _normal_below(-away - bound * s)
        total += density * beyond
    return total * (end - start) / pieces


def _normal_below(z: float) -> float:
    return math.erfc(-z / math.sqrt(2)) / 2


@lru_cache
def detectable_errors(freedom: int) -> float:
    """The true difference, in standard errors, that four of five studies show.

    >>> round(detectable_errors(2), 2), round(detectable_errors(1000), 2)
    (5.65, 2.8)
    """
    return _reaches(0.8, lambda away: power(away, freedom))


def _reaches(share: float, rising: Callable[[float], float]) -> float:
    """Where a rising function reaches a share that it has not reached at 0."""
    low, high = 0.0, 1.0
    while rising(high) < share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < share else (low, middle)
    return high


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences; without an interval if there is only one pair."""

    n: int
    mean: float
    error: float | None
    """The standard error of the mean."""

    @property
    def half(self) -> float | None:
        """Half the width of the 95 % interval."""
        return None if self.error is None else student(1 - LEVEL / 2, self.n - 1) * self.error

    @property
    def detectable(self) -> float | None:
        """The true difference that ``n`` pairs with this spread would show in four of five
        studies."""
        return None if self.error is None else detectable_errors(self.n - 1) * self.error

    @property
    def shown(self) -> bool:
        """True if zero is outside the interval."""
        return self.half is not None and abs(self.mean) > self.half

    def chance_below(self, bound: float = 0.0) -> float:
        """The one-sided p-value of "the true difference is below ``bound``": how likely a mean this
        low is if it is not. 1 for a single pair.

        >>> round(paired([1.0, 2.0, 3.0], [1.5, 2.5, 3.2]).chance_below(), 3)
        0.029
        """
        if self.error is None:
            return 1.0
        if self.error == 0:
            return 0.0 if self.mean < bound else 1.0
        return student_below((self.mean - bound) / self.error, self.n - 1)

    def chance_above(self, bound: float = 0.0) -> float:
        """The one-sided p-value of "the true difference is above ``bound``"."""
        opposite = Difference(self.n, -self.mean, self.error)
        return opposite.chance_below(-bound)

    def chance_within(self, margin: float) -> float:
        """The p-value of "the true difference is smaller than ``margin``, in either direction": the
        larger one of two one-sided tests."""
        return max(self.chance_below(margin), self.chance_above(-margin))

    def chance_beyond(self, margin: float) -> float:
        """The p-value of "the true difference is larger than ``margin``, in one direction or the
        other"."""
        return min(self.chance_above(margin), self.chance_below(-margin))

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" if self.half is None else f"{self.mean:+.4f} ± {self.half:.4f}"


def paired(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Differences of runs that share seeds.

    With a mean of -0.4, a standard deviation of 0.173, and t = 4.303:

    >>> print(paired([1.0, 2.0, 3.0], [1.5, 2.5, 3.2]))
    -0.4000 ± 0.4303
    >>> paired([1.0], [1.5])
    Difference(n=1, mean=-0.5, error=None)
    """
    return average([a - b for a, b in zip(values, baseline, strict=True)])


def average(values: Sequence[float]) -> Difference:
    """The mean of values that are differences already, one for each seed."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Difference(n, mean, None)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Difference(n, mean, math.sqrt(squares / (n - 1) / n))


def any_of(chances: Sequence[float]) -> float:
    """The p-value of "one of these holds": the smallest, times their number.

    >>> any_of([0.5, 0.01])
    0.02
    """
    return min(1.0, len(chances) * min(chances))


def holm(chances: Sequence[float]) -> list[float]:
    """The p-values of tests that are made together, corrected by Holm: the smallest is multiplied
    by their number, the next by one less, and so on.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(chances)), key=lambda i: chances[i])
    corrected, highest = [0.0] * len(chances), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(chances) - rank) * chances[i]))
        corrected[i] = highest
    return corrected


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
