"""How the arms of a study are tuned: by one rule, with equal trials, in the first seed alone.

An arm is tuned in its learning rate and in one setting beside it, a decay or a gain. The best trial
is then run with other seeds, which have no part in the choice. Which arms and seeds there are, and
what is claimed about them, is in the studies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normcontrol.lab.study.cells import SEEDS, Cell
from normcontrol.lab.study.records import Results
from normcontrol.lab.training.config import Config

TUNING = "tuning"
"""The part of the trials from which settings are chosen."""

TRIALS, EXTRA = 6, 2
"""How many trials an arm is tuned with, and how many more it may have while its best lies at the
edge of what was tried."""


@dataclass(frozen=True)
class Arm:
    """A tuned arm: its fixed settings, and the seven values of the setting that is tuned beside the
    learning rate. The first three trials are ``values[2:5]``; the ends are for a best that lies at
    the edge of those."""

    fixed: Mapping[str, Any]
    key: str
    values: tuple[float, ...]
    lr: float | None = None
    """The middle of the learning rates that are tried, if it is not that of the base."""


@dataclass(frozen=True)
class Tuned:
    """Arms that start from one config."""

    base: Config
    arms: Mapping[str, Arm]

    def trial(self, name: str, seed: int, lr: float, value: float, part: str) -> Cell:
        """A run of an arm."""
        arm = self.arms[name]
        settings = (("lr", lr), (arm.key, value))
        config = seeded(self.base.with_(**arm.fixed, **dict(settings)), seed)
        return Cell(name, config, seed, settings, part)

    def tuning(self, name: str, done: Results) -> Iterator[Cell]:
        """The trials of an arm with the first seed, as far as they can be named by now.

        Three values at the middle learning rate; half and twice the learning rate at the best of
        these; then, one at a time, the trial that :func:`further` names.
        """
        rates, values = self.learning_rates(name), self.arms[name].values
        middle = len(rates) // 2

        def cell(point: tuple[int, int]) -> Cell:
            return self.trial(name, 0, rates[point[0]], values[point[1]], TUNING)

        tried = [(middle, i) for i in (middle, middle - 1, middle + 1)]
        yield from map(cell, tried)
        while losses := _losses(done, [cell(point) for point in tried]):
            if len(tried) == 3:
                value = _best(tried, losses)[1]
                new = [(middle - 1, value), (middle + 1, value)]
            else:
                new = further(tried, losses, len(values))
            if not new:
                return
            yield from map(cell, new)
            tried += new

    def fresh(self, name: str, done: Results, seeds: Sequence[int], part: str) -> list[Cell]:
        """The chosen setting of an arm with other seeds."""
        best = done.best(self.tuning(name, done))
        assert best is not None
        (_, lr), (_, value) = best.settings
        return [self.trial(name, seed, lr, value, part) for seed in seeds]

    def stages(
        self, done: Results, seeds: Sequence[int], names: Iterable[str] = ()
    ) -> Iterator[list[Cell]]:
        """The tuning of these arms, or of all; then their test, seed by seed."""
        names = list(names or self.arms)
        yield [cell for name in names for cell in self.tuning(name, done)]
        tests = [self.fresh(name, done, seeds, "seeds") for name in names]
        yield [cell for cells in zip(*tests, strict=True) for cell in cells]

    def learning_rates(self, name: str) -> tuple[float, ...]:
        """Factors of two around the middle learning rate of an arm."""
        middle = self.arms[name].lr or self.base.optim.lr
        return tuple(middle * 2.0**power for power in range(-3, 4))


def known(stages: Iterator[list[Cell]], done: Results) -> list[Cell]:
    """The cells that can be named by now: of every stage up to the first that is not finished."""
    wanted: list[Cell] = []
    for stage in stages:
        wanted += stage
        if not done.done(wanted):
            break
    return wanted


def seeded(config: Config, seed: int) -> Config:
    return config.with_(**dict.fromkeys(SEEDS, seed))


def _losses(done: Results, cells: Sequence[Cell]) -> list[float]:
    """The losses of cells; none if one of them was not run yet."""
    records = [done.of(cell) for cell in cells]
    return [] if None in records else [r.value() for r in records if r is not None]


def _best(tried: Sequence[tuple[int, int]], losses: Sequence[float]) -> tuple[int, int]:
    return tried[min(range(len(tried)), key=lambda i: losses[i])]


def further(
    tried: Sequence[tuple[int, int]], losses: Sequence[float], count: int
) -> list[tuple[int, int]]:
    """The next trial, as places in the list of learning rates and in that of values.

    Where the best lies at the edge of what was tried, one step beyond it, the value before the
    learning rate. Otherwise, up to six trials, the corner between its better neighbours in the two
    directions.

    >>> cross = [(3, 3), (3, 2), (3, 4), (2, 3), (4, 3)]
    >>> further(cross, [1.0, 1.2, 1.1, 1.2, 1.1], 7)
    [(4, 4)]
    >>> further([(3, 3), (3, 2), (3, 4), (2, 4), (4, 4)], [1.0, 1.1, 0.9, 1.2, 1.1], 7)
    [(3, 5)]
    >>> further([*cross, (4, 4)], [1.0, 1.2, 1.1, 1.2, 1.1, 1.1], 7)
    []
    """
    best = _best(tried, losses)
    loss = dict(zip(tried, losses, strict=True))
    if len(tried) < TRIALS + EXTRA:
        for axis in (1, 0):
            seen = {point[axis] for point in tried}
            for end, step in ((min(seen), -1), (max(seen), 1)):
                beyond = best[axis] + step
                if best[axis] == end and 0 <= beyond < count:
                    return [(best[0], beyond) if axis else (beyond, best[1])]
    if len(tried) >= TRIALS:
        return []

    def towards(axis: int) -> int:
        def beside(step: int) -> float:
            point = (best[0], best[1] + step) if axis else (best[0] + step, best[1])
            return loss.get(point, math.inf)

        return best[axis] + min((1, -1), key=beside)

    corner = (towards(0), towards(1))
    return [corner] if corner not in loss else []
