"""The study ``rise``: AdamWN whose target rises, as in the paper, tuned and tested as in
``search``.

There AdamWN held one norm from the first step to the last, and ended above AdamW, whose norm grew.
Here the target rises from the initial norm to a ratio that is tuned, over the first half of the
steps. AdamW and AdamWN with a constant target are those of ``search``: the same cells, so that
their records may be copied. The plan is in docs/search.md.
"""

from __future__ import annotations

from normcontrol.lab.studies.search import RISING, level, lower, searched
from normcontrol.lab.studies.settled import ADAMW, ADAMWN
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.records import Results

ARMS = (ADAMW, ADAMWN, RISING)


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now."""
    return [cell for arm in ARMS for cell in searched(scale, arm, done)]


STUDY = Study(
    "rise",
    cells,
    "AdamWN with a rising target, tuned and tested like AdamW and AdamWN in the study search.",
    ADAMW,
    (
        lower("lower than constant", ADAMWN, RISING),
        lower("lower", ADAMW, RISING),
        level("level", ADAMW, RISING),
    ),
)
