"""The study ``gpt2``: the paper's model, GPT-2 124M, on 200 million tokens.

AdamW, AdamC, and AdamWN with the paper's target and with a gain of 0.8, all from GPT-2's own start.
Nothing is tuned here: every setting follows by a stated rule from what ``settle`` chose at 45 M
weights. The plan is in docs/gpt2.md.

A control was added with results in view: AdamW with more decay. No claim is about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from normcontrol.lab.errors import LabError
from normcontrol.lab.studies import settle
from normcontrol.lab.studies.settled import ADAMC, ADAMW
from normcontrol.lab.studies.tuning import seeded
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import lower_loss
from normcontrol.lab.study.records import Results
from normcontrol.lab.training.config import Config, preset

PAPERS, GAIN = "AdamWN, ratio 2", "AdamWN, gain 0.8"

MORE_DECAY = {"AdamW, 3 times the decay": 3, "AdamW, 6 times the decay": 6}
"""By arm of the control."""

SEEDS = range(151, 154)
"""No study was run with them before."""


@dataclass(frozen=True)
class Plan:
    """What a scale trains, and what ``settle`` chose where its settings come from."""

    base: Config
    lr: float
    tuned: Mapping[str, tuple[float, float]]
    """By arm, the learning rate and the decay that ``settle`` chose."""
    tuned_steps: int

    def decay(self, arm: str) -> float:
        """The decay with lr * decay * steps as chosen: the timescale rule."""
        lr, decay = self.tuned[arm]
        return float(f"{decay * lr * self.tuned_steps / (self.lr * self.base.run.steps):.3g}")


def start(config: Config, steps: int) -> Config:
    """A fifth of warm-up, a cosine to a tenth, GPT-2's initial weights, ten evaluations."""
    return settle.start(config, steps, lr=0.0).with_(init_gain=None, eval_every=steps // 10)


PLANS = {
    "tiny": Plan(
        start(settle.BASES["tiny"], 600),
        6e-3,
        {ADAMW: (1.2e-2, 0.56), ADAMC: (6e-3, 0.78)},
        600,
    ),
    "small": Plan(
        start(preset("gpt2").with_(tokens_per_step=65_536, micro_batch=64), 3050),
        2e-3,
        {ADAMW: (4e-3, 0.3), ADAMC: (4e-3, 0.78)},
        800,
    ),
}
"""By scale: a rehearsal on a CPU, and GPT-2 124M on one GPU."""


def settings(plan: Plan, arm: str) -> dict[str, Any]:
    """What distinguishes an arm."""
    if arm in MORE_DECAY:
        decay = round(MORE_DECAY[arm] * plan.decay(ADAMW), 3)
        return {"optimizer": ADAMW, "weight_decay": decay}
    if arm in plan.tuned:
        return {"optimizer": arm, "weight_decay": plan.decay(arm)}
    if arm == GAIN:
        return {"optimizer": "AdamWN", "rate": 0.1, "gain": 0.8}
    return {"optimizer": "AdamWN", "rate": 0.1, "ratio": 2.0, "ramp": plan.base.run.steps // 20}


def cells(scale: str, done: Results) -> list[Cell]:
    """Seed by seed, so that whole seeds are finished whenever it is stopped; then the control."""
    if scale not in PLANS:
        raise LabError(
            f"gpt2 has no plan for the scale {scale}: small is GPT-2 124M on 200 million tokens, "
            "tiny a rehearsal, and the paper's own runs are the studies figure2 to figure4."
        )
    plan = PLANS[scale]

    def cell(arm: str, seed: int, part: str) -> Cell:
        config = plan.base.with_(lr=plan.lr, **settings(plan, arm))
        return Cell(arm, seeded(config, seed), seed, part=part)

    planned = [cell(arm, seed, "seeds") for seed in SEEDS for arm in (ADAMW, PAPERS, GAIN, ADAMC)]
    return planned + [cell(arm, SEEDS[0], "control") for arm in MORE_DECAY]


STUDY = Study(
    "gpt2",
    cells,
    "GPT-2 124M on 200 million tokens: AdamW, AdamC, and AdamWN with the paper's target and with "
    "a gain of 0.8.",
    ADAMW,
    (
        lower_loss("the paper's target", PAPERS, ADAMW),
        lower_loss("gain", GAIN, ADAMW),
        lower_loss("lower than AdamC", PAPERS, ADAMC),
    ),
)
