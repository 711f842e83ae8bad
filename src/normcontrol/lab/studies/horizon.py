"""The study ``horizon``: AdamW and AdamWN with a rising target, tuned and tested as in ``search``,
with a third and with three times the steps.

The paper's gains are those of long runs, and it says that they grow with the budget. Here every
setting of both arms is tuned again for each length of run, so that no arm is carried over from
another length. The plan is in docs/longer.md.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from normcontrol.lab.studies.search import RISING, Protocol, compared, level, lower, searched
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import NOT_RUN, NOT_SHOWN, Claim, Finding, decide
from normcontrol.lab.study.comparison import Comparison
from normcontrol.lab.study.evidence import Evidence
from normcontrol.lab.study.records import Results
from normcontrol.lab.study.statistics import average

SHORT, LONG = Protocol(Fraction(1, 3)), Protocol(Fraction(3))
KINDS = (ADAMW, RISING)
ARMS = tuple(protocol.name(arm) for protocol in (SHORT, LONG) for arm in KINDS)


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now, the longest first."""
    return [
        cell
        for protocol in (LONG, SHORT)
        for arm in KINDS
        for cell in searched(scale, arm, done, protocol)
    ]


def change(one: Protocol, other: Protocol, arm: str) -> Callable[[Evidence], Finding]:
    """How the difference of an arm and AdamW changes between the runs of a seed in two
    conditions."""

    def decided(evidence: Evidence) -> Finding:
        before, after = (compared(evidence, p.name(arm), p.name(ADAMW)) for p in (one, other))
        if before is None or after is None:
            return Finding(NOT_RUN)
        seeds = [seed for seed in before.fresh if seed in after.fresh]
        if len(seeds) < 2:
            return Finding(NOT_SHOWN, because=("two seeds of the test are needed in all arms",))
        if before.difference() is None or after.difference() is None:
            because = " and ".join(filter(None, (before.untested(), after.untested())))
            return Finding(NOT_SHOWN, because=(because,))

        def gap(pair: Comparison, seed: int) -> float:
            one, other = (side.trial.by_seed[seed].value() for side in (pair.one, pair.other))
            return one - other

        found = average([gap(after, seed) - gap(before, seed) for seed in seeds])
        first, then = (
            f"{protocol.condition or 'text seen once'} ({pair.difference()})"
            for protocol, pair in ((one, before), (other, after))
        )
        numbers = f"from {first} to {then}: {found}, n = {found.n}"
        unfair = [*before.unfair(), *after.unfair()]
        return decide(numbers, found.chance_below(), found.chance_above(), unfair)

    return decided


def gains(name: str, says: str, one: Protocol, other: Protocol, arm: str) -> Claim:
    """An arm gains on AdamW from one condition to another."""
    refuted = f"the 95 % interval of the change of {arm} minus {ADAMW} lies above zero"
    return Claim(name, says, refuted, change(one, other, arm))


def better_with_more_steps(short: Protocol, long: Protocol) -> Claim:
    says = f"{RISING}, gains on {ADAMW} from a third of the steps to three times the steps."
    return gains("better with more steps", says, short, long, RISING)


STUDY = Study(
    "horizon",
    cells,
    "AdamW and AdamWN with a rising target, tuned and tested as in the study search, with a third "
    "and with three times the steps.",
    LONG.name(ADAMW),
    (
        lower("lower in long runs", LONG.name(ADAMW), LONG.name(RISING)),
        level("level in long runs", LONG.name(ADAMW), LONG.name(RISING)),
        better_with_more_steps(SHORT, LONG),
    ),
)
