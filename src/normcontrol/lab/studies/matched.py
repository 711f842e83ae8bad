"""The study ``matched``: the paper's protocol on the model of ``larger``.

AdamW as ``larger`` tuned it, and AdamWN at AdamW's final norm with everything else as AdamW has it:
with the paper's target, which rises in a twentieth of the run, and with one that grows as a random
walk, which ``walk`` found level with AdamW on a smaller model. Nothing is tuned. The plan is in
docs/larger.md.
"""

from __future__ import annotations

from dataclasses import replace

from normcontrol.lab.errors import LabError
from normcontrol.lab.studies.larger import PLANS
from normcontrol.lab.studies.paths import following, walk
from normcontrol.lab.studies.search import WALK
from normcontrol.lab.studies.settled import ADAMW, MARGIN
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import level_loss, lower_loss
from normcontrol.lab.study.records import Results

PAPERS = "AdamWN, the paper's ramp"
ARMS = (ADAMW, PAPERS, WALK)

TUNED = PLANS["tiny"]

LR, DECAY, END = 6e-3, 0.3, 1.253
"""AdamW's learning rate and decay, as ``larger`` chose them, and its mean final ratio there."""

SEEDS = range(341, 361)
"""No study was run with them before."""


def cells(scale: str, done: Results) -> list[Cell]:
    """Seed by seed, all arms."""
    if scale != "tiny":
        raise LabError(f"matched has no plan for the scale {scale}: its model is for a CPU, tiny.")
    return [cell for seed in SEEDS for cell in of_seed(seed)]


def of_seed(seed: int) -> list[Cell]:
    """AdamW's run with a seed, and the runs of AdamWN."""
    return at_norm(TUNED.trial(ADAMW, seed, LR, DECAY, "seeds"), END)


def at_norm(own: Cell, end: float) -> list[Cell]:
    """A run of AdamW, and those of AdamWN with its settings whose norm ends at this ratio."""
    steps = own.config.run.steps
    papers = own.config.with_(optimizer="AdamWN", rate=0.1, ratio=end, ramp=steps // 20)
    every = steps // TUNED.base.run.steps
    settings = tuple(s for s in own.settings if s[0] != "weight_decay")
    return [
        own,
        replace(own, arm=PAPERS, config=papers, settings=settings),
        following(own, WALK, walk(own.config, end)[every - 1 :: every]),
    ]


CLAIMS = (
    lower_loss("the paper's", PAPERS, ADAMW),
    lower_loss("lower", WALK, ADAMW),
    level_loss("level", WALK, ADAMW, MARGIN),
)

STUDY = Study(
    "matched",
    cells,
    "AdamW as the study larger tuned it, and AdamWN at its final norm: with the paper's ramp, and "
    "with a target that grows as a random walk.",
    ADAMW,
    CLAIMS,
)
