"""The study ``transfer``: each arm is tuned once at a base, and its setting is used unchanged at
other learning rates, horizons, batches, widths and depths.

This file names the cells. What regret is and which claims are tested is in ``regret``. The plan,
with margins and rules, is in docs/transfer.md. Parts come in the order of their importance:
tuning at the base, learning rates, more seeds of both, horizons, batches, widths, depths, more
seeds of those. The cells after the tuning are known when the tuning is finished.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from normcontrol.lab.studies import regret
from normcontrol.lab.studies.bases import base as scale_base
from normcontrol.lab.studies.regret import (
    ADAMC,
    ADAMW,
    BASE,
    FIXED,
    GAIN,
    HIDDEN,
    TIMESCALE,
    TUNED,
    TUNING,
    Condition,
    at,
)
from normcontrol.lab.studies.tuning import seeded
from normcontrol.lab.study.cells import Cell, Study, grid
from normcontrol.lab.study.records import Results
from normcontrol.lab.training.config import Config

CONDITIONS = {
    "lr": ("4", "1/4", "2", "1/2"),
    "steps": ("1/3", "3"),
    "batch": ("4", "1/4"),
    "width": ("2", "1/2", "4"),
    "depth": ("2", "1/2"),
}
"""By axis, the factors to the base, the most telling first."""


@dataclass(frozen=True)
class Plan:
    """What a scale starts from, and what is tried there."""

    base: Config
    seeds: tuple[int, ...]
    weight_decay: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0)
    """Of AdamW and of AdamC."""
    gain: tuple[float, ...] = (0.5, 0.64, GAIN, 1.0, 1.25)
    hidden_gain: tuple[float, ...] = (0.55, GAIN, 1.15, 1.6, 2.3)
    """Hidden matrices are a small share of the joint norm, which lets them grow further: a wider
    grid of as many values."""


def start(config: Config, steps: int, lr: float) -> Config:
    """A base: a fifth of warm-up, a cosine to a tenth, all matrices at gain 0.8."""
    same = {"min_lr": 0.1, "schedule": "cosine", "betas": (0.9, 0.95), "clip": 1.0, "rate": 0.1}
    started = config.with_(lr=lr, init_gain=GAIN, checkpoint_every=0, **same)
    return lasting(started, steps)


def lasting(config: Config, steps: int) -> Config:
    """The config with another number of steps: a fifth of them warm-up, four evaluations."""
    return config.with_(
        steps=steps,
        warmup=round(steps / 5),
        eval_every=-(-steps // 4),
        log_every=max(steps // 40, 1),
    )


PLANS = {
    "tiny": Plan(start(scale_base("tiny"), 600, 3e-3), (0, 1, 2, 3, 4)),
    "small": Plan(start(scale_base("small").with_(width=256, heads=4), 800, 2e-3), (0, 1, 2)),
    "full": Plan(start(scale_base("full"), 10_000, 1e-3), (0, 1, 2)),
}


def conditions() -> list[Condition]:
    """The conditions beside the base, in the order in which they are run."""
    return [Condition(axis, factor) for axis, factors in CONDITIONS.items() for factor in factors]


def changed(base: Config, condition: Condition) -> Config:
    """The base with one thing changed.

    Another batch sees the same number of tokens, in more or fewer steps. Heads keep their width.
    The learning rate stays, at every width and depth too.
    """
    if condition == BASE:
        return base
    f, m = Fraction(condition.factor), base.model
    if condition.axis == "lr":
        return base.with_(lr=base.optim.lr * float(f))
    if condition.axis == "steps":
        return lasting(base, round(base.run.steps * f))
    if condition.axis == "batch":
        tokens = _whole(base.data.tokens_per_step * f)
        return lasting(base.with_(tokens_per_step=tokens), _whole(base.run.steps / f))
    if condition.axis == "width":
        return base.with_(width=_whole(m.width * f), heads=_whole(m.heads * f))
    return base.with_(layers=_whole(m.layers * f))


def _whole(number: Fraction) -> int:
    if number.denominator != 1:
        raise ValueError(f"{number} is not a whole number: this base cannot be divided so.")
    return int(number)


def tuning(plan: Plan) -> dict[str, list[Cell]]:
    """The trials of each tuned arm at the base, with the first seed."""
    b = plan.base
    adamw, adamc = b.with_(optimizer="AdamW"), b.with_(optimizer="AdamC")
    adamwn = b.with_(optimizer="AdamWN")
    hidden = adamwn.with_(hidden_only=True)
    seeds = plan.seeds[:1]
    return {
        ADAMW: grid(ADAMW, adamw, part=TUNING, weight_decay=plan.weight_decay, seeds=seeds),
        TUNED: grid(TUNED, adamwn, part=TUNING, gain=plan.gain, seeds=seeds),
        ADAMC: grid(ADAMC, adamc, part=TUNING, weight_decay=plan.weight_decay, seeds=seeds),
        HIDDEN: grid(HIDDEN, hidden, part=TUNING, gain=plan.hidden_gain, seeds=seeds),
    }


def carried(
    plan: Plan, chosen: dict[str, Cell], condition: Condition, seed: int, part: str
) -> list[Cell]:
    """Every arm with its chosen setting in a condition, those of the main claim first."""
    there = changed(plan.base, condition)

    def cell(arm: str, optimizer: str, **settings: Any) -> Cell:
        config = seeded(there.with_(optimizer=optimizer, **settings), seed)
        tried = tuple((k, v) for k, v in settings.items() if k != "hidden_only")
        return Cell(at(arm, condition), config, seed, tried, part)

    value = {arm: c.settings[0][1] for arm, c in chosen.items()}
    return [
        cell(FIXED, "AdamWN", gain=GAIN),
        cell(ADAMW, "AdamW", weight_decay=value[ADAMW]),
        cell(TIMESCALE, "AdamW", weight_decay=value[ADAMW] * timescale(plan.base, there)),
        cell(TUNED, "AdamWN", gain=value[TUNED]),
        cell(ADAMC, "AdamC", weight_decay=value[ADAMC]),
        cell(HIDDEN, "AdamWN", gain=value[HIDDEN], hidden_only=True),
    ]


def timescale(base: Config, there: Config) -> float:
    """The factor to the decay that keeps lr * decay * steps.

    >>> base = PLANS["small"].base
    >>> [round(timescale(base, lasting(base, steps)), 6) for steps in (400, 2400)]
    [2.0, 0.333333]
    """
    return (base.optim.lr * base.run.steps) / (there.optim.lr * there.run.steps)


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now."""
    plan = PLANS[scale]
    tried = tuning(plan)
    wanted = [cell for found in tried.values() for cell in found]
    # The same run as one of the tuned arm's trials, under the name of the arm that is not tuned.
    wanted += [replace(c, arm=FIXED) for c in tried[TUNED] if dict(c.settings)["gain"] == GAIN]
    if not done.done(wanted):
        return wanted
    chosen = {arm: best for arm, found in tried.items() if (best := done.best(found)) is not None}
    first, more = plan.seeds[0], plan.seeds[1:]

    def each(some: Iterable[Condition], seeds: Iterable[int], part: str = "") -> list[Cell]:
        return [
            cell
            for seed in seeds
            for condition in some
            for cell in carried(plan, chosen, condition, seed, part or condition.axis)
        ]

    rates = [c for c in conditions() if c.axis == "lr"]
    others = [c for c in conditions() if c.axis != "lr"]
    wanted += each([BASE], [first], "carried")
    wanted += each(rates, [first])
    wanted += each([BASE, *rates], more, "seeds")
    wanted += each(others, [first])
    return wanted + each(others, more, "seeds")


STUDY = Study(
    "transfer",
    cells,
    "Each arm tuned once at a base, then carried over to other learning rates, horizons, batches, "
    "widths and depths.",
    ADAMW,
    regret.claims(conditions()),
)
