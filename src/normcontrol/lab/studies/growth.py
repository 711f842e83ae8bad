"""The study ``growth``: what ``horizon`` saw, once more, with new seeds and two claims.

There the best warm-up of the short runs was the longest of the list, so that nothing could be shown
about them. Here they are tuned again, with longer ones. The long runs have the settings that were
chosen there, in twice as many seeds. The plan is in docs/longer.md.
"""

from __future__ import annotations

from fractions import Fraction

from normcontrol.lab.studies.horizon import KINDS, better_with_more_steps
from normcontrol.lab.studies.search import RISING, Point, Protocol, level, searched, trial
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.records import Results

SEEDS = range(91, 131)
SHORT = Protocol(Fraction(1, 3), (0.1, 0.2, 0.35, 0.5, 0.65, 0.8), SEEDS)
LONG = Protocol(Fraction(3), seeds=SEEDS)
CHOSEN: dict[str, Point] = {ADAMW: (5, 2, 2, 1), RISING: (5, 4, 2, 1)}
"""What ``horizon`` chose for the long runs at tiny: a learning rate of 8.5e-3, a decay of 0.06 or a
ratio of 1.56, a tenth of warm-up, and 0.03 of the learning rate at the end."""


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now, the longest first."""
    tests = [
        trial(scale, arm, point, seed, "test", LONG)
        for arm, point in CHOSEN.items()
        for seed in SEEDS
    ]
    return tests + [cell for arm in KINDS for cell in searched(scale, arm, done, SHORT)]


STUDY = Study(
    "growth",
    cells,
    "The short and the long runs of the study horizon once more: the short ones tuned again, with "
    "longer warm-ups, and both tested with new seeds.",
    LONG.name(ADAMW),
    (
        better_with_more_steps(SHORT, LONG),
        level("level in long runs", LONG.name(ADAMW), LONG.name(RISING)),
    ),
)
