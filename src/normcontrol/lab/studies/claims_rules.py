"""The claims that the study ``claims`` tests, each with the rule that decides it. A rule reads the
results of runs; which runs are made is decided in ``claims.py``."""

from __future__ import annotations

import math
import statistics

import torch

from normcontrol.lab.data.batches import padded
from normcontrol.lab.study.claims import (
    NOT_RUN,
    NOT_SHOWN,
    ONE_SEED,
    Claim,
    Finding,
    all_within,
    decide,
    level,
    lower,
    run_in_all,
)
from normcontrol.lab.study.comparison import choose
from normcontrol.lab.study.evidence import Evidence, Trial, difference
from normcontrol.lab.study.records import Record
from normcontrol.lab.study.statistics import (
    Difference,
    any_of,
    average,
    lowest_point,
    paired,
)
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.model import GPT, INIT_STD

ADAMW, ADAMWN, SCALED, ADAMC = "AdamW", "AdamWN", "AdamW from scaled weights", "AdamC"
SCALED_ADAMWN = "AdamWN from scaled weights"
RATE, TENSOR = "AdamWN, other rates", "AdamWN, a norm for each tensor"
LAYERNORM, OFFSET = "AdamWN, LayerNorm too", "AdamWN, constant learning rate"
FEWER = ", fewer steps"
"""The names of the arms; the last is appended to that of an arm."""

PAPERS_GAIN = 0.018
"""The difference that the paper calls substantial, 2.902 minus 2.884. Smaller ones count as
small."""


MARGIN = 0.01
"""Losses that differ by less are level."""

MOVES, STAYS = 1.2, 1.05
"""A quotient of norms that counts as a change, and one that does not."""


def rate_does_not_matter(evidence: Evidence) -> Finding:
    """Compare the lowest and the highest rate with the middle one, for which the other settings
    were chosen, in the seeds by which they were not chosen."""
    trials = sorted(evidence.trials(RATE), key=lambda t: t.setting("rate"))
    tuned = choose(evidence.trials(ADAMWN))
    if len(trials) < 3 or tuned is None:
        return Finding(NOT_RUN)
    middle = trials[1]
    fresh = [seed for seed in middle.seeds if seed not in tuned.seeds] or middle.seeds
    seeds = run_in_all(trials, fresh)
    if not seeds:
        return Finding(NOT_RUN)
    found = {t.settings: difference(t, middle, seeds=seeds) for t in trials if t is not middle}
    numbers = f"against {middle.settings}: " + "; ".join(
        f"{name} {d or 'diverged'}" for name, d in found.items()
    )
    return all_within(numbers, list(found.values()), PAPERS_GAIN)


def norm_and_learning_rate(evidence: Evidence) -> Finding:
    """Over the whole grid, the largest quotient of the final norms of runs that differ only in the
    learning rate, seed by seed: for every ratio close to one, for some decay far from it."""
    stays, moves = (
        _quotients(evidence, arm, fixed)
        for arm, fixed in ((ADAMWN, "ratio"), (ADAMW, "weight_decay"))
    )
    if not stays or not moves:
        return Finding(NOT_RUN)
    found = [*stays.values(), *moves.values()]
    numbers = (
        "largest final norm over smallest, learning rates varied: "
        f"{ADAMWN} {_factors(stays)}; {ADAMW} {_factors(moves)}; n = {min(d.n for d in found)}"
    )
    if any(d.error is None for d in found):
        return Finding(NOT_SHOWN, numbers, because=(ONE_SEED,))
    low, high = math.log(STAYS), math.log(MOVES)
    holds = (
        max(d.chance_below(low) for d in stays.values()),
        any_of([d.chance_above(high) for d in moves.values()]),
    )
    fails = [d.chance_above(low) for d in stays.values()]
    fails.append(max(d.chance_below(high) for d in moves.values()))
    return decide(numbers, max(holds), any_of(fails))


def _quotients(evidence: Evidence, arm: str, fixed: str) -> dict[float, Difference]:
    """For each value of the fixed setting, the logarithm of the largest final norm over the
    smallest, over learning rates, averaged over the seeds that all of its runs have."""
    groups: dict[float, list[Trial]] = {}
    for trial in evidence.trials(arm, "grid"):
        if all(record.good for record in trial.records):
            groups.setdefault(trial.setting(fixed), []).append(trial)
    found = {}
    for value, trials in groups.items():
        seeds = sorted(set.intersection(*(set(t.seeds) for t in trials)))
        if len(trials) > 1 and seeds:
            norms = zip(*(t.values("ratio", seeds) for t in trials), strict=True)
            found[value] = average([math.log(max(each) / min(each)) for each in norms])
    return found


def _factors(found: dict[float, Difference]) -> str:
    """Means of logarithms as factors, with the ends of their intervals."""
    words = []
    for d in found.values():
        ends = (
            ""
            if d.half is None
            else (f" ({math.exp(d.mean - d.half):.3f} to {math.exp(d.mean + d.half):.3f})")
        )
        words.append(f"{math.exp(d.mean):.3f}{ends}")
    return ", ".join(words)


def offset_law(evidence: Evidence) -> Finding:
    """Compute C from the offset of each run. By the law it is the same for all learning rates and
    rates: no C is more than twice another."""
    constants: dict[str, dict[int, float]] = {}
    for trial in evidence.trials(OFFSET):
        if all(record.good for record in trial.records):
            constants[trial.settings] = dict(
                zip(trial.seeds, map(_noise_constant, trial.records), strict=True)
            )
    if len(constants) < 3:
        return Finding(NOT_RUN)
    seeds = sorted(set.intersection(*map(set, constants.values())))
    each = {name: [found[s] for s in seeds] for name, found in constants.items()}
    numbers = "C = " + ", ".join(
        f"{average(found)} ({name})".lstrip("+") for name, found in each.items()
    )
    numbers += f"; n = {len(seeds)}"
    if len(seeds) < 2:
        return Finding(NOT_SHOWN, numbers, because=(ONE_SEED,))
    over = [
        paired(one, [2 * c for c in other])
        for name, one in each.items()
        for another, other in each.items()
        if name != another
    ]
    return decide(
        numbers,
        max(d.chance_below() for d in over),
        any_of([d.chance_above() for d in over]),
    )


def _noise_constant(record: Record) -> float:
    """Solve the balance of noise and control for C: a step adds C * lr^2 per weight to the square
    of the norm, and the control takes it away."""
    c = record.config
    steps, ratios = record.curves["ratio"]
    ratio = statistics.fmean(
        r for step, r in zip(steps, ratios, strict=True) if step > 2 * c["steps"] / 3
    )
    before = (ratio - c["rate"] * c["ratio"]) / (1 - c["rate"])
    return initial_square(record) * (before**2 - ratio**2) / c["lr"] ** 2


def initial_square(record: Record) -> float:
    """The mean square of the weights of the matrices at the start, by nanoGPT's rule."""
    config = Config().with_(
        **{
            key: value
            for key, value in record.config.items()
            if key in ("layers", "heads", "width", "context")
        }
    )
    with torch.device("meta"):
        model = GPT(config.model, padded(record.environment["data"]["vocab"]))
    sizes = [(name, p.numel()) for name, p in model.named_parameters() if p.dim() >= 2]
    square = sum(
        n * INIT_STD**2 / (2 * config.model.layers if name.endswith("c_proj.weight") else 1)
        for name, n in sizes
    )
    return square / sum(n for _, n in sizes)


def horizon(evidence: Evidence) -> Finding:
    """Compare how far the best decay and the best ratio move between the horizons, as factors of
    the norm. The norm is proportional to the root of the decay."""
    moved: dict[str, dict[int, float]] = {}
    cut_off = []
    for arm, key, power in ((ADAMW, "weight_decay", 0.5), (ADAMWN, "ratio", 1.0)):
        short, long = evidence.trials(arm + FEWER, "horizon"), evidence.trials(arm, "horizon")
        seeds = (
            set.intersection(*(set(t.seeds) for t in (*short, *long))) if short and long else set()
        )
        if len(short) < 3 or len(long) < 3 or not seeds:
            return Finding(NOT_RUN)
        cut_off += [
            key for choice in map(choose, (short, long)) if choice and key in (choice.edges() or ())
        ]
        moved[key] = {
            seed: abs(power * (_best_setting(long, key, seed) - _best_setting(short, key, seed)))
            for seed in sorted(seeds)
        }
    both = sorted(set(moved["weight_decay"]) & set(moved["ratio"]))
    found = paired([moved["weight_decay"][s] for s in both], [moved["ratio"][s] for s in both])
    decay, ratio = (
        math.exp(statistics.fmean(moved[key][s] for s in both)) for key in ("weight_decay", "ratio")
    )
    numbers = (
        f"more steps move the norm of the best decay by a factor of {decay:.3f}, the best "
        f"ratio by {ratio:.3f}; difference of the logarithms {found}, n = {found.n}"
    )
    because = [
        f"a best {key} is at the edge of those tried, so how far it moved is not known"
        for key in dict.fromkeys(cut_off)
    ]
    if found.error is None:
        return Finding(NOT_SHOWN, numbers, because=(ONE_SEED, *because))
    return decide(numbers, found.chance_above(), found.chance_below(), because)


def _best_setting(trials: list[Trial], key: str, seed: int) -> float:
    xs = [math.log(t.setting(key)) for t in trials]
    return lowest_point(xs, [t.values(seeds=[seed])[0] for t in trials])


CLAIMS = (
    Claim(
        "tuned",
        "AdamWN has a lower validation loss than AdamW when both are tuned with equal trials.",
        "the 95 % interval of the paired difference, AdamWN minus AdamW, lies above zero",
        lower(ADAMWN, ADAMW),
    ),
    Claim(
        "not the start",
        "It is not explained by the start: AdamWN beats AdamW that starts from weights scaled to "
        "AdamWN's norm, at the same learning rate.",
        "the interval of AdamWN minus AdamW from scaled weights lies above zero",
        lower(ADAMWN, SCALED, same="lr"),
    ),
    Claim(
        "only the start",
        f"It is explained by the start: AdamWN and AdamW from scaled weights are level, within "
        f"{MARGIN:g}.",
        f"the interval of the one minus the other lies beyond {MARGIN:g} to either side",
        level(ADAMWN, SCALED, MARGIN, same="lr"),
    ),
    Claim(
        "not AdamC",
        "It is not explained by decay that follows the square of the learning rate: AdamWN beats "
        "AdamC, whose decay is tuned around that with the same total, at the same learning rate.",
        "the interval of AdamWN minus AdamC lies above zero",
        lower(ADAMWN, ADAMC, same="lr"),
    ),
    Claim(
        "same freedom",
        "Started from scaled weights too, AdamWN beats AdamW started from scaled weights.",
        "the interval of the one minus the other lies above zero",
        lower(SCALED_ADAMWN, SCALED, same="lr"),
    ),
    Claim(
        "norm and learning rate",
        "The final norm does not depend on the learning rate under AdamWN, and does under AdamW.",
        "over learning rates a factor of four or more apart, the interval of AdamWN's largest "
        "final norm over its smallest lies above 1.05 at some ratio, or that of AdamW below 1.2 at "
        "every decay",
        norm_and_learning_rate,
    ),
    Claim(
        "rate",
        "The rate k does not matter much: ten times more or less changes the loss by less than "
        "what the paper gained, 0.018.",
        "the interval of a paired difference lies beyond 0.018 to either side, or a run at another "
        "rate diverges",
        rate_does_not_matter,
    ),
    Claim(
        "horizon",
        "The best decay depends on the horizon, while the best ratio does not.",
        "the interval of how far the best decay moves, minus how far the best ratio moves, lies "
        "below zero, and no best value is at the edge of those tried",
        horizon,
    ),
    Claim(
        "one norm",
        "One norm for all matrices is better than a norm for each tensor, at the same learning "
        "rate.",
        "the interval of the paired difference, global minus tensor, lies above zero",
        lower(ADAMWN, TENSOR, same="lr"),
    ),
    Claim(
        "LayerNorm",
        "Controlling the gains of LayerNorm too is worse, at the same learning rate.",
        "the interval of the paired difference, without minus with, lies above zero",
        lower(ADAMWN, LAYERNORM, same="lr"),
    ),
    Claim(
        "offset",
        "The controlled norm exceeds its target by C lr^2 / (2 k rms^2), with one C for all "
        "learning rates and rates.",
        "C, solved from runs at three pairs of constant learning rate and rate, differs by more "
        "than a factor of two: the interval of one C minus twice another lies above zero",
        offset_law,
    ),
)
