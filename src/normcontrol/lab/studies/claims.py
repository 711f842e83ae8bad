"""The study ``claims``: AdamW and AdamWN tuned with equal trials, and the controls that could
explain a difference.

Its parts come in the order of their importance, so that the finished ones are useful whenever it is
stopped: decays and ratios at the learning rate that is expected to be best; the best of each, and
the controls, with paired seeds; the other learning rates (and the seeds again, if one of them is
better); the second best with seeds, because one seed may have chosen wrongly; then the smaller
questions; and every other arm tuned with as many trials as AdamWN has at that learning rate. The
claims and their rules are in ``claims_rules.py``.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from normcontrol.lab.studies import tuning
from normcontrol.lab.studies.bases import base
from normcontrol.lab.studies.claims_rules import (
    ADAMC,
    ADAMW,
    ADAMWN,
    CLAIMS,
    FEWER,
    LAYERNORM,
    OFFSET,
    RATE,
    SCALED,
    SCALED_ADAMWN,
    TENSOR,
)
from normcontrol.lab.study.cells import Cell, Study, grid
from normcontrol.lab.study.records import Results
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.optimizers import lr_at


@dataclass(frozen=True)
class Ranges:
    """The values to try. The middle value of each is expected to be best and is run first."""

    lr: tuple[float, float, float]
    weight_decay: tuple[float, float, float]
    ratio: tuple[float, float, float]
    rate: tuple[float, float, float]
    """The middle one is the rate of all other runs."""
    seeds: tuple[int, ...]
    more: tuple[int, ...]
    """The seeds of the parts after "start", and of every trial in the end."""
    fewer_steps: int
    """The horizon that the scale's own is compared with."""


# At small: lr / weight_decay as in the paper (1e-2) would be a decay of 0.2 at the middle learning
# rate. Short runs need more, and a factor of three to either side should contain the optimum. The
# ratios are a factor of 1.25 around the norms that such decays lead to. The paper's rate of 1e-2,
# times its 100,000 steps over ours, would be 0.67: the rates are 0.1, and ten times more and less.
# At tiny, GPT-2's initial weights are small for the narrow network: all but the rate is larger.
RANGES = {
    "tiny": Ranges(
        (1e-3, 3e-3, 8e-3),
        (0.3, 1.0, 3.0),
        (3.0, 5.0, 8.0),
        (1e-2, 1e-1, 1.0),
        (0, 1, 2, 3, 4),
        (0, 1, 2, 3, 4),
        500,
    ),
    "small": Ranges(
        (1e-3, 2e-3, 4e-3),
        (0.1, 0.3, 1.0),
        (1.3, 1.6, 2.0),
        (1e-2, 1e-1, 1.0),
        (0, 1, 2),
        (0,),
        500,
    ),
    "full": Ranges(
        (5e-4, 1e-3, 2e-3),
        (0.05, 0.1, 0.15),
        (2.0, 2.4, 2.8),
        (1e-3, 1e-2, 1e-1),
        (0, 1, 2),
        (0,),
        50_000,
    ),
}


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that are known by now."""
    r = RANGES[scale]
    wanted = row(scale, r.lr[1])
    if not done.done(wanted):
        return wanted
    wanted += edges(wanted, done)
    if not done.done(wanted):
        return wanted
    tried = {
        arm: tuple(sorted(c.settings[-1][1] for c in wanted if c.arm == arm))
        for arm in (ADAMW, ADAMWN)
    }
    first = best(wanted, done)
    wanted += compared(r, *first)
    rest = row(scale, r.lr[0]) + row(scale, r.lr[2])
    wanted += rest
    if not done.done(rest):
        return wanted
    tried_once = [c for c in wanted if c.part in ("grid", "edges")]
    adamw, adamwn = best(tried_once, done)
    if (adamw, adamwn) != first:
        wanted += compared(r, adamw, adamwn)
    for second in best([c for c in tried_once if c not in (adamw, adamwn)], done):
        wanted += seeded(second, r.seeds, "seconds")
    for rate in (r.rate[0], r.rate[2], r.rate[1]):
        wanted += grid(RATE, adamwn.config, part="rate", rate=[rate], seeds=r.more)
    wanted += seeded(scaled_adamwn(adamwn), r.seeds, "start")
    wanted += horizons(
        r, adamw.config, adamwn.config, decays=tried[ADAMW], ratios=tried[ADAMWN], done=done
    )
    trials = len({c.trial for c in wanted if _same_rate(c, adamwn)})
    for arm, part in others(adamw, adamwn).items():
        first_seeds = r.seeds[:1] if part == "controls" else r.more
        wanted += tuned(arm, part, trials, first_seeds, r, done)
    wanted += offsets(r, adamwn)
    return wanted + [c for cell in tried_once for c in seeded(cell, r.more, cell.part)]


def row(scale: str, lr: float) -> list[Cell]:
    """At one learning rate: AdamW over decays, and AdamWN over as many ratios."""
    start, r = base(scale).with_(rate=RANGES[scale].rate[1]), RANGES[scale]
    adamw = grid(
        ADAMW, start.with_(optimizer="AdamW"), part="grid", lr=[lr], weight_decay=r.weight_decay
    )
    return adamw + grid(
        ADAMWN, start.with_(optimizer="AdamWN"), part="grid", lr=[lr], ratio=r.ratio
    )


def edges(cells: list[Cell], done: Results) -> list[Cell]:
    """One more value for each arm, beyond the edge or beside the best, if the best of one arm is at
    the edge of those tried."""
    tried = {arm: [c for c in cells if c.arm == arm] for arm in (ADAMW, ADAMWN)}
    more, at_an_edge = [], False
    for arm, own in tried.items():
        next_one = one_more(own, done)
        at_an_edge |= next_one.beyond
        axes: dict[str, Any] = {
            "lr": [own[0].config.optim.lr],
            own[0].settings[-1][0]: [next_one.value],
        }
        more += grid(arm, own[0].config, part="edges", **axes)
    return more if at_an_edge else []


class Next(NamedTuple):
    """A value to try next."""

    value: float
    beyond: bool
    """It is beyond the values tried before."""


def one_more(cells: list[Cell], done: Results) -> Next:
    """The next value of the last setting: beyond the best value if that is at an edge, else beside
    it. The best is chosen by losses averaged over seeds."""
    found: dict[float, list[float]] = {}
    for c in cells:
        found.setdefault(c.settings[-1][1], []).append(
            record.value() if (record := done.of(c)) else math.inf
        )
    losses = {value: statistics.fmean(of_seeds) for value, of_seeds in found.items()}
    values = sorted(losses)
    place = values.index(min(losses, key=lambda v: losses[v]))
    if place in (0, len(values) - 1):
        return Next(float(f"{values[place] ** 2 / values[1 if place == 0 else -2]:.3g}"), True)
    neighbour = min(values[place - 1], values[place + 1], key=lambda v: losses[v])
    return Next(float(f"{math.sqrt(values[place] * neighbour):.3g}"), False)


def best(cells: list[Cell], done: Results) -> tuple[Cell, Cell]:
    """The best cell of each of the two arms; all cells must be done."""
    adamw, adamwn = (done.best([c for c in cells if c.arm == arm]) for arm in (ADAMW, ADAMWN))
    assert adamw is not None
    assert adamwn is not None
    return adamw, adamwn


def compared(r: Ranges, adamw: Cell, adamwn: Cell) -> list[Cell]:
    """The best of each arm and the two controls, with every seed."""
    four = (adamw, adamwn, scaled(adamw, adamwn), same_total_decay(adamw))
    return [c for seed in r.seeds for cell in four for c in seeded(cell, (seed,), "seeds")]


def horizons(
    r: Ranges,
    adamw: Config,
    adamwn: Config,
    decays: tuple[float, ...],
    ratios: tuple[float, ...],
    done: Results,
) -> list[Cell]:
    """Decays and ratios with fewer steps, at the same warm-up and ramp, and with as many as before,
    to see whether the best of them change.

    If a best value is at an edge it may not be the best. Each arm then gets one more value, at most
    twice.
    """
    wanted: list[Cell] = []
    same: dict[str, Any] = {"part": "horizon", "seeds": r.more}
    for _ in range(3):
        wanted += grid(
            f"{ADAMW}{FEWER}", adamw.with_(steps=r.fewer_steps), weight_decay=decays, **same
        )
        wanted += grid(f"{ADAMWN}{FEWER}", adamwn.with_(steps=r.fewer_steps), ratio=ratios, **same)
        wanted += grid(ADAMW, adamw, lr=[adamw.optim.lr], weight_decay=decays, **same)
        wanted += grid(ADAMWN, adamwn, lr=[adamwn.optim.lr], ratio=ratios, **same)
        if not done.done(wanted):
            break
        decay, ratio = (
            max(
                (
                    one_more([c for c in wanted if c.arm == arm + which], done)
                    for which in (FEWER, "")
                ),
                key=lambda found: found.beyond,
            )
            for arm in (ADAMW, ADAMWN)
        )
        if not (decay.beyond or ratio.beyond):
            break
        decays, ratios = (decay.value,), (ratio.value,)
    return wanted


def _same_rate(cell: Cell, best: Cell) -> bool:
    """True for a cell of the same arm at the same learning rate."""
    return cell.arm == best.arm and cell.config.optim.lr == best.config.optim.lr


def others(adamw: Cell, adamwn: Cell) -> dict[Cell, str]:
    """The arms beside the two at the settings of the best of those, and their parts: the controls,
    a norm for each tensor, and LayerNorm controlled."""
    ratio = (("ratio", adamwn.config.optim.ratio),)
    return {
        scaled(adamw, adamwn): "controls",
        same_total_decay(adamw): "controls",
        scaled_adamwn(adamwn): "controls",
        Cell(TENSOR, adamwn.config.with_(scope="tensor"), settings=ratio): "scope",
        Cell(LAYERNORM, adamwn.config.with_(norm_layers=True), settings=ratio): "layernorm",
    }


def tuned(
    arm: Cell, part: str, trials: int, seeds: tuple[int, ...], r: Ranges, done: Results
) -> list[Cell]:
    """An arm tuned in its last setting with some seeds, and its best with every seed.

    The value that it starts from and those around it, then one more at a time: as many as AdamWN
    has, and at most two more while the best is at an edge. A best value that is not at an edge gets
    every seed at once.
    """
    key, value = arm.settings[-1]
    axes: dict[str, Any] = {name: [given] for name, given in arm.settings}
    around = r.ratio if key == "ratio" else (value * (1 / 3), value * 3.0)
    values = list(dict.fromkeys((value, *around)))
    tried: list[Cell] = []
    more: list[Cell] = []
    while values:
        tried += grid(arm.arm, arm.config, part=part, seeds=seeds, **{**axes, key: values})
        best = done.best(tried)
        if not done.done(tried) or best is None:
            break
        found, count = one_more(tried, done), len(tried) // len(seeds)
        wanted = count < trials or (found.beyond and count < trials + 2)
        if not (wanted and found.beyond):
            more += seeded(best, r.seeds, part)
        values = [found.value] if wanted else []
    return tried + more


def offsets(r: Ranges, adamwn: Cell) -> list[Cell]:
    """How far the norm is from its target, at constant learning rates."""
    best, found = adamwn.config, []
    steps = max(best.run.steps // 3, 10 * best.optim.ramp)
    constant = best.with_(
        schedule="wsd",
        min_lr=1.0,
        steps=steps,
        eval_every=steps,
        ratio=r.ratio[1],
        ramp=best.optim.ramp,
    )
    for lr, rate in ((r.lr[0], r.rate[1]), (r.lr[1], r.rate[1]), (r.lr[1], r.rate[1] / 5)):
        found += grid(OFFSET, constant, part="offset", lr=[lr], rate=[rate], seeds=r.more)
    return found


def seeded(cell: Cell, seeds: tuple[int, ...], part: str) -> list[Cell]:
    """The cell with each seed."""
    return [replace(cell, config=tuning.seeded(cell.config, s), seed=s, part=part) for s in seeds]


def scaled(adamw: Cell, adamwn: Cell) -> Cell:
    """The first control: the best AdamW, started from weights with the target norm of the best
    AdamWN."""
    norm = float(adamwn.config.optim.ratio or 1)
    return Cell(
        SCALED,
        adamw.config.with_(init_scale=norm),
        settings=(("init_scale", norm), *adamw.settings),
    )


def scaled_adamwn(adamwn: Cell) -> Cell:
    """The best AdamWN started like the control: at its target norm from the first step on."""
    ratio = float(adamwn.config.optim.ratio or 1)
    return Cell(
        SCALED_ADAMWN,
        adamwn.config.with_(init_scale=ratio, ratio_start=ratio),
        settings=adamwn.settings,
    )


def same_total_decay(adamw: Cell) -> Cell:
    """The second control: AdamC, with the decay for which the sum of its decays over all steps is
    that of the best AdamW."""
    o = adamw.config.optim
    rates = [lr_at(adamw.config, step) for step in range(1, adamw.config.run.steps + 1)]
    decay = round(o.weight_decay * sum(rates) / (sum(lr * lr for lr in rates) / o.lr), 4)
    return Cell(
        ADAMC,
        adamw.config.with_(optimizer="AdamC", weight_decay=decay),
        settings=(("lr", o.lr), ("weight_decay", decay)),
    )


STUDY = Study(
    "claims",
    cells,
    "AdamW and AdamWN, each tuned with equal trials, the controls that could explain a difference, "
    "and every claim about weight norm "
    "control with the rule that would refute it.",
    ADAMW,
    CLAIMS,
)
