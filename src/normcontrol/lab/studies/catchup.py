"""The study ``catchup``: the paper's protocol in the longest runs.

In ``matched`` AdamWN with the paper's ramp was above AdamW, and came closer until the end of a
short run. Here the runs are nine times as long, on the smaller model of ``longest``, whose runs of
AdamW are the ones to be challenged. Nothing is tuned. The plan is in docs/longer.md.
"""

from __future__ import annotations

from dataclasses import replace

from normcontrol.lab.studies.longest import LONGEST
from normcontrol.lab.studies.matched import CLAIMS, at_norm
from normcontrol.lab.studies.search import Point, trial
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.records import Results

CHOSEN: Point = (5, 3, 3, 1)
"""What ``longest`` chose for AdamW: a learning rate of 8.5e-3, a decay of 0.035, a tenth of
warm-up, and 0.03 of the learning rate at the end."""

END = 3.349
"""Its mean final ratio there."""

SEEDS = LONGEST.seeds[:20]
"""``longest`` made the runs of AdamW, and chose its settings by others."""


def cells(scale: str, done: Results) -> list[Cell]:
    """Seed by seed, all arms."""
    owns = [trial(scale, ADAMW, CHOSEN, seed, "test", LONGEST) for seed in SEEDS]
    return [cell for own in owns for cell in at_norm(replace(own, arm=ADAMW), END)]


STUDY = Study(
    "catchup",
    cells,
    "AdamW as the study longest tuned it, and AdamWN at its final norm: with the paper's ramp, and "
    "with a target that grows as a random walk.",
    ADAMW,
    CLAIMS,
)
