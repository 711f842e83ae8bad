"""The study ``remarks``: what the paper says in passing, each remark as a claim.

The rate hardly matters; LayerNorm is better left alone; the best decay depends on the number of
steps, and the best target does not. AdamW and AdamWN with a rising target have the settings that
the studies ``search`` and ``rise`` chose, and new seeds. The plan is in docs/longer.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from normcontrol.lab.studies.claims_rules import PAPERS_GAIN
from normcontrol.lab.studies.search import (
    KINDS,
    RISING,
    RISING_LAYERNORM,
    Point,
    Protocol,
    lower,
    searched,
    trial,
)
from normcontrol.lab.studies.settled import ADAMW, MARGIN
from normcontrol.lab.studies.tuning import known
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import (
    NOT_RUN,
    NOT_SHOWN,
    Claim,
    Finding,
    all_within,
    decide,
    run_in_all,
)
from normcontrol.lab.study.evidence import Evidence, Trial, difference
from normcontrol.lab.study.records import Results
from normcontrol.lab.study.statistics import Difference

SEEDS = range(131, 151)
USUAL, LONG = Protocol(seeds=SEEDS), Protocol(Fraction(3), seeds=SEEDS)

CHOSEN: dict[str, Point] = {ADAMW: (6, 5, 3, 1), RISING: (7, 5, 4, 1)}
"""What ``search`` and ``rise`` chose at tiny: a learning rate of 0.012 or 0.017, a decay of 0.3 or
a ratio of 1.95, a warm-up of 0.2 or 0.35, and 0.03 of the learning rate at the end."""

TRIED = {ADAMW: range(1, 8), RISING: range(2, 9)}
"""By arm, the places in its list of decays or ratios that are tried with three times the steps."""
TUNED_BY = (0, 1, 2)

RATES = (0.01, 1.0)
"""Beside 0.1, the rate of the arm itself."""


def rated(rate: float) -> str:
    """The name of the arm with another rate."""
    return f"{RISING}, k = {rate:g}"


def at(arm: str, place: int) -> Point:
    """The chosen point with another decay or ratio."""
    lr, _, warmup, final = CHOSEN[arm]
    return lr, place, warmup, final


def other_rates(scale: str) -> list[Cell]:
    """The arm with other rates and nothing else changed."""
    usual = [trial(scale, RISING, CHOSEN[RISING], seed, "test", USUAL) for seed in SEEDS]
    return [
        replace(cell, arm=rated(rate), config=cell.config.with_(rate=rate))
        for rate in RATES
        for cell in usual
    ]


def longer(scale: str, arm: str, done: Results, tried: range, seeds: range) -> Iterator[list[Cell]]:
    """With three times the steps: every value with three seeds, then the value that is kept and
    the best of the others with new seeds."""

    def runs(place: int, seeds: Sequence[int], part: str) -> list[Cell]:
        return [trial(scale, arm, at(arm, place), seed, part, LONG) for seed in seeds]

    def loss(place: int) -> float:
        records = (done.of(cell) for cell in runs(place, TUNED_BY, "tuning"))
        return statistics.fmean(record.value() for record in records if record is not None)

    yield [cell for place in tried for cell in runs(place, TUNED_BY, "tuning")]
    kept = CHOSEN[arm][1]
    best = min((place for place in tried if place != kept), key=loss)
    yield [cell for place in (kept, best) for cell in runs(place, seeds, "test")]


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now, those that others wait for first."""
    wanted = [
        cell for arm in (RISING_LAYERNORM, RISING) for cell in searched(scale, arm, done, USUAL)
    ]
    for arm in CHOSEN:
        wanted += known(longer(scale, arm, done, TRIED[arm], SEEDS), done)
    return wanted + other_rates(scale)


def rate_hardly_matters(evidence: Evidence) -> Finding:
    """Compare each other rate with the usual one."""
    usual = evidence.trials(RISING, "test")
    others = [trial for rate in RATES for trial in evidence.trials(rated(rate))]
    seeds = run_in_all([*usual, *others], SEEDS) if usual and len(others) == len(RATES) else []
    if not seeds:
        return Finding(NOT_RUN)
    found = {t.arm: difference(t, usual[0], seeds=seeds) for t in others}
    numbers = "; ".join(f"{arm} minus k = 0.1: {d or 'diverged'}" for arm, d in found.items())
    return all_within(numbers, list(found.values()), PAPERS_GAIN)


def kept_and_best_other(evidence: Evidence, arm: str) -> tuple[Trial, Trial] | None:
    """The two trials of the long runs that were tested; None before that."""
    tested = evidence.trials(LONG.name(arm), "test")
    if len(tested) < 2:
        return None
    kept = KINDS[arm].values[CHOSEN[arm][1]]
    one, other = sorted(tested, key=lambda t: t.setting(KINDS[arm].key) != kept)
    return one, other


def another_value(
    arm: str,
    tests: Callable[[Difference], tuple[float, float]],
    unclear: Callable[[float, float, float], bool] = lambda value, supports, refutes: False,
) -> Callable[[Evidence], Finding]:
    """A claim about the long runs of an arm: which p-values support and refute it, given the best
    other value minus the one that is kept. ``unclear`` tells, from that value and the p-values,
    whether nothing is shown because it is at the edge of those tried."""
    key = KINDS[arm].key

    def rule(evidence: Evidence) -> Finding:
        found = kept_and_best_other(evidence, arm)
        if found is None:
            return Finding(NOT_RUN)
        kept, other = found
        less = difference(other, kept)
        if less is None or less.error is None:
            return Finding(NOT_SHOWN, because=("two seeds of the test are needed for both",))
        value = other.setting(key)
        numbers = (
            f"{arm}, {key} {value:g} minus {kept.setting(key):g}, with three times the steps: "
            f"{less}, n = {less.n}"
        )
        because = [
            f"a {key} of {value:g} is at the edge of those tried, and the best may lie beyond"
        ]
        chances = tests(less)
        return decide(numbers, *chances, because if unclear(value, *chances) else ())

    return rule


def same_target(unclear: Callable[[float, float, float], bool]) -> Claim:
    return Claim(
        "target",
        "The best target does not depend on the number of steps: with three times the steps, no "
        f"other target is better by {MARGIN:g} than the one that was best before.",
        f"the interval of the best other target minus the one that is kept lies below -{MARGIN:g}",
        another_value(
            RISING, lambda d: (d.chance_above(-MARGIN), d.chance_below(-MARGIN)), unclear
        ),
    )


EDGES = [KINDS[RISING].values[place] for place in (TRIED[RISING][0], TRIED[RISING][-1])]
"""Nothing is shown about the target if the best other one is one of these."""

STUDY = Study(
    "remarks",
    cells,
    "What the paper says in passing: other rates, LayerNorm controlled too, and the best decay and "
    "the best target with three times the steps.",
    RISING,
    (
        Claim(
            "rate",
            "The rate hardly matters: a tenth and ten times of it change the loss by less than "
            f"{PAPERS_GAIN:g}.",
            f"the 95 % interval of a paired difference lies beyond {PAPERS_GAIN:g} on one side, or "
            "a run at another rate diverges",
            rate_hardly_matters,
        ),
        lower("LayerNorm", RISING_LAYERNORM, RISING),
        Claim(
            "decay",
            "The best decay depends on the number of steps: with three times the steps, another "
            "decay than the one that was best before has a lower loss.",
            "the interval of the best other decay minus the one that is kept lies above zero",
            another_value(ADAMW, lambda d: (d.chance_below(), d.chance_above())),
        ),
        same_target(lambda value, *chances: value in EDGES),
    ),
)
