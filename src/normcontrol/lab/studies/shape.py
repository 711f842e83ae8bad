"""The study ``shape``: does it matter how the norm gets to where it ends?

In ``follow`` AdamWN with AdamW's recorded norm was level with AdamW. Here the norm ends where
AdamW's ended there, by three paths that need no recorded run: as a random walk with the learning
rate's steps, in a straight line over the first half of the run, and at once. Everything else is as
in AdamW. Nothing is tuned. The plan is in docs/search.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from normcontrol.lab.studies.follow import CHOSEN
from normcontrol.lab.studies.paths import at_once, following, straight, walk
from normcontrol.lab.studies.search import WALK, trial
from normcontrol.lab.studies.settled import ADAMW, MARGIN
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import level_loss, lower_loss
from normcontrol.lab.study.records import Results
from normcontrol.lab.training.config import Config

STRAIGHT, AT_ONCE = "AdamWN, straight", "AdamWN, at once"
ARMS = (ADAMW, WALK, STRAIGHT, AT_ONCE)

END = 1.52
"""The ratio at which all paths end: that of AdamW in ``follow``."""

SEEDS = range(261, 281)
"""No study was run with them before."""

Path = Callable[[Config, float], list[float]]

PATHS: dict[str, Path] = {WALK: walk, STRAIGHT: straight, AT_ONCE: at_once}


def cells(scale: str, done: Results) -> list[Cell]:
    """Seed by seed, all arms."""
    return [cell for seed in SEEDS for cell in beside(scale, seed, PATHS)]


def beside(scale: str, seed: int, paths: Mapping[str, Path]) -> list[Cell]:
    """AdamW's run with a seed, and the runs of AdamWN with these paths."""
    own = trial(scale, ADAMW, CHOSEN[ADAMW], seed, "test")
    return [own, *(following(own, arm, path(own.config, END)) for arm, path in paths.items())]


STUDY = Study(
    "shape",
    cells,
    "AdamW, and AdamWN whose norm ends where AdamW's does, by three paths that need no recorded "
    "run.",
    ADAMW,
    (
        level_loss("level", WALK, ADAMW, MARGIN),
        lower_loss("walk", WALK, STRAIGHT),
        lower_loss("straight", STRAIGHT, AT_ONCE),
    ),
)
