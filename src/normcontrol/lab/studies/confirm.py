"""The study ``confirm``: the main comparison of ``settle`` once more, with new seeds alone.

In ``settle`` AdamWN ended below AdamW, by itself shown and among its other claims not. This study
has the two settings that were chosen there, tunes nothing, and tests one claim. The plan, with the
number of seeds and the rule, is in docs/settle.md.
"""

from __future__ import annotations

from normcontrol.lab.studies import settle
from normcontrol.lab.studies.settled import ADAMW, ADAMWN
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import lower_loss
from normcontrol.lab.study.records import Results

SEEDS = range(11, 27)
"""None of them was run before. They are run in this order, as many as there is time for."""

CHOSEN = {ADAMW: 0.3, ADAMWN: 0.8}
"""By arm, the decay or the gain that ``settle`` chose, both at its middle learning rate."""


def cells(scale: str, done: Results) -> list[Cell]:
    """Pair by pair."""
    tuned = settle.TUNED[scale]
    return [
        tuned.trial(arm, seed, tuned.base.optim.lr, value, "seeds")
        for seed in SEEDS
        for arm, value in CHOSEN.items()
    ]


STUDY = Study(
    "confirm",
    cells,
    "AdamW and AdamWN as the study settle tuned them, with new seeds.",
    ADAMW,
    (lower_loss("lower", ADAMWN, ADAMW),),
)
