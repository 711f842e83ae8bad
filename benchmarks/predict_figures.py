"""Draws the figures of ``benchmarks/predict.py``: predicted against measured norms.

It reads the result that the benchmark wrote as JSON, and may not know how it was computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

BLACK, ORANGE, BLUE = "#333333", "#e08214", "#2171b5"
TITLES = {"all": "all that is decayed", "hidden matrices": "hidden matrices alone"}
"""The kinds of weights in a result, and their titles in a figure."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the curves of up to six runs, or the final norms of more runs, and save the figure."""
    import matplotlib

    matplotlib.use("Agg")
    runs, kinds = result["runs"], [kind for kind in TITLES if kind in result["runs"][0]]
    figure = curves(runs, kinds) if len(runs) <= 6 else ends(runs, kinds)
    figure.savefig(path, dpi=110)


def ends(runs: list[dict[str, Any]], kinds: list[str]) -> Any:
    """Final norms, predicted against measured, with the bounds of the calibrated prediction."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(kinds), figsize=(5.2 * len(kinds), 4.9), layout="constrained", squeeze=False
    )
    horizons = sorted({run["steps"] for run in runs}, reverse=True)
    for ax, kind in zip(axes[0], kinds, strict=True):
        for marker, steps in zip("osD^", horizons, strict=False):
            found = [run[kind] for run in runs if run["steps"] == steps]
            x = [f["measured"] for f in found]
            y = [f["calibrated"]["ratio"] for f in found]
            bars = [
                [f["calibrated"]["ratio"] - f["calibrated"]["low"] for f in found],
                [f["calibrated"]["high"] - f["calibrated"]["ratio"] for f in found],
            ]
            uncalibrated = [f["uncalibrated"]["ratio"] for f in found]
            ax.errorbar(
                x,
                y,
                yerr=bars,
                color=BLUE,
                fmt=marker,
                ms=5.5,
                elinewidth=0.8,
                alpha=0.9,
                label=f"calibrated on one run, {steps:,} steps",
            )
            ax.plot(
                x,
                uncalibrated,
                marker,
                color=ORANGE,
                mfc="none",
                ms=6.5,
                label=f"C = 1, {steps:,} steps",
            )
        low, high = ax.get_xlim()
        low, high = min(low, 0.85), high * 1.05
        ax.plot([low, high], [low, high], color=BLACK, lw=1, zorder=0)
        ticks = [tick for tick in (1, 1.5, 2, 3, 4) if low < tick < high]
        ax.set(
            xscale="log",
            yscale="log",
            xlim=(low, high),
            xlabel="measured: norm / initial norm",
            ylabel="predicted",
        )
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks], minor=False)
        ax.set_yticks([*ticks, 6], [f"{t:g}" for t in (*ticks, 6)], minor=False)
        ax.minorticks_off()
        ax.set_title(TITLES[kind], loc="left", fontsize=10.5, fontweight="bold")
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *axes[0][0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=len(horizons),
        frameon=False,
    )
    return figure


def curves(runs: list[dict[str, Any]], kinds: list[str]) -> Any:
    """Measured and predicted curves of every run, with the bounds of the prediction at the end."""
    import matplotlib.pyplot as plt

    size = (3.1 * len(runs), 2.9 * len(kinds))
    figure, axes = plt.subplots(
        len(kinds),
        len(runs),
        figsize=size,
        sharex="col",
        sharey="row",
        layout="constrained",
        squeeze=False,
    )
    for j, (row, kind) in enumerate(zip(axes, kinds, strict=True)):
        for i, (ax, run) in enumerate(zip(row, runs, strict=True)):
            found, end = run[kind], run["steps"]
            ax.plot(
                found["steps"],
                found["uncalibrated"]["curve"],
                color=ORANGE,
                lw=1.8,
                ls="--",
                label="predicted, C = 1",
            )
            ax.plot(
                found["steps"],
                found["calibrated"]["curve"],
                color=BLUE,
                lw=1.8,
                label="predicted, calibrated on the first run",
            )
            ax.plot(found["steps"], found["curve"], color=BLACK, lw=2.2, label="measured")
            for key, colour, shift in (("uncalibrated", ORANGE, 1.04), ("calibrated", BLUE, 1.09)):
                p = found[key]
                bars = [[p["ratio"] - p["low"]], [p["high"] - p["ratio"]]]
                ax.errorbar(
                    [end * shift], [p["ratio"]], yerr=bars, color=colour, fmt="o", ms=4, capsize=3
                )
            if j == 0:
                ax.set_title(
                    f"lr {run['lr']:g}, decay {run['weight_decay']:g}",
                    loc="left",
                    fontsize=10.5,
                    fontweight="bold",
                )
            if j == len(kinds) - 1:
                ax.set_xlabel("step")
            if i == 0:
                ax.set_ylabel(f"norm / initial norm\n{TITLES[kind]}")
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_xlim(0, end * 1.13)
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False
    )
    return figure
