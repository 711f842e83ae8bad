"""The study ``search``: all settings of each arm tuned, with equal trials, and twenty fresh seeds.

``settle`` tunes the learning rate and the decay or the gain, with six trials. Here the warm-up and
the final learning rate are tuned too, with 48 trials: points drawn at random, the same for all
arms, then, round by round, neighbours of the best. Few of them are repeated with more seeds, and
the one that is chosen is tested with others. The plan, with margins and rules, is in
docs/search.md.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from normcontrol.lab.studies import settle
from normcontrol.lab.studies.paths import rounded, walk
from normcontrol.lab.studies.settled import ADAMC, ADAMW, ADAMWN, HIDDEN, MARGIN, SQRT, TENSOR
from normcontrol.lab.studies.tuning import Arm, known, seeded
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import (
    NOT_RUN,
    NOT_SHOWN,
    Claim,
    Finding,
    decide,
    in_numbers,
    level_loss,
    lower_loss,
)
from normcontrol.lab.study.comparison import Choice, Comparison
from normcontrol.lab.study.evidence import Evidence
from normcontrol.lab.study.records import Results
from normcontrol.lab.study.statistics import Difference

ARMS = (ADAMW, ADAMC, SQRT, ADAMWN, TENSOR, HIDDEN)
RISING, RISING_LAYERNORM = "AdamWN, rising target", "AdamWN, rising target, LayerNorm too"
WALK = "AdamWN, as a random walk"
"""Arms of the studies ``rise``, ``remarks`` and ``tuned-walk``, which are tuned in the same way."""

LR = {"tiny": 8.5e-3, "small": 4e-3, "full": 1e-3}
"""By scale, the middle of the learning rates. At tiny, ``settle`` found the best above its own."""

RATES = tuple(round(2 ** (i / 2), 3) for i in range(-5, 6))
"""The learning rates, as multiples of the middle one."""

DECAYS = (0.02, 0.035, 0.06, 0.1, 0.17, 0.3, 0.56, 0.9, 1.6)
GAINS = (0.33, 0.41, 0.51, 0.64, 0.8, 1.0, 1.25, 1.56, 1.95)
KINDS = {
    arm: Arm(settle.ARMS[arm].fixed, settle.ARMS[arm].key, values)
    for arm, values in (
        (ADAMW, DECAYS),
        (ADAMC, (0.03, 0.05, 0.09, 0.14, 0.24, 0.4, 0.78, 1.27, 2.2)),
        (SQRT, DECAYS),
        (ADAMWN, GAINS),
        (TENSOR, GAINS),
        (HIDDEN, (0.13, 0.19, 0.27, 0.38, 0.55, 0.8, 1.15, 1.6, 2.3)),
    )
}
RATIOS = (0.64, 0.8, 1.0, 1.25, 1.56, 1.95, 2.4, 3.0, 3.8, 4.8, 6.0, 7.6)
for _arm, _norm_layers in ((RISING, False), (RISING_LAYERNORM, True)):
    KINDS[_arm] = Arm(
        {"optimizer": "AdamWN", "rate": 0.1, "ratio_start": 1.0, "norm_layers": _norm_layers},
        "ratio",
        RATIOS,
    )
KINDS[WALK] = Arm({"optimizer": "AdamWN-follow"}, "ratio", RATIOS)
"""By arm, what is fixed, and the setting beside the learning rate with its values. The search takes
as many of them as there are decays; the study ``kept`` goes on to the others."""

WARMUPS = (0.01, 0.05, 0.1, 0.2, 0.35, 0.5)
"""The warm-up, as a share of the steps."""
FINALS = (0.0, 0.03, 0.1, 0.25, 0.5)
"""The final learning rate, as a share of the peak."""

DRAWN, STEPS, BEST, BESIDE = 16, 4, 2, 8
"""How many points are drawn; after that, the number of rounds, of the best points that a round
starts from, and of their neighbours that it tries."""

REPEATED = ((6, (1, 2)), (2, (3, 4, 5, 6)))
"""After the trials with seed 0: how many of the best are run with which further seeds."""
CHOSEN_BY = (0, 1, 2, 3, 4, 5, 6)
SEEDS = range(71, 91)
"""Those of the test. No study was run with them before."""

Point = tuple[int, int, int, int]
"""Places in the lists of learning rates, values, warm-ups and finals."""

SIZES: Point = (len(RATES), len(DECAYS), len(WARMUPS), len(FINALS))


@dataclass(frozen=True)
class Protocol:
    """What differs between the studies that search in this way."""

    stretch: Fraction = Fraction(1)
    """How many times the steps of ``settle``."""
    warmups: tuple[float, ...] = WARMUPS
    seeds: range = SEEDS
    """Those of the test."""
    decays: tuple[float, ...] = DECAYS
    """Those of AdamW."""
    unique_tokens: int = 0
    """How many tokens of the text are trained on, again and again; 0 for all."""

    def name(self, arm: str) -> str:
        """The name of an arm.

        >>> Protocol().name(ADAMW), Protocol(Fraction(1, 3)).name(ADAMW)
        ('AdamW', 'AdamW, steps x1/3')
        """
        return f"{arm}, {self.condition}" if self.condition else arm

    @property
    def condition(self) -> str:
        """What differs from the runs of ``search``, in the name of an arm."""
        if self.unique_tokens:
            return "repeated text"
        return "" if self.stretch == 1 else f"steps x{self.stretch}"


USUAL = Protocol()


def drawn() -> list[Point]:
    """The points of the first round, the same for every arm, none of them twice.

    In each of the four settings all values are drawn equally often, as far as that is possible.
    """
    numbers = random.Random(0)
    columns = [[i * size // DRAWN for i in range(DRAWN)] for size in SIZES]
    for column in columns:
        numbers.shuffle(column)
    return [(a, b, c, d) for a, b, c, d in zip(*columns, strict=True)]


def beside(best: Sequence[Point], tried: Sequence[Point]) -> list[Point]:
    """New neighbours of the best points in turn: each setting one place up or down, or unchanged,
    at random."""
    numbers = random.Random(len(tried))
    found: list[Point] = []
    for _ in range(10_000):
        around = best[len(found) % len(best)]
        moved = [
            min(max(place + numbers.choice((-1, 0, 1)), 0), size - 1)
            for place, size in zip(around, SIZES, strict=True)
        ]
        point = (moved[0], moved[1], moved[2], moved[3])
        if point not in tried and point not in found:
            found.append(point)
        if len(found) == BESIDE:
            break
    return found


@functools.cache  # a study asks for its cells again whenever some are finished
def trial(
    scale: str, arm: str, point: Point, seed: int, part: str, protocol: Protocol = USUAL
) -> Cell:
    """A run of an arm at a point."""
    base, kind = settle.BASES[scale], KINDS[arm]
    steps = round(base.run.steps * protocol.stretch)
    values = protocol.decays if arm == ADAMW else kind.values
    settings: Mapping[str, Any] = {
        "lr": LR[scale] * RATES[point[0]],
        kind.key: values[point[1]],
        "warmup": round(protocol.warmups[point[2]] * steps),
        "min_lr": FINALS[point[3]],
    }
    quarter = steps // 4
    config = base.with_(
        **kind.fixed,
        **settings,
        steps=steps,
        log_every=quarter,
        eval_every=quarter,
        unique_tokens=protocol.unique_tokens,
    )
    if arm == WALK:
        path = rounded(walk(config, settings["ratio"]))
        config = config.with_(ratio=base.optim.ratio, path=path)
    elif kind.key == "ratio":
        config = config.with_(ramp=steps // 2)
    return Cell(protocol.name(arm), seeded(config, seed), seed, tuple(settings.items()), part)


def stages(scale: str, arm: str, done: Results, protocol: Protocol = USUAL) -> Iterator[list[Cell]]:
    """The cells of an arm, round by round. A round can be named when those before it are done."""

    def loss(point: Point, seeds: Sequence[int]) -> float:
        records = (done.of(trial(scale, arm, point, seed, "search", protocol)) for seed in seeds)
        return statistics.fmean(record.value() for record in records if record is not None)

    def round_of(points: Sequence[Point], seeds: Sequence[int], part: str) -> list[Cell]:
        return [
            trial(scale, arm, point, seed, part, protocol) for point in points for seed in seeds
        ]

    def best(points: Sequence[Point], count: int, seeds: Sequence[int]) -> list[Point]:
        return sorted(points, key=lambda point: loss(point, seeds))[:count]

    points, seeds = drawn(), CHOSEN_BY[:1]
    yield round_of(points, seeds, "search")
    for _ in range(STEPS):
        new = beside(best(points, BEST, seeds), points)
        yield round_of(new, seeds, "search")
        points += new
    for count, more in REPEATED:
        points = best(points, count, seeds)
        yield round_of(points, more, "choice")
        seeds = (*seeds, *more)
    yield round_of(best(points, 1, seeds), protocol.seeds, "test")


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now: those of all arms, each as far as it is."""
    return [cell for arm in ARMS for cell in searched(scale, arm, done)]


def searched(scale: str, arm: str, done: Results, protocol: Protocol = USUAL) -> list[Cell]:
    """The cells of one arm, as far as it is."""
    return known(stages(scale, arm, done, protocol), done)


def choice(evidence: Evidence, arm: str) -> Choice | None:
    """The trial that is tested, of all that were made; None before its first test."""
    tested = evidence.trials(arm, "test")
    if not tested:
        return None
    trials = evidence.trials(arm)
    chosen = next(t for t in trials if t.settings == tested[0].settings)
    return Choice(trials, chosen, frozenset(CHOSEN_BY), len(trials))


def compared(evidence: Evidence, one: str, other: str) -> Comparison | None:
    """Two arms, each by the trial that is tested; None before the tests of both."""
    mine, theirs = choice(evidence, one), choice(evidence, other)
    return None if mine is None or theirs is None else Comparison(mine, theirs)


def rule(
    one: str, other: str, tests: Callable[[Difference], tuple[float, float]]
) -> Callable[[Evidence], Finding]:
    """A claim about two arms: which p-values support and refute it, given the paired difference in
    the seeds of the test."""

    def decided(evidence: Evidence) -> Finding:
        pair = compared(evidence, one, other)
        if pair is None:
            return Finding(NOT_RUN)
        found = pair.difference()
        if found is None or found.error is None:
            return Finding(NOT_SHOWN, because=("two seeds of the test are needed in both arms",))
        return decide(in_numbers(pair, found), *tests(found), pair.unfair())

    return decided


def lower(name: str, other: str, arm: str = ADAMWN) -> Claim:
    decided = rule(arm, other, lambda d: (d.chance_below(), d.chance_above()))
    return replace(lower_loss(name, arm, other), rule=decided)


def level(name: str, other: str, arm: str = ADAMWN) -> Claim:
    decided = rule(arm, other, lambda d: (d.chance_within(MARGIN), d.chance_beyond(MARGIN)))
    return replace(level_loss(name, arm, other, MARGIN), rule=decided)


STUDY = Study(
    "search",
    cells,
    "AdamW, AdamC and AdamWN with learning rate, decay or gain, warm-up and final learning rate "
    "tuned by a search with equal trials, and tested with fresh seeds.",
    ADAMW,
    (
        lower("lower", ADAMW),
        level("level", ADAMW),
        lower("lower than AdamC", ADAMC),
        level("level with AdamC", ADAMC),
        level("root", SQRT),
        lower("one norm", TENSOR),
        lower("all matrices", HIDDEN),
    ),
)
