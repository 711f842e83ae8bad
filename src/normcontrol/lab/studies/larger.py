"""The study ``larger``: AdamW and AdamWN as in ``settle``, on a model of 0.94 M weights.

With a constant target AdamWN ended above AdamW at 0.17 M weights and below it at 45 M. This model
lies between them, and is small enough for a CPU. A third arm has a target that rises, as in
``rise``. All arms are tuned by the rule of ``settle`` and tested with new seeds. The plan is in
docs/larger.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from normcontrol.lab.errors import LabError
from normcontrol.lab.studies.search import RISING
from normcontrol.lab.studies.settle import ARMS as OF_SETTLE
from normcontrol.lab.studies.settle import start
from normcontrol.lab.studies.settled import ADAMW, ADAMWN, MARGIN
from normcontrol.lab.studies.tuning import Arm, Tuned, known
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import level_loss, lower_loss
from normcontrol.lab.study.records import Results
from normcontrol.lab.training.config import preset

STEPS = 600
ARMS = {
    ADAMW: OF_SETTLE[ADAMW],
    ADAMWN: OF_SETTLE[ADAMWN],
    RISING: Arm(
        {"optimizer": "AdamWN", "rate": 0.1, "ratio_start": 1.0, "ramp": STEPS // 2},
        "ratio",
        (0.8, 1.0, 1.25, 1.56, 1.95, 2.4, 3.0),
    ),
}
"""The first two are compared before the third is tuned."""

TUNED = Tuned(start(preset("tiny"), STEPS, lr=6e-3), ARMS)

SEEDS = range(321, 341)
"""No study was run with them before."""


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now."""
    if scale != "tiny":
        raise LabError(f"larger has no plan for the scale {scale}: its model is for a CPU, tiny.")
    return known(stages(done), done)


def stages(done: Results) -> Iterator[list[Cell]]:
    """AdamW and AdamWN: the tuning, then the test pair by pair. Then the same for the third arm."""
    for arms in ((ADAMW, ADAMWN), (RISING,)):
        yield from TUNED.stages(done, SEEDS, arms)


STUDY = Study(
    "larger",
    cells,
    "AdamW, and AdamWN with a constant and with a rising target, on a model of 0.94 M weights, "
    "tuned as in the study settle and tested with new seeds.",
    ADAMW,
    (
        lower_loss("lower", ADAMWN, ADAMW),
        lower_loss("lower, rising", RISING, ADAMW),
        level_loss("level, rising", RISING, ADAMW, MARGIN),
    ),
)
