"""The study ``larger``: AdamW and AdamWN as in ``settle``, on other models.

With a constant target AdamWN ended above AdamW at 0.17 M weights and below it at 45 M. ``tiny`` is
a model between them, of 0.94 M weights, and ``small`` is GPT-2 124M. A third arm has a target that
rises, as in ``rise``. All arms are tuned by the rule of ``settle`` and tested with new seeds. The
plans are in docs/larger.md and docs/gpt2.md.
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
from normcontrol.lab.training.config import Config, preset


def tuned(base: Config) -> Tuned:
    """The arms. The first two are compared before the third is tuned."""
    rising = {"optimizer": "AdamWN", "rate": 0.1, "ratio_start": 1.0, "ramp": base.run.steps // 2}
    ratios = (0.8, 1.0, 1.25, 1.56, 1.95, 2.4, 3.0)
    arms = {name: OF_SETTLE[name] for name in (ADAMW, ADAMWN)}
    return Tuned(base, arms | {RISING: Arm(rising, "ratio", ratios)})


PLANS = {
    "tiny": tuned(start(preset("tiny"), 600, lr=6e-3)),
    "small": tuned(
        start(preset("gpt2").with_(tokens_per_step=65_536, micro_batch=64), 800, lr=2e-3)
    ),
}
"""By scale: a model for a CPU, and GPT-2 124M."""

SEEDS = range(321, 341)
"""No study was run with them before; ``small`` takes the first ten."""


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now."""
    if scale not in PLANS:
        raise LabError(
            f"larger has no plan for the scale {scale}: its models are of 0.94 M weights, tiny, "
            "and GPT-2 124M, small."
        )
    return known(stages(scale, done), done)


def stages(scale: str, done: Results) -> Iterator[list[Cell]]:
    """AdamW and AdamWN: the tuning, then the test pair by pair. Then the same for the third arm."""
    seeds = SEEDS if scale == "tiny" else SEEDS[:10]
    for arms in ((ADAMW, ADAMWN), (RISING,)):
        yield from PLANS[scale].stages(done, seeds, arms)


STUDY = Study(
    "larger",
    cells,
    "AdamW, and AdamWN with a constant and with a rising target, on 0.94 M weights and on GPT-2 "
    "124M, tuned as in the study settle and tested with new seeds.",
    ADAMW,
    (
        lower_loss("lower", ADAMWN, ADAMW),
        lower_loss("lower, rising", RISING, ADAMW),
        level_loss("level, rising", RISING, ADAMW, MARGIN),
    ),
)
