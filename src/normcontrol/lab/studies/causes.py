"""The study ``causes``: the two arms of ``settle`` that ask why, once more, with new seeds.

There AdamW that replays AdamWN's decay was level with AdamWN, and AdamW with AdamWN's relative
steps ended below it, each in five seeds and neither among the ten claims that were tested together.
This study has the settings that were chosen there, tunes nothing, and tests two claims. The plan,
with the number of seeds and the rules, is in docs/settle.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from normcontrol.lab.errors import LabError
from normcontrol.lab.studies import settle
from normcontrol.lab.studies.settled import ADAMW, ADAMWN, ANGLE, FEEDBACK
from normcontrol.lab.studies.tuning import known
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import lower_loss
from normcontrol.lab.study.records import Results

SEEDS = range(181, 201)
"""No study was run with them before."""

CHOSEN = {
    "tiny": {ADAMW: (1.2e-2, 0.56), ADAMWN: (6e-3, 0.8)},
    "small": {ADAMW: (4e-3, 0.3), ADAMWN: (4e-3, 0.8)},
}
"""By scale and arm, the learning rate, and the decay or the gain, that ``settle`` chose."""


def cells(scale: str, done: Results) -> list[Cell]:
    """The runs of AdamWN; then those that need their records."""
    if scale not in CHOSEN:
        raise LabError(
            f"causes has no plan for the scale {scale}: it needs what settle chose there, and "
            "settle was run at tiny and small."
        )
    return known(stages(scale, done), done)


def stages(scale: str, done: Results) -> Iterator[list[Cell]]:
    controlled, decayed = (
        [settle.TUNED[scale].trial(arm, seed, *CHOSEN[scale][arm], "seeds") for seed in SEEDS]
        for arm in (ADAMWN, ADAMW)
    )
    recorded = [settle.logged_often(cell) for cell in controlled]
    yield recorded
    yield [*settle.replays(scale, recorded, done), *settle.matched(controlled, decayed)]


STUDY = Study(
    "causes",
    cells,
    "AdamWN as the study settle tuned it, AdamW that replays its decay, and AdamW with its "
    "relative steps, with new seeds.",
    ADAMWN,
    (
        FEEDBACK,
        lower_loss(
            "free norm",
            ANGLE,
            ADAMWN,
            "With AdamWN's relative steps and a free norm, AdamW has a lower validation loss than "
            "AdamWN.",
        ),
    ),
)
