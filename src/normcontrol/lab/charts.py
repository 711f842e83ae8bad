"""The four panels of the paper's Figure 3, and its Figure 1, as PNG and PDF."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normcontrol import constant, linear
from normcontrol.lab.page import COLOURS


@dataclass(frozen=True)
class Curve:
    """What one arm did, averaged over its seeds: values at steps."""

    name: str
    train: tuple[list[int], list[float]]
    val: tuple[list[int], list[float]]
    ratio: tuple[list[int], list[float]]
    target: float | None


Panel = Callable[[Axes, list[Curve]], None]


def train_loss(ax: Axes, curves: list[Curve]) -> None:
    for i, curve in enumerate(curves):
        steps, loss = curve.train
        ax.plot(steps, _smoothed(loss), color=_colour(i), label=curve.name, linewidth=1.3)
    ax.set_title("training loss (running mean)")
    _zoom(ax, [value for curve in curves for value in _smoothed(curve.train[1])])


def val_loss(ax: Axes, curves: list[Curve]) -> None:
    for i, curve in enumerate(curves):
        ax.plot(*curve.val, color=_colour(i), label=curve.name, linewidth=1.3, marker="o", markersize=2.5)
    ax.set_title("validation loss")
    _zoom(ax, [value for curve in curves for value in curve.val[1]])


def val_difference(ax: Axes, curves: list[Curve]) -> None:
    base = dict(zip(*curves[0].val, strict=True))
    for i, curve in enumerate(curves):
        shared = [(step, value - base[step]) for step, value in zip(*curve.val, strict=True) if step in base]
        ax.plot(*zip(*shared, strict=True), color=_colour(i), label=curve.name, linewidth=1.3, marker="o", markersize=2.5)
    ax.set_title(f"validation loss minus that of {curves[0].name}")


def norm_ratio(ax: Axes, curves: list[Curve]) -> None:
    for i, curve in enumerate(curves):
        ax.plot(*curve.ratio, color=_colour(i), label=curve.name, linewidth=1.3)
        if curve.target is not None:
            ax.axhline(curve.target, color=_colour(i), linestyle=":", linewidth=1)
    ax.set_title("norm of the weights / initial norm (dotted: target)")


PANELS: tuple[Panel, ...] = (train_loss, val_loss, val_difference, norm_ratio)


def figures(curves: list[Curve], *paths: Path) -> None:
    """All four panels in one picture, written once for each path: .png for screens, .pdf for papers."""
    with matplotlib.rc_context(_style("#222222", "#cccccc")):
        figure = Figure(figsize=(11, 7.2), layout="constrained")
        for ax, panel in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
            panel(ax, curves)
            ax.set_xlabel("step")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=min(len(curves), 2))
        _save(figure, paths)


def schedules(*paths: Path) -> None:
    """The paper's Figure 1: the ratio r_t under weight decay, and one that grows to 2 and stays."""
    with matplotlib.rc_context(_style("#222222", "#cccccc")):
        figure = Figure(figsize=(5.6, 3.4), layout="constrained")
        ax = figure.subplots()
        for schedule, name, colour in ((constant(0.0), "weight decay", _colour(0)), (linear(1.0, 2.0, steps=2500), "control", _colour(1))):
            ax.plot([schedule(step) for step in range(1, 10_001)], color=colour, label=name)
        ax.set(xlabel="step", ylabel="$r_t$: target norm / initial norm", ylim=(-0.05, 2.15))
        ax.legend(frameon=False, loc="center right")
        _save(figure, paths)


def _save(figure: Figure, paths: tuple[Path, ...]) -> None:
    for path in paths:
        # No date in the file: the same runs give the same bytes.
        figure.savefig(path, dpi=150, facecolor="white", metadata={"CreationDate": None} if path.suffix == ".pdf" else {})


def _style(ink: str, faint: str) -> Any:
    ink_keys = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor")
    faint_keys = ("axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    return {
        **dict.fromkeys(ink_keys, ink),
        **dict.fromkeys(faint_keys, faint),
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.grid": True,
        "grid.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _smoothed(values: list[float]) -> list[float]:
    """The running mean over the last twentieth of the curve's length."""
    window = max(len(values) // 20, 1)
    sums = np.cumsum([0.0, *values])
    return [float((sums[i] - sums[max(i - window, 0)]) / (i - max(i - window, 0))) for i in range(1, len(values) + 1)]


def _zoom(ax: Axes, values: list[float]) -> None:
    """Show the part of the losses that matters: the steep start would flatten all the rest."""
    finite = np.asarray([v for v in values if np.isfinite(v)])
    if len(finite) > 10:
        low, high = float(finite.min()), float(np.quantile(finite, 0.9))
        ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
