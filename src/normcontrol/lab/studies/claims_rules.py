"""The claims that the study ``claims`` tests, each with the rule that decides it. A rule reads the
results of runs; which runs are made is decided in ``claims.py``."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch

from normcontrol.lab.data.batches import padded
from normcontrol.lab.study.claims import (
    NOT_RUN,
    NOT_SHOWN,
    REFUTED,
    SUPPORTED,
    Claim,
    Finding,
    lower,
)
from normcontrol.lab.study.evidence import Evidence, Trial, difference, edges_of
from normcontrol.lab.study.records import Record
from normcontrol.lab.study.statistics import lowest_point, paired
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


def rate_does_not_matter(evidence: Evidence) -> Finding:
    """Compare the lowest and the highest rate with the middle one."""
    trials = sorted(evidence.trials(RATE), key=lambda t: t.setting("rate"))
    if len(trials) < 3:
        return Finding(NOT_RUN)
    middle = trials[1]
    found = [(t.settings, difference(t, middle)) for t in trials if t is not middle]
    numbers = f"against {middle.settings}: " + "; ".join(
        f"{name} {d or 'diverged'}" for name, d in found
    )
    if any(d is None for _, d in found):
        return Finding(REFUTED, numbers)
    sizes = [(abs(d.mean), d.half) for _, d in found if d is not None]
    if any(half is None for _, half in sizes):
        return Finding(NOT_SHOWN, numbers + ": one seed has no interval")
    if any(mean - (half or 0) > PAPERS_GAIN for mean, half in sizes):
        return Finding(REFUTED, numbers)
    return Finding(
        SUPPORTED if all(mean + (half or 0) < PAPERS_GAIN for mean, half in sizes) else NOT_SHOWN,
        numbers,
    )


def norm_and_learning_rate(evidence: Evidence) -> Finding:
    """Over the whole grid, the largest quotient of the final norms of runs that differ only in the
    learning rate."""
    spreads = {}
    for arm, fixed in ((ADAMW, "weight_decay"), (ADAMWN, "ratio")):
        groups: dict[Any, list[float]] = {}
        for trial in evidence.trials(arm, "grid"):
            if all(record.good for record in trial.records):
                groups.setdefault(trial.setting(fixed), []).append(trial.mean("ratio"))
        spreads[arm] = [max(norms) / min(norms) for norms in groups.values() if len(norms) >= 2]
        if not spreads[arm]:
            return Finding(NOT_RUN)
    numbers = "; ".join(
        f"{arm} {', '.join(f'{s:.3f}' for s in found)}" for arm, found in spreads.items()
    )
    seeds = min(len(trial.seeds) for arm in spreads for trial in evidence.trials(arm, "grid"))
    numbers = f"largest final norm over smallest, learning rates varied: {numbers}; n = {seeds}"
    controlled, free = max(spreads[ADAMWN]), max(spreads[ADAMW])
    return Finding(REFUTED if controlled > 1.05 or free < 1.2 else SUPPORTED, numbers)


def offset_law(evidence: Evidence) -> Finding:
    """Compute C from the offset of each trial, averaged over its seeds. By the law it is the same
    for all learning rates and rates."""
    constants = {}
    for trial in evidence.trials(OFFSET):
        if found := [_noise_constant(record) for record in trial.records if record.good]:
            constants[trial.settings] = found
    if len(constants) < 3:
        return Finding(NOT_RUN)
    means = {name: statistics.fmean(found) for name, found in constants.items()}
    seeds = min(len(found) for found in constants.values())
    each = (f"{means[name]:.2f} ({name}{_from_to(found)})" for name, found in constants.items())
    numbers = f"C = {', '.join(each)}; n = {seeds}"
    low, high = min(means.values()), max(means.values())
    return Finding(REFUTED if low <= 0 or high / low > 2 else SUPPORTED, numbers)


def _from_to(found: list[float]) -> str:
    return f", {min(found):.2f} to {max(found):.2f}" if len(found) > 1 else ""


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
        cut_off += [key for trials in (short, long) if key in (edges_of(trials) or ())]
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
        f"ratio by {ratio:.3f} (n = {found.n})"
    )
    if cut_off:
        return Finding(
            NOT_SHOWN,
            f"{numbers}; but a best {cut_off[0]} is at the edge of those tried, so how far it "
            "moved is not known",
        )
    if found.half is None:
        return Finding(NOT_SHOWN, numbers + ": one seed has no interval")
    return Finding(SUPPORTED if found.above else REFUTED if found.below else NOT_SHOWN, numbers)


def _best_setting(trials: list[Trial], key: str, seed: int) -> float:
    xs = [math.log(t.setting(key)) for t in trials]
    return lowest_point(xs, [t.values(seeds=[seed])[0] for t in trials])


CLAIMS = (
    Claim(
        "tuned",
        "AdamWN has a lower validation loss than AdamW when both are tuned with equal trials.",
        "the 95 % interval of the paired difference, best AdamWN minus best AdamW, lies above zero",
        lower(ADAMWN, ADAMW),
    ),
    Claim(
        "not the start",
        "It is not explained by the start: AdamWN beats AdamW that starts from weights scaled to "
        "AdamWN's norm.",
        "the interval of AdamWN minus AdamW from scaled weights lies above zero",
        lower(ADAMWN, SCALED),
    ),
    Claim(
        "not AdamC",
        "It is not explained by decay that follows the square of the learning rate: AdamWN beats "
        "AdamC with the same total decay.",
        "the interval of AdamWN minus AdamC lies above zero",
        lower(ADAMWN, ADAMC),
    ),
    Claim(
        "same freedom",
        "Started from scaled weights too, AdamWN beats AdamW started from scaled weights.",
        "the interval of the one minus the other lies above zero",
        lower(SCALED_ADAMWN, SCALED),
    ),
    Claim(
        "norm and learning rate",
        "The final norm does not depend on the learning rate under AdamWN, and does under AdamW.",
        "learning rates a factor of four apart move AdamWN's final norm by more than 5 %, or "
        "AdamW's by less than 20 % at every decay",
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
        "below zero, and no best value is at the "
        "edge of those tried",
        horizon,
    ),
    Claim(
        "one norm",
        "One norm for all matrices is better than the same ratio for each tensor.",
        "the interval of the paired difference, global minus tensor, lies above zero",
        lower(ADAMWN, TENSOR, same="ratio"),
    ),
    Claim(
        "LayerNorm",
        "Controlling the gains of LayerNorm too is worse.",
        "the interval of the paired difference, without minus with, lies above zero",
        lower(ADAMWN, LAYERNORM),
    ),
    Claim(
        "offset",
        "The controlled norm exceeds its target by C lr^2 / (2 k rms^2), with one C for all "
        "learning rates and rates.",
        "C, solved from runs at three pairs of constant learning rate and rate, differs by more "
        "than a factor of two",
        offset_law,
    ),
)
