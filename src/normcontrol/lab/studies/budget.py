"""The study ``budget``: AdamW and AdamWN with one, two and four times the steps.

Is AdamWN slower at first and better later, does it need fewer steps, and does the difference grow
with the budget? The settings are those that ``settle`` chose at the same scale. Every horizon has a
schedule of its own, stretched to it. The best decay depends on the horizon, so AdamW comes twice:
with its decay as chosen, and with lr * decay * steps as chosen. The plan, with margins and rules,
is in docs/budget.md.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from normcontrol.lab.errors import LabError
from normcontrol.lab.studies import settle
from normcontrol.lab.studies.settled import ADAMW, ADAMWN, MARGIN
from normcontrol.lab.studies.tuning import seeded
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import NOT_RUN, NOT_SHOWN, ONE_SEED, Claim, Finding, decide
from normcontrol.lab.study.evidence import Evidence
from normcontrol.lab.study.records import Record, Results
from normcontrol.lab.study.statistics import Difference, average
from normcontrol.lab.training.config import Config

TIMESCALE = "AdamW, lr x decay x steps kept"
RIVALS = (ADAMW, TIMESCALE)
"""What AdamWN is compared with. A claim has to hold against both."""

ARMS = (*RIVALS, ADAMWN)
FACTORS, LONGEST = (1, 2), 4
"""The horizons of every seed, as multiples of the first, and the one that comes after them."""

STEPS = {"tiny": 600, "small": 1500}
"""The first horizon."""

CHOSEN = {
    "tiny": {ADAMW: (1.2e-2, 0.56), ADAMWN: (6e-3, 0.8)},
    "small": {ADAMW: (4e-3, 0.3), ADAMWN: (4e-3, 0.8)},
}
"""By scale and arm, what ``settle`` chose: the learning rate, and the decay or the gain."""

SEEDS = range(31, 36)
"""No study was run with them before."""


def at(arm: str, factor: int) -> str:
    """The name of an arm at a horizon.

    >>> at(ADAMWN, 2)
    'AdamWN, steps x2'
    """
    return f"{arm}, steps x{factor}"


def lasting(config: Config, steps: int) -> Config:
    """The config with another horizon: warm-up and cosine stretched to it, ten evaluations."""
    return config.with_(
        steps=steps,
        warmup=round(steps / 5),
        eval_every=steps // 10,
        log_every=max(steps // 40, 1),
    )


def cell(scale: str, arm: str, factor: int, seed: int) -> Cell:
    """An arm at a horizon."""
    chosen, steps = CHOSEN[scale], STEPS[scale] * factor
    base = settle.BASES[scale]
    lr, value = chosen[ADAMWN if arm == ADAMWN else ADAMW]
    if arm == TIMESCALE:
        value *= base.run.steps / steps
    kind = settle.ARMS[ADAMWN if arm == ADAMWN else ADAMW]
    settings = (("lr", lr), (kind.key, value))
    config = seeded(lasting(base, steps).with_(**kind.fixed, **dict(settings)), seed)
    return Cell(at(arm, factor), config, seed, settings, f"x{factor}")


def cells(scale: str, done: Results) -> list[Cell]:
    """Two seeds at a time: the first horizon of both, then the second of each. The longest horizon
    comes after all of these, seed by seed."""
    if scale not in CHOSEN:
        raise LabError(
            f"budget uses what settle chose, and at {scale} settle was not run yet. Run it there, "
            "and enter its choice in CHOSEN in lab/studies/budget.py."
        )
    order = [
        (seed, factor)
        for i in range(0, len(SEEDS), 2)
        for factor in FACTORS
        for seed in SEEDS[i : i + 2]
    ]
    order += [(seed, LONGEST) for seed in SEEDS]
    return [cell(scale, arm, factor, seed) for seed, factor in order for arm in ARMS]


@dataclass(frozen=True)
class Runs:
    """The runs that count: the seeds that have all arms at the first two horizons, and the longest
    horizon too once all these seeds have it."""

    records: Mapping[tuple[str, int, int], Record]
    """By arm, factor and seed."""
    seeds: tuple[int, ...]
    factors: tuple[int, ...]

    @property
    def good(self) -> bool:
        """True if none of them diverged."""
        counted = itertools.product(ARMS, self.factors, self.seeds)
        return all(self.records[run].good for run in counted)

    def loss(self, arm: str, factor: int, seed: int, share: float = 1.0) -> float:
        """The validation loss after a share of the run."""
        steps, losses = self.records[arm, factor, seed].curves["val_loss"]
        return losses[steps.index(round(share * steps[-1]))]

    def gap(self, rival: str, factor: int, seed: int, share: float = 1.0) -> float:
        """AdamWN minus AdamW after the same share of runs of the same length."""
        return self.loss(ADAMWN, factor, seed, share) - self.loss(rival, factor, seed, share)


def runs(evidence: Evidence) -> Runs:
    """The runs of a study, and those of them that count."""
    factors = (*FACTORS, LONGEST)
    records = {
        (arm, factor, seed): record
        for arm, factor in itertools.product(ARMS, factors)
        for trial in evidence.trials(at(arm, factor))
        for seed, record in trial.by_seed.items()
    }

    def whole(seed: int, factor: int) -> bool:
        return all((arm, factor, seed) in records for arm in ARMS)

    seeds = tuple(s for s in SEEDS if all(whole(s, factor) for factor in FACTORS))
    longest = all(whole(seed, LONGEST) for seed in seeds)
    return Runs(records, seeds, factors if longest else FACTORS)


Measure = Callable[[Runs, str, int], float]
"""A number of a seed, given the arm that AdamWN is compared with."""


def halfway(found: Runs, rival: str, seed: int) -> float:
    """AdamWN minus AdamW at half of the run, averaged over the horizons."""
    return statistics.fmean(found.gap(rival, factor, seed, 0.5) for factor in found.factors)


def final(found: Runs, rival: str, seed: int) -> float:
    """AdamWN minus AdamW at the end of the run, averaged over the horizons."""
    return statistics.fmean(found.gap(rival, factor, seed) for factor in found.factors)


def half_the_steps(found: Runs, rival: str, seed: int) -> float:
    """AdamWN minus AdamW with twice its steps, each at the end of its own schedule, averaged over
    the horizons that have a double."""
    pairs = itertools.pairwise(found.factors)
    return statistics.fmean(
        found.loss(ADAMWN, less, seed) - found.loss(rival, more, seed) for less, more in pairs
    )


def growth(found: Runs, rival: str, seed: int) -> float:
    """How much AdamWN minus AdamW at the end of the run changes with each doubling of the steps."""
    first, last = found.factors[0], found.factors[-1]
    return (found.gap(rival, last, seed) - found.gap(rival, first, seed)) / math.log2(last / first)


def measured(found: Runs, measure: Measure) -> dict[str, Difference]:
    """A number with its interval over seeds, against each of the arms."""
    return {
        rival: average([measure(found, rival, seed) for seed in found.seeds]) for rival in RIVALS
    }


def rule(
    measure: Measure,
    supports: Callable[[Difference], float],
    refutes: Callable[[Difference], float],
) -> Callable[[Evidence], Finding]:
    """A claim is supported, or refuted, if it is against both arms of AdamW: the larger p-value
    counts."""

    def decided(evidence: Evidence) -> Finding:
        found = runs(evidence)
        if not found.seeds:
            return Finding(NOT_RUN)
        if not found.good:
            return Finding(NOT_SHOWN, because=("a run diverged",))
        differences = measured(found, measure)
        horizons = ", ".join(f"x{factor}" for factor in found.factors)
        numbers = "; ".join(f"against {rival}: {d}" for rival, d in differences.items())
        numbers += f"; n = {len(found.seeds)}, steps {horizons}"
        if len(found.seeds) < 2:
            return Finding(NOT_SHOWN, numbers, because=(ONE_SEED,))
        every: Sequence[Difference] = list(differences.values())
        return decide(numbers, max(map(supports, every)), max(map(refutes, every)))

    return decided


def _claims() -> Iterator[Claim]:
    both = "against both arms of AdamW"
    yield Claim(
        "slower first",
        "At half of the run AdamWN has a higher validation loss than AdamW.",
        f"the 95 % interval of AdamWN minus AdamW there lies below zero, {both}",
        rule(halfway, Difference.chance_above, Difference.chance_below),
    )
    yield Claim(
        "better later",
        "At the end of the run AdamWN has a lower validation loss than AdamW.",
        f"the 95 % interval of AdamWN minus AdamW there lies above zero, {both}",
        rule(final, Difference.chance_below, Difference.chance_above),
    )
    yield Claim(
        "half the steps",
        f"AdamWN with half of the steps reaches the validation loss of AdamW, within {MARGIN:g}.",
        f"the 95 % interval of AdamWN minus AdamW with twice the steps lies above {MARGIN:g}, "
        f"{both}",
        rule(half_the_steps, lambda d: d.chance_below(MARGIN), lambda d: d.chance_above(MARGIN)),
    )
    yield Claim(
        "the gap grows",
        "With more steps AdamWN ends further below AdamW.",
        f"the 95 % interval of the change of AdamWN minus AdamW lies above zero, {both}",
        rule(growth, Difference.chance_below, Difference.chance_above),
    )


STUDY = Study(
    "budget",
    cells,
    "AdamW and AdamWN as the study settle tuned them, with one, two and four times the steps.",
    at(ADAMW, 1),
    tuple(_claims()),
)
