"""The study ``kept``: is a target that is kept still the best with three times the steps?

In ``remarks`` the best other target was the highest that was tried, so that nothing was shown. Here
higher ones are tried, and new seeds decide. An edge matters only where the claim would be
supported: a best target beyond it refutes the claim all the more. The plan is in docs/longer.md.
"""

from __future__ import annotations

from normcontrol.lab.studies.remarks import LONG, longer, same_target
from normcontrol.lab.studies.search import KINDS, RISING
from normcontrol.lab.studies.tuning import known
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.records import Results

SEEDS = range(161, 181)
TRIED = range(8, 12)
"""Places in the list of ratios: 3.8, 4.8, 6 and 7.6."""
HIGHEST = KINDS[RISING].values[TRIED[-1]]


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now."""
    return known(longer(scale, RISING, done, TRIED, SEEDS), done)


STUDY = Study(
    "kept",
    cells,
    "AdamWN with a rising target in three times the steps: the ratio that was best before, and "
    "higher ones.",
    LONG.name(RISING),
    (same_target(lambda value, supports, refutes: value == HIGHEST and supports < refutes),),
)
