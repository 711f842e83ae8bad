"""The study ``muon``: Muon with its own decay and Muon under control once more, with new seeds.

In ``optimizers`` Muon under control ended below Muon on one text and not on another. This study has
the two settings that were chosen on the first text, tunes nothing, and tests one claim. A control
was added when that was decided: Muon with a lower decay at the higher learning rate. The plan, with
the number of seeds and the rule, is in docs/muon.md.
"""

from __future__ import annotations

from dataclasses import replace

from normcontrol.lab.studies.optimizers import MUON, MUON_CONTROLLED, MUON_LOWER, TUNED
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.records import Results

SEEDS = range(41, 61)
"""None of them was run before. They are run in this order, as many as there is time for."""

CHOSEN = {MUON: (2, 0.56), MUON_CONTROLLED: (4, 0.55)}
"""By arm, the multiple of the middle learning rate, and the decay or the gain, that ``optimizers``
chose at tiny."""

LESS_DECAY, DECAYS = "Muon, less decay", (0.14, 0.28)
"""The control and its decays, at the learning rate of Muon under control. ``optimizers`` tried 0.3
and more there."""


def cells(scale: str, done: Results) -> list[Cell]:
    """Pair by pair, then the control with half of the seeds."""
    tuned = TUNED[scale]
    lr = tuned.base.optim.lr
    pairs = [
        tuned.trial(arm, seed, lr * times, value, "seeds")
        for seed in SEEDS
        for arm, (times, value) in CHOSEN.items()
    ]
    times, _ = CHOSEN[MUON_CONTROLLED]
    controls = [
        replace(tuned.trial(MUON, seed, lr * times, decay, "control"), arm=LESS_DECAY)
        for seed in SEEDS[: len(SEEDS) // 2]
        for decay in DECAYS
    ]
    return pairs + controls


STUDY = Study(
    "muon",
    cells,
    "Muon with its own decay and under control as the study optimizers tuned them, with new seeds.",
    MUON,
    (replace(MUON_LOWER, name="lower"),),
)
