"""Paired differences, with their number and a 95 % interval: what a claim is reported with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t, 97.5 %, for 1 to 30 degrees of freedom.
T975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences; without an interval if there is only one pair."""

    n: int
    mean: float
    half: float | None  # half the width of the 95 % interval

    @property
    def shown(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.half is not None and abs(self.mean) > self.half

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" if self.half is None else f"{self.mean:+.4f} ± {self.half:.4f}"


def paired(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Differences of runs that share seeds.

    >>> print(paired([1.0, 2.0, 3.0], [1.5, 2.5, 3.2]))     # mean -0.4, standard deviation 0.173, t = 4.303
    -0.4000 ± 0.4303
    >>> paired([1.0], [1.5])
    Difference(n=1, mean=-0.5, half=None)
    """
    differences = [a - b for a, b in zip(values, baseline, strict=True)]
    n, mean = len(differences), statistics.fmean(differences)
    if n < 2:
        return Difference(n, mean, None)
    t = T975[n - 2] if n - 1 <= len(T975) else 1.96
    return Difference(n, mean, t * statistics.stdev(differences) / math.sqrt(n))
