"""The study ``predicted``: AdamW's norm in the longest runs, recorded or predicted, and followed.

In ``catchup`` AdamWN reached AdamW's final norm as a random walk, and that it is level was not
shown: in a long run decay acts on AdamW's norm, which rises sooner and falls again. Here AdamWN
follows a norm that knows the decay: that of AdamW's run with another seed, as in ``follow``, or
the one that ``predict.adamw`` expects without any run. Nothing is tuned. The plan is in
docs/longer.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from normcontrol import predict, set_norm_
from normcontrol.lab.errors import LabError
from normcontrol.lab.studies.catchup import CHOSEN
from normcontrol.lab.studies.follow import FOLLOWING, followed
from normcontrol.lab.studies.longest import LONGEST
from normcontrol.lab.studies.paths import following
from normcontrol.lab.studies.search import trial
from normcontrol.lab.studies.settle import logged_often
from normcontrol.lab.studies.settled import ADAMW, MARGIN
from normcontrol.lab.studies.tuning import known
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import level_loss
from normcontrol.lab.study.records import Results
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.model import GPT
from normcontrol.lab.training.optimizers import lr_at

PREDICTED = "AdamWN, AdamW's norm predicted"
ARMS = (ADAMW, PREDICTED, FOLLOWING)

SEEDS = range(401, 421)
"""No study was run with them before."""

VOCAB = 1024
"""The tokens of ``tiny``."""


def cells(scale: str, done: Results) -> list[Cell]:
    """AdamW and the predicted norm, seed by seed; then the norms that AdamW had."""
    if scale != "tiny":
        raise LabError(
            f"predicted has no plan for the scale {scale}: its model is for a CPU, tiny."
        )
    return known(stages(scale, done), done)


def stages(scale: str, done: Results) -> Iterator[list[Cell]]:
    owns = [
        replace(logged_often(trial(scale, ADAMW, CHOSEN, seed, "test", LONGEST)), arm=ADAMW)
        for seed in SEEDS
    ]
    yield [cell for own in owns for cell in (own, following(own, PREDICTED, expected(own.config)))]
    yield followed(owns, owns, done)


def expected(config: Config) -> list[float]:
    """The ratios that are predicted for this run of AdamW, without calibration, at as many steps as
    are recorded."""
    model = GPT.initialised(config.model, VOCAB)
    set_norm_(model, gain=config.model.init_gain)
    steps, every = config.run.steps, config.run.log_every
    lrs = [lr_at(config, step) for step in range(1, steps + 1)]
    return predict.adamw(model, lrs, config.optim.weight_decay).ratios[every::every]


STUDY = Study(
    "predicted",
    cells,
    "AdamW as the study longest tuned it, and AdamWN whose norm follows AdamW's: predicted without "
    "a run, or recorded with another seed.",
    ADAMW,
    (
        level_loss("level, predicted", PREDICTED, ADAMW, MARGIN),
        level_loss("level, recorded", FOLLOWING, ADAMW, MARGIN),
    ),
)
