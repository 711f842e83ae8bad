"""The four panels of the paper's Figure 3, as one PNG and as SVGs that follow the page's light or dark colours."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")

# Stand-ins in the SVGs for colours that the page decides.
INK, FAINT = "#010203", "#040506"


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


def png(curves: list[Curve], path: Path) -> None:
    """All four panels in one picture."""
    with matplotlib.rc_context(_style("#222222", "#cccccc")):
        figure = Figure(figsize=(11, 7.2), layout="constrained")
        for ax, panel in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
            panel(ax, curves)
            ax.set_xlabel("step")
        figure.axes[0].legend(frameon=False)
        figure.savefig(path, dpi=150, facecolor="white")


def svgs(curves: list[Curve]) -> list[str]:
    """Each panel as an SVG element to put into a page; its ink is the page's own."""
    elements = []
    with matplotlib.rc_context({**_style(INK, FAINT), "svg.fonttype": "none", "svg.hashsalt": "normcontrol"}):
        for panel in PANELS:
            figure = Figure(figsize=(5.6, 3.7), layout="constrained")
            ax = figure.subplots()
            panel(ax, curves)
            ax.set_xlabel("step")
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
            text = buffer.getvalue()
            text = text[text.index("<svg") :].replace(INK, "currentColor").replace(FAINT, "var(--faint)")
            elements.append(text)
    return elements


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
