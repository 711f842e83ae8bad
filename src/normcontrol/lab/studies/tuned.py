"""Does AdamWN beat AdamW when both are tuned, and what else could explain it? The study behind the results page.

In parts, the most telling first, so that what is finished is of use whenever it is stopped: a grid for each of the two
with equal trials; the best of each and two controls with paired seeds; the rate; the start; another horizon; the controls tuned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from normcontrol.lab import optim
from normcontrol.lab.config import Config
from normcontrol.lab.results import Results
from normcontrol.lab.studies.bases import base
from normcontrol.lab.study import Cell, Study, grid

ADAMW, ADAMWN, SCALED, ADAMC, HELD = "AdamW", "AdamWN", "AdamW from scaled weights", "AdamC", "AdamWN from scaled weights"


@dataclass(frozen=True)
class Ranges:
    """What is tried: the middle value of each is the one expected to be best, and is run first."""

    lr: tuple[float, ...]
    weight_decay: tuple[float, ...]
    ratio: tuple[float, ...]
    rate: tuple[float, ...]
    """The middle one is that of all other runs."""
    seeds: tuple[int, ...] = (0, 1, 2)


# Decays: lr / weight_decay as in the paper (1e-2) would be 0.2 at the middle learning rate; short runs like more, and a
# factor of three to either side must hold the optimum. Ratios: a factor of 1.25 around what the recursion for AdamW's norm
# leaves at such decays. Rates: the paper's 1e-2 times 100,000 steps over ours would be 0.67; a tenth of 1 and around it.
RANGES = {
    "tiny": Ranges((4e-3, 8e-3, 16e-3), (0.1, 0.3, 1.0), (2.5, 3.5, 5.0), (1e-2, 1e-1, 1.0), (0, 1, 2, 3, 4)),
    "small": Ranges((1e-3, 2e-3, 4e-3), (0.1, 0.3, 1.0), (1.3, 1.6, 2.0), (1e-2, 1e-1, 1.0)),
    "full": Ranges((5e-4, 1e-3, 2e-3), (0.05, 0.1, 0.15), (2.0, 2.4, 2.8), (1e-3, 1e-2, 1e-1)),
}


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now."""
    wanted = grids(scale)
    adamw = done.best([c for c in wanted if c.arm == ADAMW])
    adamwn = done.best([c for c in wanted if c.arm == ADAMWN])
    if adamw is None or adamwn is None or not done.done(wanted):
        return wanted
    seeds, rates = RANGES[scale].seeds, RANGES[scale].rate
    adamc = _same_total_decay(adamw.config)
    wanted += [c for cell in (adamw, adamwn, _scaled(adamw, adamwn), adamc_cell(adamc)) for c in _seeded(cell, seeds, "seeds")]
    wanted += grid("AdamWN, rate", adamwn.config, part="rate", rate=rates)
    wanted += _seeded(_held(adamwn), seeds, "start")
    wanted += horizon(scale, adamw.config, adamwn.config)
    decay = adamw.config.optim.weight_decay
    wanted += grid(SCALED, _scaled(adamw, adamwn).config, part="controls", weight_decay=[decay / 3, decay, decay * 3])
    wanted += grid(ADAMC, adamc, part="controls", weight_decay=[c * adamc.optim.weight_decay for c in (1 / 3, 1.0, 3.0)])
    return wanted


def grids(scale: str) -> list[Cell]:
    """AdamW over learning rates and decays, AdamWN over the same learning rates and as many ratios; the middle rate first."""
    start, r = base(scale).with_(rate=RANGES[scale].rate[1]), RANGES[scale]
    found = []
    for lr in (r.lr[1], r.lr[0], r.lr[2]):
        found += grid(ADAMW, start.with_(optimizer="AdamW"), part="grid", lr=[lr], weight_decay=r.weight_decay)
        found += grid(ADAMWN, start.with_(optimizer="AdamWN"), part="grid", lr=[lr], ratio=r.ratio)
    return found


def horizon(scale: str, adamw: Config, adamwn: Config) -> list[Cell]:
    """Half as many steps, warm-up and ramp: does the best decay change, and does the best ratio?"""
    r, half = RANGES[scale], {}
    for key in ("steps", "warmup", "ramp"):
        half[key] = adamw.flat()[key] // 2
    first = grid("AdamW, half the steps", adamw.with_(**half), part="horizon", weight_decay=r.weight_decay)
    return first + grid("AdamWN, half the steps", adamwn.with_(**half), part="horizon", ratio=r.ratio)


def _seeded(cell: Cell, seeds: tuple[int, ...], part: str) -> list[Cell]:
    """The cell with each seed; those that were run in the grid keep that place."""
    return [replace(cell, config=cell.config.with_(init_seed=s, data_seed=s, dropout_seed=s), seed=s, part=part) for s in seeds]


def _scaled(adamw: Cell, adamwn: Cell) -> Cell:
    """The first control: the best AdamW, started from weights of the norm that the best AdamWN is held at."""
    return Cell(SCALED, adamw.config.with_(init_scale=float(adamwn.config.optim.ratio or 1)), settings=adamw.settings)


def _held(adamwn: Cell) -> Cell:
    """The best AdamWN with the same freedom as the control: its target norm from the first step on."""
    ratio = float(adamwn.config.optim.ratio or 1)
    return Cell(HELD, adamwn.config.with_(init_scale=ratio, ratio_start=ratio), settings=adamwn.settings)


def adamc_cell(config: Config) -> Cell:
    return Cell(ADAMC, config, settings=(("lr", config.optim.lr), ("weight_decay", config.optim.weight_decay)))


def _same_total_decay(adamw: Config) -> Config:
    """The second control: AdamC with the decay that makes the sum of its decays that of the best AdamW."""
    rates = [optim.lr_at(adamw, step) for step in range(1, adamw.run.steps + 1)]
    more = sum(rates) / (sum(lr * lr for lr in rates) / adamw.optim.lr)
    return adamw.with_(optimizer="AdamC", weight_decay=round(adamw.optim.weight_decay * more, 4))


STUDY = Study("tuned", cells, "AdamW and AdamWN, each tuned with equal trials, and the controls that could explain the difference.", ADAMW)
