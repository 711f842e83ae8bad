"""The study ``longest``: AdamW and AdamWN with a rising target in nine times the steps of
``search``.

In ``growth`` AdamWN gained on AdamW with more steps, and was level with it in the longest runs that
were made. Here the runs are three times as long as those. Both arms start from the settings that
were best there, are tuned again around these by one rule, and are tested with new seeds. The plan
is in docs/longer.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from fractions import Fraction

from normcontrol.lab.studies.search import (
    FINALS,
    RISING,
    SIZES,
    Point,
    Protocol,
    beside,
    level,
    lower,
    trial,
)
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.studies.tuning import known
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.records import Results

LONGEST = Protocol(
    Fraction(9),
    warmups=(0.01, 0.025, 0.05, 0.1, 0.2, 0.35),
    decays=(0.0075, 0.0125, 0.02, 0.035, 0.06, 0.1, 0.17, 0.3, 0.56),
    seeds=range(201, 231),
)
"""The lists go further down than those of ``search``: longer runs want a lower decay and a shorter
warm-up."""

CENTRE: Point = (5, 4, 3, 1)
"""What ``growth`` tested with a third of the steps: a learning rate of 8.5e-3, a decay of 0.06 or a
ratio of 1.56, a tenth of warm-up, and 0.03 of the learning rate at the end."""

KINDS = (ADAMW, RISING)
ARMS = tuple(LONGEST.name(arm) for arm in KINDS)
REPAIRS, BEST, MORE = 2, 2, (1, 2)
"""How often the edges of what was tried are moved; how many of the best are run with which further
seeds."""


def star(centre: Point) -> list[Point]:
    """A point, and one place down and up from it in each setting.

    >>> star((5, 4, 3, 1))[:3]
    [(5, 4, 3, 1), (4, 4, 3, 1), (6, 4, 3, 1)]
    """
    return [centre, *(moved(centre, axis, step) for axis in range(4) for step in (-1, 1))]


def moved(point: Point, axis: int, step: int) -> Point:
    places = [place + step * (axis == i) for i, place in enumerate(point)]
    return (places[0], places[1], places[2], places[3])


def beyond(best: Sequence[Point], tried: Sequence[Point]) -> list[Point]:
    """One place beyond each edge of what was tried at which one of the best points lies. A final
    learning rate of zero is no edge.

    >>> beyond([(6, 4, 3, 0)], star((5, 4, 3, 1)))
    [(7, 4, 3, 0)]
    """
    found = [
        moved(point, axis, step)
        for point in best
        for axis in range(4)
        for step, end in ((-1, min(p[axis] for p in tried)), (1, max(p[axis] for p in tried)))
        if point[axis] == end
        and 0 <= end + step < SIZES[axis]
        and not (axis == 3 and FINALS[end] == 0)
    ]
    return list(dict.fromkeys(found))


def stages(scale: str, arm: str, done: Results) -> Iterator[list[Cell]]:
    """The cells of the tuning of an arm, then those of its test."""

    def cell(point: Point, seed: int, part: str) -> Cell:
        return trial(scale, arm, point, seed, part, LONGEST)

    def best(points: Sequence[Point], count: int, *seeds: int) -> list[Point]:
        def loss(point: Point) -> float:
            records = (done.of(cell(point, seed, "search")) for seed in seeds)
            return statistics.fmean(r.value() for r in records if r is not None)

        return sorted(points, key=loss)[:count]

    points = star(CENTRE)
    yield [cell(point, 0, "search") for point in points]
    new = beside(best(points, BEST, 0), points)
    for _ in range(1 + REPAIRS):
        yield [cell(point, 0, "search") for point in new]
        points += new
        new = beyond(best(points, BEST, 0), points)
    points = best(points, BEST, 0)
    yield [cell(point, seed, "choice") for point in points for seed in MORE]
    (chosen,) = best(points, 1, 0, *MORE)
    yield [cell(chosen, seed, "test") for seed in LONGEST.seeds]


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now; those of the test pair by pair."""
    found = [cell for arm in KINDS for cell in known(stages(scale, arm, done), done)]
    tests = sorted((c for c in found if c.part == "test"), key=lambda c: c.seed)
    return [c for c in found if c.part != "test"] + tests


STUDY = Study(
    "longest",
    cells,
    "AdamW and AdamWN with a rising target in nine times the steps of the study search, tuned "
    "around the settings of the study growth and tested with new seeds.",
    ARMS[0],
    (lower("lower in the longest runs", *ARMS), level("level in the longest runs", *ARMS)),
)
