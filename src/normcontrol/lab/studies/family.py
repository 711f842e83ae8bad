"""Published methods side by side: each with three learning rates, then the best of each with
several seeds.

Their other settings are those at which the claims expect AdamW and AdamWN to be best; CPR's bound
is the norm that AdamWN is held at, per tensor, and AdamH's steps are those that the laboratory
makes of a learning rate. What is equal is the number of trials, not how well each is known to be
tuned.
"""

from __future__ import annotations

from normcontrol.lab.studies.bases import base
from normcontrol.lab.studies.claims import RANGES, seeded
from normcontrol.lab.study.cells import Cell, Study, grid
from normcontrol.lab.study.records import Results

STEPS = {"small": 500}
"""Fewer than the scale's own, where 25 runs of those would take too long."""


def cells(scale: str, done: Results) -> list[Cell]:
    r = RANGES[scale]
    start, ratio = base(scale).with_(rate=r.rate[1]), r.ratio[1]
    start = start.with_(steps=STEPS.get(scale, start.run.steps))
    arms = {
        "AdamW": start.with_(optimizer="AdamW", weight_decay=r.weight_decay[1]),
        "AdamWN": start.with_(optimizer="AdamWN", ratio=ratio),
        "CPR-kI0": start.with_(optimizer="CPR-kI0", ratio=ratio),
        "CPR-WS": start.with_(optimizer="CPR-WS"),
        "AdamH": start.with_(optimizer="AdamH"),
    }
    grids = {arm: grid(arm, config, part="grid", lr=r.lr) for arm, config in arms.items()}
    wanted = [cell for found in grids.values() for cell in found]
    if not done.done(wanted):
        return wanted
    for found in grids.values():
        best = done.best(found)
        if best is not None:
            wanted += seeded(best, r.seeds, "seeds")
    return wanted


STUDY = Study(
    "family",
    cells,
    "AdamW, AdamWN, CPR with two of its rules, and Hyperball's AdamH, with equal trials.",
    "AdamW",
)
