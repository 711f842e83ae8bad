"""Figures as PNG and PDF: the four panels of the paper's Figure 3, and the schedules of its
Figure 1. It draws curves and does not know studies."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normcontrol import constant, paper_ratio
from normcontrol.lab.report.figure_files import save
from normcontrol.lab.report.page import COLOURS
from normcontrol.lab.text import printable, wrapped

Series = Mapping[int, float]
"""Values at steps."""

MEASURED = ("loss", "val_loss", "ratio")
"""The curves of a run that are drawn."""


INK = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor")
FAINT = ("axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
STYLE: Any = {
    **dict.fromkeys(INK, "#222222"),
    **dict.fromkeys(FAINT, "#cccccc"),
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class Curve:
    """The curves of one arm, run by run."""

    name: str
    runs: Mapping[int, Mapping[str, Series]]
    """By seed, and by what was measured."""
    target: float | None
    initial_gain: float | None = None
    """The gain of the initial weights, to which ratios refer."""

    def of(self, key: str) -> list[Series]:
        return [measured[key] for measured in self.runs.values()]

    def less(self, base: Curve) -> list[Series]:
        """The validation loss minus that of another arm, for each seed that both have."""
        pairs = [
            (self.runs[seed]["val_loss"], base.runs[seed]["val_loss"])
            for seed in self.runs
            if seed in base.runs
        ]
        return [
            {step: mine[step] - theirs[step] for step in mine if step in theirs}
            for mine, theirs in pairs
        ]


Panel = Callable[[Axes, list[Curve]], None]


def train_loss(ax: Axes, curves: list[Curve]) -> None:
    smoothed = [_smoothed(mean(curve.of("loss"))) for curve in curves]
    for i, (curve, loss) in enumerate(zip(curves, smoothed, strict=True)):
        ax.plot(
            list(loss),
            list(loss.values()),
            color=_colour(i),
            label=_shown(curve.name),
            linewidth=1.3,
        )
    ax.set_title("training loss (running mean)")
    _zoom(ax, smoothed)


def val_loss(ax: Axes, curves: list[Curve]) -> None:
    for i, curve in enumerate(curves):
        _with_range(ax, curve.of("val_loss"), i)
    seeds = max(len(curve.runs) for curve in curves)
    ax.set_title(
        "validation loss" if seeds == 1 else "validation loss (bands: lowest to highest seed)"
    )
    _zoom(ax, [mean(curve.of("val_loss")) for curve in curves])


def val_difference(ax: Axes, curves: list[Curve]) -> None:
    for i, curve in enumerate(curves):
        _with_range(ax, curve.less(curves[0]), i)
    title = f"validation loss minus that of {printable(curves[0].name)}"
    ax.set_title("\n".join(wrapped(title, 60)))


def norm_ratio(ax: Axes, curves: list[Curve]) -> None:
    for i, curve in enumerate(curves):
        ratio = mean(curve.of("ratio"))
        ax.plot(list(ratio), list(ratio.values()), color=_colour(i), linewidth=1.3)
        if curve.target is not None:
            ax.axhline(curve.target, color=_colour(i), linestyle=":", linewidth=1)
    ax.set_title("norm of the weights / initial norm (dotted: target)")
    gains = [curve.initial_gain or 0.0 for curve in curves]
    # One axis suits arms that start from the same gain, up to the seeds.
    if max(gains) - min(gains) < 0.01 * max(gains):
        unit = statistics.fmean(gains)
        functions: Any = (lambda ratio: ratio * unit, lambda gain: gain / unit)
        ax.secondary_yaxis("right", functions=functions).set_ylabel("gain")


PANELS: tuple[Panel, ...] = (train_loss, val_loss, val_difference, norm_ratio)


def draw(curves: list[Curve], *paths: Path) -> None:
    """Draw all four panels in one picture, and write it to each path: .png for screens, .pdf for
    papers."""
    # A dollar sign in a name is a dollar sign.
    with matplotlib.rc_context({**STYLE, "text.parse_math": False}):
        figure = Figure(figsize=(11, 7.2), layout="constrained")
        for ax, panel in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
            panel(ax, curves)
            ax.set_xlabel("step")
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(),
            frameon=False,
            loc="outside lower center",
            ncols=min(len(curves), 2),
        )
        _save(figure, paths)


def draw_figure_1(*paths: Path) -> None:
    """Draw the paper's Figure 1: the ratio r_t under weight decay, and one that grows to 2."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.4), layout="constrained")
        ax = figure.subplots()
        for schedule, name, colour in (
            (constant(0.0), "weight decay", _colour(0)),
            (paper_ratio(), "control", _colour(1)),
        ):
            ax.plot([schedule(step) for step in range(1, 10_001)], color=colour, label=name)
        ax.set(xlabel="step", ylabel="$r_t$: target norm / initial norm", ylim=(-0.05, 2.15))
        ax.legend(frameon=False, loc="center right")
        _save(figure, paths)


def _shown(name: str) -> str:
    """A name in lines that fit beside another one. Matplotlib leaves out names that begin with an
    underscore, so that they begin with a space."""
    text = "\n".join(wrapped(printable(name), 60))
    return f" {text}" if text.startswith("_") else text


def _save(figure: Figure, paths: tuple[Path, ...]) -> None:
    for path in paths:
        # No date in the file: the same runs give the same bytes.
        metadata = {"CreationDate": None} if path.suffix == ".pdf" else {}
        save(figure, path, dpi=150, facecolor="white", metadata=metadata)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def mean(runs: Sequence[Series]) -> Series:
    """The mean over runs, at the steps that all of them have."""
    return {step: statistics.fmean(values) for step, values in _together(runs).items()}


def _together(runs: Sequence[Series]) -> dict[int, list[float]]:
    shared = set.intersection(*(set(run) for run in runs)) if runs else set()
    return {step: [run[step] for run in runs] for step in sorted(shared)}


def _with_range(ax: Axes, runs: Sequence[Series], index: int) -> None:
    """Draw the mean over seeds as a line, and a band from the lowest to the highest run."""
    values = _together(runs)
    steps, colour = list(values), _colour(index)
    ax.plot(
        steps,
        [statistics.fmean(v) for v in values.values()],
        color=colour,
        linewidth=1.3,
        marker="o",
        markersize=2.5,
    )
    if len(runs) > 1:
        ax.fill_between(
            steps,
            [min(v) for v in values.values()],
            [max(v) for v in values.values()],
            color=colour,
            alpha=0.12,
            linewidth=0,
        )


def _smoothed(series: Series) -> Series:
    """The running mean over the last twentieth of the curve's length."""
    window = max(len(series) // 20, 1)
    sums = np.cumsum([0.0, *series.values()])
    return {
        step: float((sums[i] - sums[max(i - window, 0)]) / (i - max(i - window, 0)))
        for i, step in enumerate(series, start=1)
    }


def _zoom(ax: Axes, shown: Sequence[Series]) -> None:
    """Leave the steep start of the losses out of the picture: it would flatten all the rest."""
    finite = np.asarray([v for series in shown for v in series.values() if np.isfinite(v)])
    if len(finite) > 10:
        low, high = float(finite.min()), float(np.quantile(finite, 0.9))
        ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
