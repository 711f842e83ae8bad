"""The study ``rounds``: what ``repeated`` saw, once more, with longer warm-ups and new seeds.

There the best warm-up was the longest of the list, so that nothing could be shown. Here both arms
are tuned again on the repeated text, with longer ones, and tested with new seeds. On text seen once
they have the settings that ``search`` chose. The plan is in docs/repeated.md.
"""

from __future__ import annotations

from dataclasses import replace

from normcontrol.lab.studies.growth import SHORT
from normcontrol.lab.studies.repeated import REPEATED, gains, of_both
from normcontrol.lab.studies.search import Protocol, lower
from normcontrol.lab.studies.settled import ADAMW, ADAMWN
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.records import Results

SEEDS = range(421, 461)
"""No study was run with them before."""

AGAIN = replace(REPEATED, warmups=SHORT.warmups, seeds=SEEDS)
ONCE = Protocol(seeds=SEEDS[:20])


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now."""
    return of_both(scale, done, AGAIN, ONCE)


STUDY = Study(
    "rounds",
    cells,
    "The study repeated once more: AdamW and AdamWN tuned again on a text that is seen ten times, "
    "with longer warm-ups, and tested with new seeds.",
    AGAIN.name(ADAMW),
    (lower("lower", AGAIN.name(ADAMW), AGAIN.name(ADAMWN)), gains(AGAIN, ONCE)),
)
