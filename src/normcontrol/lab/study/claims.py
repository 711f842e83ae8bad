"""A claim, the rule that refutes it, and what the runs say: written down before they are run, and
checked by code.

A rule sees the evidence, the cells of a study with their records, and returns a finding. "Not
shown" is one of the three outcomes, and the usual one when there are few seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from normcontrol.lab.study.cells import Cell
from normcontrol.lab.study.records import Record, Results
from normcontrol.lab.study.statistics import Difference, paired

SUPPORTED, REFUTED, NOT_SHOWN, NOT_RUN = "supported", "refuted", "not shown", "not run"


@dataclass(frozen=True)
class Finding:
    """What became of a claim, and the numbers that say so."""

    outcome: str
    numbers: str = ""


@dataclass(frozen=True)
class Trial:
    """One setting of an arm with its runs, seed by seed."""

    arm: str
    cells: tuple[Cell, ...]
    records: tuple[Record, ...]

    @property
    def name(self) -> str:
        return f"{self.arm} {self.cells[0].trial}".strip()

    @property
    def seeds(self) -> list[int]:
        return [cell.seed for cell in self.cells]

    def values(self, key: str = "val_loss", seeds: Iterable[int] | None = None) -> list[float]:
        wanted = self.seeds if seeds is None else list(seeds)
        by_seed = {
            cell.seed: record.value(key)
            for cell, record in zip(self.cells, self.records, strict=True)
        }
        return [by_seed[seed] for seed in wanted]

    def mean(self, key: str = "val_loss") -> float:
        return statistics.fmean(self.values(key))

    def spread(self, key: str = "val_loss") -> float | None:
        """The standard deviation over seeds; None of one seed, or if a run diverged."""
        values = self.values(key)
        return (
            statistics.stdev(values)
            if len(values) > 1 and all(map(math.isfinite, values))
            else None
        )


def edges_of(trials: list[Trial]) -> dict[str, float] | None:
    """The settings of the best trial that lie at the edge of what was tried, three values or more;
    None if none was tuned so.

    The best in the seeds that all of them have: a trial with more seeds has more bad luck in it,
    and more good luck.
    """
    shared = set.intersection(*(set(t.seeds) for t in trials))
    best = min(trials, key=lambda t: statistics.fmean(t.values(seeds=shared or t.seeds)))
    settings = [dict(t.cells[0].settings) for t in trials]
    tried = {
        key: sorted({own[key] for own in settings if key in own})
        for key, _ in best.cells[0].settings
    }
    tuned = {key: values for key, values in tried.items() if len(values) >= 3}
    found = {
        key: value
        for key, value in best.cells[0].settings
        if key in tuned and value in (tuned[key][0], tuned[key][-1])
    }
    return found if tuned else None


@dataclass(frozen=True)
class Evidence:
    """The cells of a study and what came of them."""

    cells: list[Cell]
    done: Results

    def trials(self, arm: str, part: str | None = None) -> list[Trial]:
        """The trials of an arm that were run, of one part of the study or of all."""
        wanted = [c for c in self.cells if c.arm == arm and part in (None, c.part)]
        kept: dict[str, Cell] = {}
        for cell in wanted:  # the same run in two parts is one run
            kept.setdefault(cell.label, cell)
        return [
            Trial(arm, tuple(c for c, _ in runs), tuple(r for _, r in runs))
            for runs in self.done.trials(kept.values()).values()
        ]

    def chosen(self, arm: str, **settings: float) -> Trial | None:
        """The trial that stands for an arm, or for its trials with these settings: that of the most
        seeds, and the lowest loss of those."""
        trials = [
            t for t in self.trials(arm) if settings.items() <= dict(t.cells[0].settings).items()
        ]
        return min(trials, key=lambda t: (-len(t.seeds), t.mean())) if trials else None

    def better(self, chosen: Trial) -> tuple[Trial, float] | None:
        """The trial of the same arm that is lowest below the chosen one in the seeds it has, too
        few to stand for the arm, and how far."""
        found = [
            (t, d.mean)
            for t in self.trials(chosen.arm)
            if t.name != chosen.name and (d := difference(t, chosen)) is not None
        ]
        trial, ahead = min(found, key=lambda pair: pair[1], default=(chosen, 0.0))
        return (trial, -ahead) if ahead < 0 else None


@dataclass(frozen=True)
class Claim:
    """Something that may be false, and the rule by which it would be seen to be."""

    name: str
    says: str
    refuted_if: str
    rule: Callable[[Evidence], Finding]


def difference(one: Trial, other: Trial, key: str = "val_loss") -> Difference | None:
    """Of two trials over the seeds that both have; None if there are none, or a run of them
    diverged."""
    seeds = [seed for seed in one.seeds if seed in other.seeds]
    values, against = one.values(key, seeds), other.values(key, seeds)
    if not seeds or any(v == float("inf") for v in (*values, *against)):
        return None
    return paired(values, against)


def lower(arm: str, than: str, same: str | None = None) -> Callable[[Evidence], Finding]:
    """The rule of most claims: supported if the interval of the paired difference lies below zero,
    refuted if above.

    It is not supported while a trial of the other arm that did better, in the seeds it has, is not
    beaten likewise. Where a claim is about arms with the ``same`` value of a setting, the first
    stands by its trial with the value of the other.
    """

    def rule(evidence: Evidence) -> Finding:
        other = evidence.chosen(than)
        one = other and evidence.chosen(
            arm, **({same: dict(other.cells[0].settings)[same]} if same else {})
        )
        if one is None or other is None:
            return Finding(NOT_RUN)
        found = difference(one, other)
        if found is None:
            return Finding(NOT_SHOWN, "no seed was run to its end in both arms")
        numbers = f"{one.name} minus {other.name}: {found}, n = {found.n}"
        if found.half is None:
            return Finding(NOT_SHOWN, numbers + ": one seed has no interval")
        if found.below and (better := evidence.better(other)):
            trial, _ = better
            against = difference(one, trial)
            numbers += (
                f"; but minus {trial.cells[0].trial}: {against}, n = {against.n}" if against else ""
            )
            return Finding(SUPPORTED if against and against.below else NOT_SHOWN, numbers)
        return Finding(SUPPORTED if found.below else REFUTED if found.above else NOT_SHOWN, numbers)

    return rule
