"""The paper's figures as studies: its exact settings at ``full``, the same experiments in fewer
steps at ``tiny`` and ``small``.

Shrinking an experiment keeps what determines the norm (see ``bases.shrunk``). The paper's numbers
are shown beside ours, with what differs. Figure 1 shows schedules and trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from normcontrol.lab.studies.bases import PAPER, base, shrunk
from normcontrol.lab.study.cells import Cell, Published, Study, grid
from normcontrol.lab.study.records import Results
from normcontrol.lab.training.config import Config

SHRINK = {"tiny": 100.0, "small": 100 / 3, "full": 1.0}
"""50,000 steps of the paper are 500 at `tiny` and 1,500 at `small`."""

DIFFERS = {
    "tiny": "a GPT of 0.17 M weights on the standard library of Python; 1,024 tokens a step; 100 "
    "times fewer steps",
    "small": "a GPT of 45 M weights; 65,536 tokens a step; 33 times fewer steps",
    "full": "the seed, and the data if it is not OpenWebText",
}


def at_scale(experiment: Config, scale: str) -> Config:
    """An experiment of the paper at a scale."""
    return experiment if scale == "full" else shrunk(experiment, SHRINK[scale], base(scale))


def figure1(scale: str, done: Results) -> list[Cell]:
    """The schedules of r_t: none for weight decay, a ramp to 2 for control. Nothing is trained."""
    return []


def figure2(scale: str, done: Results) -> list[Cell]:
    """AdamW with decay 0.1, and AdamWN at the norm that it ends with: in the paper, 50,000 steps of
    65,536 tokens."""
    start = PAPER.with_(steps=50_000, tokens_per_step=65_536)
    adamw = grid("AdamW wd 0.1", at_scale(start.with_(optimizer="AdamW"), scale))
    record = done.of(adamw[0])
    if record is None or not record.good:
        return adamw
    ratio = record.final["ratio"]
    return adamw + grid(
        "AdamWN at its norm", at_scale(start.with_(optimizer="AdamWN", ratio=ratio), scale)
    )


def figure3(scale: str, done: Results) -> list[Cell]:
    """AdamW with three decays, AdamWN with three ratios: in the paper, 100,000 steps of 491,520
    tokens."""
    start = PAPER.with_(steps=100_000)
    cells = []
    for decay in (0.05, 0.10, 0.15):
        cells += grid(
            f"AdamW wd {decay:g}",
            at_scale(start.with_(optimizer="AdamW", weight_decay=decay), scale),
        )
    for ratio in (2.0, 2.4, 2.8):
        cells += grid(
            f"AdamWN r {ratio:g}", at_scale(start.with_(optimizer="AdamWN", ratio=ratio), scale)
        )
    return cells


def figure4(scale: str, done: Results) -> list[Cell]:
    """AdamW with decay 0.1, and AdamWN with LayerNorm controlled too, at two ratios: in the paper,
    200,000 steps of 491,520 tokens."""
    start = PAPER.with_(steps=200_000)
    cells = grid("AdamW wd 0.1", at_scale(start.with_(optimizer="AdamW"), scale))
    for ratio in (2.0, 1.8):
        cells += grid(
            f"AdamWN r {ratio:g}, LayerNorm too",
            at_scale(start.with_(optimizer="AdamWN", ratio=ratio, norm_layers=True), scale),
        )
    return cells


def _study(
    function: Callable[[str, Results], list[Cell]], baseline: str, *published: Published
) -> Study:
    return Study(
        function.__name__,
        function,
        " ".join((function.__doc__ or "").split()),
        baseline,
        published=published,
        differs=DIFFERS,
    )


STUDIES = (
    _study(figure1, ""),
    _study(
        figure2,
        "AdamW wd 0.1",
        Published("AdamW's final norm ratio", "AdamW wd 0.1", "ratio", 2.415),
    ),
    _study(
        figure3,
        "AdamW wd 0.05",
        Published("AdamW, decay 0.1", "AdamW wd 0.1", "val_loss", 2.902),
        Published("AdamWN, ratio 2.0", "AdamWN r 2", "val_loss", 2.884),
    ),
    _study(
        figure4,
        "AdamW wd 0.1",
        Published("AdamW, decay 0.1, 200,000 steps", "AdamW wd 0.1", "val_loss", 2.88),
    ),
)
