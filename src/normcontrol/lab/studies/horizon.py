"""The study ``horizon``: AdamW and AdamWN with a rising target, tuned and tested as in ``search``,
with a third and with three times the steps.

The paper's gains are those of long runs, and it says that they grow with the budget. Here every
setting of both arms is tuned again for each length of run, so that no arm is carried over from
another length. The plan is in docs/search.md.
"""

from __future__ import annotations

from fractions import Fraction

from normcontrol.lab.studies.search import RISING, at, choice, level, lower, searched
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import NOT_RUN, NOT_SHOWN, Claim, Finding, decide
from normcontrol.lab.study.comparison import Comparison
from normcontrol.lab.study.evidence import Evidence
from normcontrol.lab.study.records import Results
from normcontrol.lab.study.statistics import average

SHORT, LONG = Fraction(1, 3), Fraction(3)
"""How many times the steps of ``search``."""

ARMS = tuple(at(arm, stretch) for stretch in (SHORT, LONG) for arm in (ADAMW, RISING))


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now, the longest first."""
    return [
        cell
        for stretch in (LONG, SHORT)
        for arm in (ADAMW, RISING)
        for cell in searched(scale, arm, done, stretch)
    ]


def compared(evidence: Evidence, stretch: Fraction) -> Comparison | None:
    """AdamWN against AdamW at one length; None before the tests of both."""
    mine, theirs = (choice(evidence, at(arm, stretch)) for arm in (RISING, ADAMW))
    return None if mine is None or theirs is None else Comparison(mine, theirs)


def growth(evidence: Evidence) -> Finding:
    """How AdamWN minus AdamW changes from the short to the long runs of a seed."""
    short, long = (compared(evidence, stretch) for stretch in (SHORT, LONG))
    if short is None or long is None:
        return Finding(NOT_RUN)
    seeds = [seed for seed in short.fresh if seed in long.fresh]
    if len(seeds) < 2:
        return Finding(NOT_SHOWN, because=("two seeds of the test are needed in all arms",))

    def gap(pair: Comparison, seed: int) -> float:
        one, other = (side.trial.by_seed[seed].value() for side in (pair.one, pair.other))
        return one - other

    change = average([gap(long, seed) - gap(short, seed) for seed in seeds])
    numbers = (
        f"from steps x{SHORT} ({short.difference()}) to steps x{LONG} ({long.difference()}): "
        f"{change}, n = {change.n}"
    )
    unfair = [*short.unfair(), *long.unfair()]
    return decide(numbers, change.chance_below(), change.chance_above(), unfair)


STUDY = Study(
    "horizon",
    cells,
    "AdamW and AdamWN with a rising target, tuned and tested as in the study search, with a third "
    "and with three times the steps.",
    at(ADAMW, LONG),
    (
        lower("lower in long runs", at(ADAMW, LONG), at(RISING, LONG)),
        level("level in long runs", at(ADAMW, LONG), at(RISING, LONG)),
        Claim(
            "better with more steps",
            f"{RISING}, gains on {ADAMW} from a third of the steps to three times the steps.",
            f"the 95 % interval of the change of {RISING} minus {ADAMW} lies above zero",
            growth,
        ),
    ),
)
