"""The study ``optimizers``: line 13.b of Algorithm 1 as an arm beside 13.a and 13.c, and Muon with
its own decay against Muon under control.

Start, schedule, tuning and seeds are those of ``settle``, and so are the cells of AdamW (13.a) and
AdamWN (13.c). The plan, with margins and rules, is in docs/muon.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from normcontrol.lab.studies import settle
from normcontrol.lab.studies.settled import ADAMW, ADAMWN, HIDDEN, MARGIN
from normcontrol.lab.studies.tuning import Arm, Tuned, known
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import level_loss, lower_loss
from normcontrol.lab.study.records import Results

DECOUPLED, MUON, MUON_CONTROLLED = "AdamW, line 13.b", "Muon", "Muon under control"

REST = 0.56
"""The decay of what Muon does not train, embeddings and head, where its matrices are controlled."""


def arms(lr: float) -> dict[str, Arm]:
    """The arms in the order in which they are run, given the learning rate in the middle.

    Line 13.b decays by a fraction that does not contain the learning rate: at the middle one its
    values give the decays of 13.a.
    """
    fractions = tuple(round(lr * decay, 9) for decay in settle.DECAYS)
    return {
        ADAMW: settle.ARMS[ADAMW],
        ADAMWN: settle.ARMS[ADAMWN],
        MUON: Arm({"optimizer": "Muon"}, "weight_decay", settle.DECAYS),
        MUON_CONTROLLED: Arm(
            {"optimizer": "Muon", "rate": 0.1, "weight_decay": REST},
            "gain",
            settle.ARMS[HIDDEN].values,
        ),
        DECOUPLED: Arm({"optimizer": "AdamW-13b"}, "weight_decay", fractions),
    }


TUNED = {scale: Tuned(base, arms(base.optim.lr)) for scale, base in settle.BASES.items()}


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now."""
    return known(stages(scale, done), done)


def stages(scale: str, done: Results) -> Iterator[list[Cell]]:
    """AdamW and AdamWN, Muon with and without control, and line 13.b: tuned, then tested."""
    tuned = TUNED[scale]

    def fresh(name: str) -> list[Cell]:
        if name in settle.ARMS:
            return settle.fresh(scale, name, done, settle.SEEDS, "seeds")
        return tuned.fresh(name, done, settle.SEEDS, "seeds")

    for pair in ((ADAMW, ADAMWN), (MUON, MUON_CONTROLLED), (DECOUPLED,)):
        yield [cell for name in pair for cell in tuned.tuning(name, done)]
        tested = (fresh(name) for name in pair)
        yield [cell for same_seed in zip(*tested, strict=True) for cell in same_seed]


MUON_LOWER = lower_loss(
    "Muon lower",
    MUON_CONTROLLED,
    MUON,
    "Muon under control has a lower validation loss than Muon with its own decay.",
)

STUDY = Study(
    "optimizers",
    cells,
    "Lines 13.a, 13.b and 13.c of Algorithm 1 with Adam, and Muon with its own decay and under "
    "control: tuned with equal trials and tested with fresh seeds.",
    ADAMW,
    (
        MUON_LOWER,
        level_loss(
            "Muon level",
            MUON_CONTROLLED,
            MUON,
            MARGIN,
            "Muon under control and Muon with its own decay are level",
        ),
        level_loss(
            "13.b level",
            DECOUPLED,
            ADAMW,
            MARGIN,
            "AdamW with line 13.b and with line 13.a are level",
        ),
        lower_loss(
            "13.c lower",
            ADAMWN,
            DECOUPLED,
            "AdamWN, line 13.c, has a lower validation loss than AdamW with line 13.b.",
        ),
    ),
)
