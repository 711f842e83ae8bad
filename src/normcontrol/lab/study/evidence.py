"""The finished runs of a study, sorted into trials: what verdicts and claims are made from.

It computes no verdict, and does not know how runs are made.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from normcontrol.lab.study.cells import Cell
from normcontrol.lab.study.records import Record, Results
from normcontrol.lab.study.statistics import Difference, paired
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.optimizers import target_at


@dataclass(frozen=True)
class Trial:
    """One setting of an arm with its runs, seed by seed."""

    arm: str
    cells: tuple[Cell, ...]
    records: tuple[Record, ...]

    @property
    def name(self) -> str:
        return f"{self.arm} {self.settings}".strip()

    @property
    def settings(self) -> str:
        """The settings in words."""
        return self.cells[0].trial

    @property
    def config(self) -> Config:
        """The config of the first seed."""
        return self.cells[0].config

    @property
    def seeds(self) -> list[int]:
        return list(self.by_seed)

    @cached_property
    def by_seed(self) -> dict[int, Record]:
        return {c.seed: record for c, record in zip(self.cells, self.records, strict=True)}

    @property
    def unfinished(self) -> list[str]:
        """How those of its runs ended that are not finished: diverged, failed, or both."""
        return list(dict.fromkeys(r.status for r in self.records if not r.good))

    def setting(self, key: str) -> float:
        """The value of one of the settings that the arm tries several values of."""
        value: float = dict(self.cells[0].settings)[key]
        return value

    def values(self, key: str = "val_loss", seeds: Iterable[int] | None = None) -> list[float]:
        return [
            self.by_seed[seed].value(key) for seed in (self.by_seed if seeds is None else seeds)
        ]

    def mean(self, key: str = "val_loss") -> float:
        return statistics.fmean(self.values(key))

    def spread(self, key: str = "val_loss") -> float | None:
        """The standard deviation over seeds; None for one seed, or if a run diverged."""
        values = self.values(key)
        return (
            statistics.stdev(values)
            if len(values) > 1 and all(map(math.isfinite, values))
            else None
        )

    def target(self) -> float | None:
        """The target ratio after the last step, averaged over seeds; None without control.

        None too with LayerNorm controlled: the recorded norm is that of the matrices alone, and the
        target is that of another norm.
        """
        targets = [
            target_at(cell.config, cell.config.run.steps, record.initial_gain)
            for cell, record in zip(self.cells, self.records, strict=True)
            if not cell.config.optim.norm_layers
        ]
        known = [target for target in targets if target is not None]
        return statistics.fmean(known) if known else None


def difference(
    one: Trial, other: Trial, key: str = "val_loss", seeds: Iterable[int] | None = None
) -> Difference | None:
    """The difference of two trials over the seeds that both have, or over some of these; None if
    there are none, or if one of these runs diverged."""
    among = one.seeds if seeds is None else seeds
    wanted = [s for s in among if s in one.by_seed and s in other.by_seed]
    values, against = one.values(key, wanted), other.values(key, wanted)
    if not wanted or not all(map(math.isfinite, (*values, *against))):
        return None
    return paired(values, against)


@dataclass(frozen=True)
class Evidence:
    """The cells of a study and their records."""

    cells: list[Cell]
    done: Results

    def trials(self, arm: str, part: str | None = None) -> list[Trial]:
        """The trials of an arm that were run, of one part of the study or of all parts."""
        wanted = [c for c in self.cells if c.arm == arm and part in (None, c.part)]
        by_label: dict[str, Cell] = {}
        for cell in wanted:  # a run that is in two parts is one run
            by_label.setdefault(cell.label, cell)
        return [
            Trial(arm, tuple(c for c, _ in runs), tuple(r for _, r in runs))
            for runs in self.done.trials(by_label.values()).values()
        ]
