"""The study ``settle``: does AdamWN train better than AdamW when the controls are right?

All arms start at the same gain, with a long warm-up, which makes seeds differ little. Each arm is
tuned with the first seed alone and tested with fresh ones. Two arms are not tuned and ask why:
one replays the decay that AdamWN's control amounted to, without its feedback, and one has AdamWN's
steps relative to the weights, without its norm. The plan, with margins and rules, is in
docs/settle.md. This file names the cells; the claims are in ``settled``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    TUNING,
)
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.records import Record, Results
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.optimizers import lr_at

GAIN = 0.8
"""The gain of the initial weights in all arms."""

SEEDS, MORE = (1, 2, 3, 4, 5), (6, 7, 8)
"""The fresh seeds, and those that AdamW and AdamWN get beyond them."""

TRIALS, EXTRA = 6, 2
"""How many trials an arm is tuned with, and how many more it may have while its best lies at the
edge of what was tried."""


@dataclass(frozen=True)
class Arm:
    """A tuned arm: its fixed settings, and the values of the setting that is tuned beside the
    learning rate. The first three trials are ``values[1:4]``; the ends are for a best that lies at
    the edge of those."""

    fixed: dict[str, Any]
    key: str
    values: tuple[float, ...]


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


def trial(scale: str, name: str, seed: int, lr: float, value: float, part: str) -> Cell:
    """A run of a tuned arm."""
    arm = ARMS[name]
    settings = (("lr", lr), (arm.key, value))
    config = seeded(BASES[scale].with_(**arm.fixed, **dict(settings)), seed)
    return Cell(name, config, seed, settings, part)


def seeded(config: Config, seed: int) -> Config:
    return config.with_(init_seed=seed, data_seed=seed, dropout_seed=seed)


def learning_rates(scale: str) -> tuple[float, ...]:
    """Factors of two around the base's learning rate."""
    return tuple(BASES[scale].optim.lr * 2.0**power for power in range(-3, 4))


def tuning(scale: str, name: str, done: Results) -> Iterator[Cell]:
    """The trials of an arm with the first seed, as far as they can be named by now.

    Three values at the middle learning rate; half and twice the learning rate at the best of these;
    then, one at a time, the trial that :func:`further` names.
    """
    rates, values = learning_rates(scale), ARMS[name].values
    middle = len(rates) // 2

    def cell(point: tuple[int, int]) -> Cell:
        return trial(scale, name, 0, rates[point[0]], values[point[1]], TUNING)

    tried = [(middle, i) for i in (middle, middle - 1, middle + 1)]
    yield from map(cell, tried)
    while losses := _losses(done, [cell(point) for point in tried]):
        if len(tried) == 3:
            value = _best(tried, losses)[1]
            new = [(middle - 1, value), (middle + 1, value)]
        else:
            new = further(tried, losses, len(values))
        if not new:
            return
        yield from map(cell, new)
        tried += new


def _losses(done: Results, cells: Sequence[Cell]) -> list[float]:
    """The losses of cells; none if one of them was not run yet."""
    records = [done.of(cell) for cell in cells]
    return [] if None in records else [r.value() for r in records if r is not None]


def _best(tried: Sequence[tuple[int, int]], losses: Sequence[float]) -> tuple[int, int]:
    return tried[min(range(len(tried)), key=lambda i: losses[i])]


def further(
    tried: Sequence[tuple[int, int]], losses: Sequence[float], count: int
) -> list[tuple[int, int]]:
    """The next trial, as places in the list of learning rates and in that of values.

    Where the best lies at the edge of what was tried, one step beyond it, the value before the
    learning rate. Otherwise, up to six trials, the corner between its better neighbours in the two
    directions.

    >>> cross = [(3, 3), (3, 2), (3, 4), (2, 3), (4, 3)]
    >>> further(cross, [1.0, 1.2, 1.1, 1.2, 1.1], 7)
    [(4, 4)]
    >>> further([(3, 3), (3, 2), (3, 4), (2, 4), (4, 4)], [1.0, 1.1, 0.9, 1.2, 1.1], 7)
    [(3, 5)]
    >>> further([*cross, (4, 4)], [1.0, 1.2, 1.1, 1.2, 1.1, 1.1], 7)
    []
    """
    best = _best(tried, losses)
    loss = dict(zip(tried, losses, strict=True))
    if len(tried) < TRIALS + EXTRA:
        for axis in (1, 0):
            seen = {point[axis] for point in tried}
            for end, step in ((min(seen), -1), (max(seen), 1)):
                beyond = best[axis] + step
                if best[axis] == end and 0 <= beyond < count:
                    return [(best[0], beyond) if axis else (beyond, best[1])]
    if len(tried) >= TRIALS:
        return []

    def towards(axis: int) -> int:
        def beside(step: int) -> float:
            point = (best[0], best[1] + step) if axis else (best[0] + step, best[1])
            return loss.get(point, math.inf)

        return best[axis] + min((1, -1), key=beside)

    corner = (towards(0), towards(1))
    return [corner] if corner not in loss else []


def fresh(scale: str, name: str, done: Results, seeds: Sequence[int], part: str) -> list[Cell]:
    """The chosen setting of an arm with other seeds."""
    best = done.best(tuning(scale, name, done))
    assert best is not None
    (_, lr), (_, value) = best.settings
    cells = [trial(scale, name, seed, lr, value, part) for seed in seeds]
    if name != ADAMWN:
        return cells
    often = max(BASES[scale].run.steps // 200, 1)  # the curve of the decay is replayed
    return [replace(c, config=c.config.with_(log_every=often)) for c in cells]


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


def matched(scale: str, done: Results) -> list[Cell]:
    """AdamW, with the decay that was chosen for it, and AdamWN's steps relative to the weights."""
    controlled, decayed = (fresh(scale, name, done, SEEDS, "angle") for name in (ADAMWN, ADAMW))
    cells = []
    for cell, other in zip(controlled, decayed, strict=True):
        o = cell.config.optim
        config = other.config.with_(optimizer="AdamW-angle", lr=o.lr, gain=o.gain)
        settings = (("lr", o.lr), ("weight_decay", config.optim.weight_decay))
        cells.append(Cell(ANGLE, config, cell.seed, settings, "angle"))
    return cells


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now: stage by stage, in the order of their importance."""
    wanted: list[Cell] = []
    for stage in stages(scale, done):
        wanted += stage
        if not done.done(wanted):
            break
    return wanted


def stages(scale: str, done: Results) -> Iterator[list[Cell]]:
    """The main comparison; its replay; AdamC; more seeds of the main comparison; the other arms."""

    def tuned(names: Sequence[str]) -> list[Cell]:
        return [cell for name in names for cell in tuning(scale, name, done)]

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
    yield matched(scale, done)
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
