"""The study ``tuned-walk``: AdamWN whose norm grows as a random walk, tuned as in ``search``.

In ``rise`` the target rose in a straight line, and AdamWN ended above AdamW when both were tuned.
``shape`` and ``walk`` then took over AdamW's settings and final norm: with a random walk to that
norm AdamWN was level. Here nothing is taken over: the ratio at which the random walk ends is tuned
beside learning rate, warm-up and final learning rate. The trials of the other two arms are those of
``search`` and ``rise``, whose records may be copied; all arms are tested with new seeds. The plan
is in docs/search.md.
"""

from __future__ import annotations

from normcontrol.lab.studies.search import RISING, WALK, Protocol, level, lower, searched
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.records import Results

ARMS = (ADAMW, WALK, RISING)
PROTOCOL = Protocol(seeds=range(361, 401))
"""No study was run with these seeds before."""


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now; those of the test seed by seed."""
    found = [cell for arm in ARMS for cell in searched(scale, arm, done, PROTOCOL)]
    return sorted(found, key=lambda cell: cell.seed if cell.part == "test" else 0)


STUDY = Study(
    "tuned-walk",
    cells,
    "AdamWN whose norm grows as a random walk, tuned like AdamW and AdamWN with a rising target, "
    "and all three tested with forty new seeds.",
    ADAMW,
    (
        lower("lower", ADAMW, WALK),
        level("level", ADAMW, WALK),
        lower("lower than rising", RISING, WALK),
    ),
)
