"""The study ``family``: published methods side by side. Each has three learning rates, and the best
of each several seeds.

Their other settings are those at which the study ``claims`` expects AdamW and AdamWN to be best.
The bound of CPR is the target norm of AdamWN, for each tensor; the steps of AdamH are those that
the laboratory derives from a learning rate. The number of trials is equal. Whether the methods are
equally well tuned is not known.
"""

from __future__ import annotations

from normcontrol.lab.studies.bases import base
from normcontrol.lab.studies.claims import RANGES, seeded
from normcontrol.lab.study.cells import Cell, Study, grid
from normcontrol.lab.study.claims import Claim, lower
from normcontrol.lab.study.records import Results

STEPS = {"small": 500}
"""Fewer steps than the scale's own, where 25 runs would take too long."""


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


CLAIMS = tuple(
    Claim(
        arm,
        f"{arm} has a lower validation loss than AdamW, each at the best of its learning rates.",
        f"the interval of the paired difference, {arm} minus AdamW, lies above zero",
        lower(arm, "AdamW"),
    )
    for arm in ("AdamWN", "CPR-kI0", "CPR-WS", "AdamH")
)

STUDY = Study(
    "family",
    cells,
    "AdamW, AdamWN, CPR with two of its rules, and Hyperball's AdamH, with equal trials.",
    "AdamW",
    CLAIMS,
)
