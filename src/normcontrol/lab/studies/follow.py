"""The study ``follow``: AdamWN whose norm follows that of AdamW's run with another seed.

In ``rise`` AdamWN ended above AdamW, with a target that rises in a straight line and then stays.
AdamW's norm rises and falls as the training needs it. Here AdamWN has that path, and everything
else as AdamW has it, so that what is left between them is the way in which the norm is reached.
Nothing is tuned. The plan is in docs/search.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from normcontrol.lab.studies.paths import following
from normcontrol.lab.studies.search import RISING, Point, trial
from normcontrol.lab.studies.settle import logged_often
from normcontrol.lab.studies.settled import ADAMW, MARGIN
from normcontrol.lab.studies.tuning import known
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import level_loss, lower_loss
from normcontrol.lab.study.records import Results

FOLLOWING = "AdamWN, AdamW's norm followed"
ARMS = (ADAMW, FOLLOWING, RISING)

CHOSEN: dict[str, Point] = {ADAMW: (6, 5, 3, 1), RISING: (7, 5, 4, 1)}
"""By arm, the point that ``search`` and ``rise`` chose at tiny."""

SEEDS = range(241, 261)
"""No study was run with them before."""


def cells(scale: str, done: Results) -> list[Cell]:
    """The runs of AdamW and of the rising target; then those that follow AdamW's."""
    return known(stages(scale, done), done)


def stages(scale: str, done: Results) -> Iterator[list[Cell]]:
    decayed, rising = (
        [trial(scale, arm, point, seed, "test") for seed in SEEDS] for arm, point in CHOSEN.items()
    )
    recorded = [logged_often(cell) for cell in decayed]
    yield [cell for pair in zip(recorded, rising, strict=True) for cell in pair]
    yield followed(decayed, recorded, done)


def followed(cells: list[Cell], recorded: list[Cell], done: Results) -> list[Cell]:
    """AdamWN with the path of AdamW's run with the *next* seed, the last one with the first's."""
    found = []
    for own, other in zip(cells, [*recorded[1:], recorded[0]], strict=True):
        record = done.of(other)
        assert record is not None
        found.append(following(own, FOLLOWING, record.curves["ratio"][1]))
    return found


STUDY = Study(
    "follow",
    cells,
    "AdamW, AdamWN whose norm follows AdamW's of another seed, and AdamWN with a rising target.",
    ADAMW,
    (
        level_loss(
            "level",
            FOLLOWING,
            ADAMW,
            MARGIN,
            "AdamWN that follows the norm of AdamW's run with another seed is level with AdamW",
        ),
        lower_loss(
            "path",
            FOLLOWING,
            RISING,
            "AdamWN that follows the norm of AdamW's run with another seed has a lower validation "
            f"loss than {RISING}.",
        ),
    ),
)
