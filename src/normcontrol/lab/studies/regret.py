"""Regret in the conditions of the study ``transfer``, and the claims about it. Rules look at runs;
they do not choose them.

Regret of a run: its loss minus the lowest loss that any run reached in the same condition with the
same seed. The difference of two arms' regrets in a condition is therefore the paired difference of
their losses.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from normcontrol.lab.study.cells import Cell
from normcontrol.lab.study.claims import (
    NOT_RUN,
    NOT_SHOWN,
    ONE_SEED,
    Claim,
    Finding,
    decide,
)
from normcontrol.lab.study.comparison import SAME_SEEDS, choose, in_words
from normcontrol.lab.study.evidence import Evidence
from normcontrol.lab.study.statistics import any_of, paired

ADAMW, TIMESCALE, ADAMC = "AdamW", "AdamW, timescale rule", "AdamC"
TUNED, FIXED, HIDDEN = "AdamWN, gain tuned", "AdamWN, gain 0.8", "AdamWN, hidden matrices"
ARMS = (FIXED, TUNED, HIDDEN, ADAMW, TIMESCALE, ADAMC)
RIVALS = (ADAMW, TIMESCALE)
"""The arms that the untuned gain is compared with in the claims."""

GAIN = 0.8
"""The gain that is not tuned, and that of the initial weights in all arms."""

MARGIN = 0.01
"""By how much a worst-case regret has to be smaller, in nats: about the spread of one seed."""

LOST = 1.0
"""The regret of a run that diverged, and the largest that counts."""

AT = " at "
"""Between an arm and its condition in the name of a cell's arm."""

TUNING = "base"
"""The part of the trials from which a setting is chosen."""


class Condition(NamedTuple):
    """One axis changed by a factor; the base is no axis."""

    axis: str
    factor: str

    def __str__(self) -> str:
        return f"{self.axis} x{self.factor}" if self.factor else self.axis


BASE = Condition("base", "")


def at(arm: str, condition: Condition) -> str:
    """The name of an arm in a condition. At the base it is the arm's own.

    >>> at(ADAMW, Condition("lr", "1/4")), at(ADAMW, BASE)
    ('AdamW at lr x1/4', 'AdamW')
    """
    return arm if condition == BASE else f"{arm}{AT}{condition}"


@dataclass(frozen=True)
class Regrets:
    """The regret of every arm with the setting that it carries over."""

    values: dict[tuple[str, str, int], float]
    """By arm, condition and seed."""

    @classmethod
    def of(cls, evidence: Evidence) -> Regrets:
        best: dict[tuple[str, int], float] = {}
        losses: dict[tuple[str, str, int], float] = {}
        for cell in evidence.cells:
            record = evidence.done.of(cell)
            if record is None or record.status == "failed":
                continue
            arm, _, where = cell.arm.partition(AT)
            here = (where or str(BASE), cell.seed)
            best[here] = min(record.value(), best.get(here, math.inf))
            if _carried(cell):
                losses[(arm, *here)] = record.value()
        return cls({key: _regret(loss, best[key[1:]]) for key, loss in losses.items()})

    def seeds(self, arms: Sequence[str], conditions: Sequence[Condition]) -> list[int]:
        """The seeds with which all of the arms were run in all of the conditions."""
        found = sorted({seed for _, _, seed in self.values})
        wanted = [(arm, str(c)) for arm in arms for c in conditions]
        return [s for s in found if all((arm, c, s) in self.values for arm, c in wanted)]

    def over(
        self, arm: str, conditions: Sequence[Condition], seeds: Sequence[int], how: Summary = max
    ) -> list[float]:
        """The worst regret over conditions, or another summary of them, seed by seed."""
        return [how([self.values[arm, str(c), seed] for c in conditions]) for seed in seeds]


Summary = Callable[[list[float]], float]


def _carried(cell: Cell) -> bool:
    """True for a run with a setting that is carried over, False for a trial of the tuning."""
    return cell.part != TUNING


def _regret(loss: float, best: float) -> float:
    return min(loss - best, LOST) if math.isfinite(loss) else LOST


def smaller(conditions: Sequence[Condition], how: Summary = max) -> Callable[[Evidence], Finding]:
    """The rule for a set of conditions: the regret of the untuned gain, summarised over them, is
    smaller than that of each rival by more than the margin, in the seeds that tuned neither.

    The untuned gain is one trial and the rivals are the best of several, which favours the rivals.
    """

    def rule(evidence: Evidence) -> Finding:
        found = Regrets.of(evidence)
        every = found.seeds((FIXED, *RIVALS), conditions)
        if not every:
            return Finding(NOT_RUN)
        seeds, because = tested(evidence, every)
        mine = found.over(FIXED, conditions, seeds, how)
        against = {arm: found.over(arm, conditions, seeds, how) for arm in RIVALS}
        differences = [paired(mine, theirs) for theirs in against.values()]
        numbers = f"{FIXED} {statistics.fmean(mine):.4f}; " + "; ".join(
            f"{arm} {statistics.fmean(theirs):.4f}, difference {d}"
            for (arm, theirs), d in zip(against.items(), differences, strict=True)
        )
        numbers += f"; n = {len(seeds)}"
        if len(seeds) == 1:
            return Finding(NOT_SHOWN, numbers, because=(ONE_SEED, *because))
        supports = max(d.chance_below(-MARGIN) for d in differences)
        refutes = any_of([d.chance_above(-MARGIN) for d in differences])
        return decide(numbers, supports, refutes, [*because, *_at_an_edge(evidence)])

    return rule


def tested(evidence: Evidence, seeds: list[int]) -> tuple[list[int], list[str]]:
    """Those of the seeds by which nothing was tuned; all of them, and a reason why they show
    nothing, if there are no others."""
    tuned = {cell.seed for cell in evidence.cells if cell.part == TUNING}
    fresh = [seed for seed in seeds if seed not in tuned]
    return (fresh, []) if fresh else (seeds, [SAME_SEEDS])


def _at_an_edge(evidence: Evidence) -> list[str]:
    """In words, that the tuned decay of the rivals is at the edge of the values tried."""
    choice = choose(evidence.trials(ADAMW, TUNING))
    edges = choice.edges() if choice else None
    return [f"the decay of {ADAMW} is at the edge of its grid ({in_words(edges)})"] if edges else []


def needs_no_tuning(evidence: Evidence) -> Finding:
    """At the base, the untuned gain against the tuned one, if they are two gains."""
    found = Regrets.of(evidence)
    every = found.seeds((FIXED, TUNED), [BASE])
    if not every:
        return Finding(NOT_RUN)
    if _tuned_gain(evidence) == GAIN:
        return Finding(NOT_SHOWN, f"the tuned gain is {GAIN:g} itself: both arms are the same runs")
    seeds, because = tested(evidence, every)
    d = paired(*(found.over(arm, [BASE], seeds) for arm in (FIXED, TUNED)))
    numbers = f"{FIXED} minus {TUNED}: {d}, n = {d.n}"
    if d.error is None:
        return Finding(NOT_SHOWN, numbers, because=(ONE_SEED, *because))
    return decide(numbers, d.chance_below(2 * MARGIN), d.chance_above(2 * MARGIN), because)


def _tuned_gain(evidence: Evidence) -> float:
    carried = next(c for c in evidence.cells if c.arm == TUNED and c.part != TUNING)
    return float(dict(carried.settings)["gain"])


def claims(conditions: Sequence[Condition]) -> tuple[Claim, ...]:
    """The claim over all conditions, worst case and mean, one for each axis, and that about
    tuning. Each of them counts the base as a condition."""
    everything = [BASE, *conditions]
    rivals = "AdamW with its decay carried over, and than AdamW with the timescale rule"
    refuted = (
        f"against one of the two, the interval of the paired difference lies above -{MARGIN:g}; it "
        f"is supported if both lie below -{MARGIN:g}"
    )
    found = [
        Claim(
            "set and forget",
            "Over all conditions, AdamWN at gain 0.8, never tuned, has a smaller worst-case regret "
            f"than {rivals}, by more than {MARGIN:g}.",
            refuted,
            smaller(everything),
        ),
        Claim(
            "on average",
            f"The same for the mean of the regrets over all conditions: smaller than {rivals}.",
            refuted,
            smaller(everything, statistics.fmean),
        ),
    ]
    for axis in dict.fromkeys(c.axis for c in conditions):
        found.append(
            Claim(
                axis,
                f"Over the conditions of the axis {axis} and the base, the worst-case regret of "
                f"AdamWN at gain 0.8 is smaller than that of {rivals}.",
                refuted,
                smaller([BASE, *(c for c in conditions if c.axis == axis)]),
            )
        )
    tuning = Claim(
        "no tuning",
        f"At the base, gain 0.8 ends within {2 * MARGIN:g} of the tuned gain.",
        f"the interval of the paired difference lies above {2 * MARGIN:g}; if the tuned gain is "
        f"{GAIN:g} itself, nothing is shown",
        needs_no_tuning,
    )
    return (*found, tuning)


def table(evidence: Evidence, conditions: Sequence[Condition]) -> list[list[str]]:
    """Mean regret over the seeds, arm by condition, with their number; then worst and mean over the
    conditions in which every arm was run."""
    found = Regrets.of(evidence)
    rows = [["regret", *ARMS]]
    whole = []
    for c in (BASE, *conditions):
        values = {
            arm: [v for (a, where, _), v in found.values.items() if (a, where) == (arm, str(c))]
            for arm in ARMS
        }
        if any(values.values()):
            rows.append([str(c), *(_mean(values[arm]) for arm in ARMS)])
        if all(values.values()):
            whole.append([statistics.fmean(values[arm]) for arm in ARMS])
    for name, how in (("worst", max), ("mean", statistics.fmean)):
        if whole:
            rows.append([name, *(f"{how(column):.4f}" for column in zip(*whole, strict=True))])
    return rows


def _mean(values: list[float]) -> str:
    return f"{statistics.fmean(values):.4f} ({len(values)})" if values else "-"
