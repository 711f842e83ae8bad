"""Paths of a norm, its ratio to the initial one after every step of a run; and AdamWN on them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from normcontrol.lab.study.cells import Cell
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.optimizers import lr_at


def walk(config: Config, end: float) -> list[float]:
    """r_t^2 - 1 is proportional to the sum of lr^2 up to step t: the norm of a random walk whose
    steps are as long as the learning rate."""
    squares = [lr_at(config, step) ** 2 for step in range(1, config.run.steps + 1)]
    sums = list(itertools.accumulate(squares))
    return [math.sqrt(1 + (end**2 - 1) * part / sums[-1]) for part in sums]


def straight(config: Config, end: float) -> list[float]:
    """A straight line over the first half of the steps."""
    steps = config.run.steps
    return [1 + (end - 1) * min(2 * step / steps, 1.0) for step in range(1, steps + 1)]


def at_once(config: Config, end: float) -> list[float]:
    return [end] * config.run.steps


def rounded(path: Iterable[float]) -> tuple[float, ...]:
    """A path as a config has it."""
    return tuple(round(ratio, 6) for ratio in path)


def following(own: Cell, arm: str, path: Iterable[float]) -> Cell:
    """AdamWN with the settings of a run of AdamW, on this path."""
    config = own.config.with_(optimizer="AdamWN-follow", path=rounded(path))
    settings = tuple(s for s in own.settings if s[0] != "weight_decay")
    return replace(own, arm=arm, config=config, settings=settings)
