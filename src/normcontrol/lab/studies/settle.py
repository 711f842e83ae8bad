"""The study ``settle``: does AdamWN train better than AdamW when the controls are right?

All arms start at the same gain, with a long warm-up, which makes seeds differ little. Each arm is
tuned with the first seed alone and tested with fresh ones. Two arms are not tuned and ask why:
one replays the decay that AdamWN's control amounted to, without its feedback, and one has AdamWN's
steps relative to the weights, without its norm. The plan, with margins and rules, is in
docs/settle.md. This file names the cells; the claims are in ``settled``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from normcontrol.lab.studies import settled
from normcontrol.lab.studies.bases import base as scale_base
from normcontrol.lab.studies.settled import (
    ADAMC,
    ADAMW,
    ADAMWN,
    ANGLE,
    FAST,
    HIDDEN,
    REPLAYED,
    SQRT,
    TENSOR,
)
from normcontrol.lab.studies.tuning import Arm, Tuned, known
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.records import Record, Results
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.optimizers import lr_at

GAIN = 0.8
"""The gain of the initial weights in all arms."""

SEEDS, MORE = (1, 2, 3, 4, 5), (6, 7, 8)
"""The fresh seeds, and those that AdamW and AdamWN get beyond them."""

DECAYS = (0.1, 0.17, 0.3, 0.56, 0.9, 1.6, 2.8)
GAINS = (0.41, 0.51, 0.64, 0.8, 1.0, 1.25, 1.56)
ARMS = {
    ADAMW: Arm({"optimizer": "AdamW"}, "weight_decay", DECAYS),
    ADAMWN: Arm({"optimizer": "AdamWN", "rate": 0.1}, "gain", GAINS),
    ADAMC: Arm({"optimizer": "AdamC"}, "weight_decay", (0.14, 0.24, 0.4, 0.78, 1.27, 2.2, 3.8)),
    FAST: Arm({"optimizer": "AdamWN", "rate": 1.0}, "gain", GAINS),
    SQRT: Arm({"optimizer": "AdamW-sqrt"}, "weight_decay", (0.08, 0.14, 0.25, 0.44, 0.7, 1.2, 2.1)),
    TENSOR: Arm({"optimizer": "AdamWN", "rate": 0.1, "scope": "tensor"}, "gain", GAINS),
    HIDDEN: Arm(
        {"optimizer": "AdamWN", "rate": 0.1, "hidden_only": True},
        "gain",
        (0.27, 0.38, 0.55, 0.8, 1.15, 1.6, 2.3),
    ),
}
"""The tuned arms in the order of their importance. Decays are spread around those that shrink the
weights as much over a run as AdamWN does."""


def start(config: Config, steps: int, lr: float) -> Config:
    """A base: all matrices at gain 0.8, a fifth of warm-up, a cosine to a tenth."""
    return config.with_(
        **{"min_lr": 0.1, "schedule": "cosine", "betas": (0.9, 0.95), "clip": 1.0},
        lr=lr,
        init_gain=GAIN,
        steps=steps,
        warmup=round(steps / 5),
        eval_every=-(-steps // 4),
        log_every=max(steps // 40, 1),
        checkpoint_every=0,
    )


BASES = {
    "tiny": start(scale_base("tiny"), 600, 3e-3),
    "small": start(scale_base("small"), 800, 4e-3),
    "full": start(scale_base("full"), 10_000, 1e-3),
}
"""By scale. The learning rate is the middle one of the first three that are tried."""


TUNED = {scale: Tuned(base, ARMS) for scale, base in BASES.items()}


def fresh(scale: str, name: str, done: Results, seeds: Sequence[int], part: str) -> list[Cell]:
    """The chosen setting of an arm with other seeds."""
    cells = TUNED[scale].fresh(name, done, seeds, part)
    return [logged_often(c) for c in cells] if name == ADAMWN else cells


def logged_often(cell: Cell) -> Cell:
    """A cell whose curve of the decay is fine enough to be replayed."""
    often = max(cell.config.run.steps // 200, 1)
    return replace(cell, config=cell.config.with_(log_every=often))


def replays(scale: str, recorded: Sequence[Cell], done: Results) -> list[Cell]:
    """AdamW with the decay of AdamWN's run with the *next* seed, the last one with the first's.

    With its own seed it would repeat AdamWN's run: all matrices would be multiplied by the same
    factors at the same steps, and nothing would be learned about feedback.
    """
    cells = []
    for own, other in zip(recorded, [*recorded[1:], recorded[0]], strict=True):
        record = done.of(other)
        assert record is not None
        config = own.config.with_(
            optimizer="AdamW-replay",
            gain=None,
            rate=BASES[scale].optim.rate,
            replay=shrinkage(record, other.config),
            log_every=BASES[scale].run.log_every,
        )
        cells.append(replace(own, arm=REPLAYED, config=config, part="replay"))
    return cells


def shrinkage(record: Record, config: Config) -> tuple[float, ...]:
    """By which fraction the control shrank the weights in a step, at the steps that were logged."""
    steps, decays = record.curves["decay"]
    return tuple(
        round(decay * lr_at(config, step), 9) for step, decay in zip(steps, decays, strict=True)
    )


def matched(controlled: Sequence[Cell], decayed: Sequence[Cell]) -> list[Cell]:
    """AdamW, with the decay that was chosen for it, and AdamWN's steps relative to the weights."""
    cells = []
    for cell, other in zip(controlled, decayed, strict=True):
        o = cell.config.optim
        config = other.config.with_(optimizer="AdamW-angle", lr=o.lr, gain=o.gain)
        settings = (("lr", o.lr), ("weight_decay", config.optim.weight_decay))
        cells.append(Cell(ANGLE, config, cell.seed, settings, "angle"))
    return cells


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now: stage by stage, in the order of their importance."""
    return known(stages(scale, done), done)


def stages(scale: str, done: Results) -> Iterator[list[Cell]]:
    """The main comparison; its replay; AdamC; more seeds of the main comparison; the other arms."""

    def tuned(names: Sequence[str]) -> list[Cell]:
        return [cell for name in names for cell in TUNED[scale].tuning(name, done)]

    def tested(names: Sequence[str], seeds: Sequence[int], part: str) -> list[Cell]:
        each = zip(*(fresh(scale, name, done, seeds, part) for name in names), strict=True)
        return [cell for pair in each for cell in pair]

    main = (ADAMW, ADAMWN)
    yield tuned(main)
    yield tested(main, SEEDS, "seeds")
    yield replays(scale, fresh(scale, ADAMWN, done, SEEDS, "seeds"), done)
    yield tuned([ADAMC])
    yield tested([ADAMC], SEEDS, "seeds")
    yield tested(main, MORE, "more seeds")
    yield matched(*(fresh(scale, name, done, SEEDS, "angle") for name in (ADAMWN, ADAMW)))
    for name in (FAST, SQRT, TENSOR, HIDDEN):
        yield tuned([name])
        yield tested([name], SEEDS, "seeds")


STUDY = Study(
    "settle",
    cells,
    "AdamW, AdamC and AdamWN from the same start, tuned with equal trials and tested with fresh "
    "seeds; and AdamW with AdamWN's decay, or with its relative steps.",
    ADAMW,
    settled.CLAIMS,
)
