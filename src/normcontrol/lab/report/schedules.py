"""The schedules of a run before it is run: the learning rate, the target ratio r_t and the rate k_t
at every step, as a table and as a figure. It reads the config and trains nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from normcontrol.lab.own_files import without_folder
from normcontrol.lab.report.figure_files import save
from normcontrol.lab.training.config import Config, check
from normcontrol.lab.training.optimizer_names import known_name
from normcontrol.lab.training.optimizers import is_controlled, lr_at, target_at

DECAYS: dict[str, Callable[[float, float], float]] = {
    **dict.fromkeys(("AdamW", "AdamW-13a", "Muon"), lambda lr, peak: lr),
    "AdamW-13b": lambda lr, peak: lr / peak,
    "AdamW-lr2": lambda lr, peak: lr**2,
    "AdamC": lambda lr, peak: lr**2 / peak,
}
"""By optimizer, what the decay is multiplied by, given the learning rate and its peak. It is
AdamW's for the weights beside Muon's too."""


def values(config: Config, step: int) -> tuple[float, float | None, float | None]:
    """(lr, r_t, k_t) at a step. Weight decay is control with a ratio of 0. An optimizer that does
    neither has None for the last two."""
    o, lr = config.optim, lr_at(config, step)
    if is_controlled(o):
        return lr, target_at(config, step), o.rate
    decay = DECAYS.get(known_name(o.optimizer))
    return (lr, None, None) if decay is None else (lr, 0.0, o.weight_decay * decay(lr, o.lr))


def rows(config: Config) -> list[tuple[str, ...]]:
    """The schedules at the ends of warm-up and ramp, and at every tenth of the run."""
    check(config)
    steps, o = config.run.steps, config.optim
    shown = sorted(
        {
            1,
            min(o.warmup or 1, steps),
            min(o.ramp or 1, steps),
            *(max(steps * i // 10, 1) for i in range(1, 11)),
        }
    )
    return [
        (f"{step:,}", *("-" if v is None else f"{v:.4g}" for v in values(config, step)))
        for step in shown
    ]


def draw(config: Config, path: Path) -> None:
    """Draw the three schedules over the whole run."""
    check(config)
    grid = sorted({max(1, round(i * config.run.steps / 500)) for i in range(501)})
    lines = list(zip(*(values(config, step) for step in grid), strict=True))
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    names = ("learning rate", "target ratio $r_t$ (0: decay)", "rate $k_t$")
    for ax, name, line in zip(figure.subplots(1, 3), names, lines, strict=True):
        if line[0] is not None:
            ax.plot(grid, line)
            ax.set_ylim(bottom=0)
        ax.set(title=name, xlabel="step")
        ax.grid(linewidth=0.5)
    figure.suptitle(f"{without_folder(config.optim.optimizer)}, {config.run.steps:,} steps")
    save(figure, path, dpi=130)
