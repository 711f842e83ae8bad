"""The study ``walk``: the random walk of ``shape`` and AdamW once more, with forty new seeds.

There the random walk was level with AdamW, and its interval lay below zero, about which no claim
was planned. This study tests that one claim. The plan is in docs/search.md.
"""

from __future__ import annotations

from normcontrol.lab.studies.paths import walk
from normcontrol.lab.studies.search import WALK
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.studies.shape import beside
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import lower_loss
from normcontrol.lab.study.records import Results

ARMS = (ADAMW, WALK)

SEEDS = range(281, 321)
"""No study was run with them before."""


def cells(scale: str, done: Results) -> list[Cell]:
    """Pair by pair."""
    return [cell for seed in SEEDS for cell in beside(scale, seed, {WALK: walk})]


STUDY = Study(
    "walk",
    cells,
    "AdamW, and AdamWN whose norm grows to AdamW's as a random walk, with forty new seeds.",
    ADAMW,
    (lower_loss("lower", WALK, ADAMW),),
)
