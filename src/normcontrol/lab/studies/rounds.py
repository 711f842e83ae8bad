"""The study ``rounds``: what ``repeated`` saw, once more, with longer warm-ups and new seeds.

There the best warm-up was the longest of the list, so that nothing could be shown. Here both arms
are tuned again on the repeated text, with longer ones, and tested with new seeds. On text seen once
they have the settings that ``search`` chose. The plan is in docs/repeated.md.

A control was added with the results in view: AdamW as ``repeated`` had tuned it. No claim is about
it.
"""

from __future__ import annotations

from dataclasses import replace

from normcontrol.lab.studies.growth import SHORT
from normcontrol.lab.studies.repeated import REPEATED, gains_from_repetition, of_both
from normcontrol.lab.studies.search import Point, Protocol, lower, trial
from normcontrol.lab.studies.settled import ADAMW, ADAMWN
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.records import Results

SEEDS = range(421, 461)
"""No study was run with them before."""

AGAIN = replace(REPEATED, warmups=SHORT.warmups, seeds=SEEDS)
ONCE = Protocol(seeds=SEEDS[:20])


TUNED_BEFORE = "AdamW, repeated text, tuned before"
CHOSEN: Point = (5, 5, 4, 1)
"""What ``repeated`` chose for it: a learning rate of 8.5e-3, a decay of 1, 0.35 of the steps as
warm-up, and 0.03 of the learning rate at the end."""


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now."""
    planned = of_both(scale, done, AGAIN, ONCE)
    before = [trial(scale, ADAMW, CHOSEN, seed, "control", REPEATED) for seed in SEEDS]
    return planned + [replace(cell, arm=TUNED_BEFORE) for cell in before]


STUDY = Study(
    "rounds",
    cells,
    "The study repeated once more: AdamW and AdamWN tuned again on a text that is seen ten times, "
    "with longer warm-ups, and tested with new seeds.",
    AGAIN.name(ADAMW),
    (
        lower("lower", AGAIN.name(ADAMW), AGAIN.name(ADAMWN)),
        gains_from_repetition(AGAIN, ONCE),
    ),
)
