"""The norm that AdamW is predicted to reach against the norm that it reaches, for four pairs of
learning rate and decay.

Without ``--runs`` it trains them (finished ones are not trained again); with it, it reads AdamW
runs that the laboratory has made: their folders, or those of studies. Predicted twice: with no
constant (C = 1), and with constants calibrated on the first run alone. ``--draw`` draws the figure
of an earlier result.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from normcontrol import predict
from normcontrol.groups.classes import TensorClass, classes_of
from normcontrol.lab.data.batches import padded
from normcontrol.lab.files import read_json
from normcontrol.lab.study.records import CELLS, Record, read, summarise
from normcontrol.lab.training import metrics
from normcontrol.lab.training import optimizers as optim
from normcontrol.lab.training.config import Config, preset
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.model import GPT
from normcontrol.lab.training.run_folder import CONFIG, ENVIRONMENT, revision
from normcontrol.lab.training.telemetry import PREFIX
from normcontrol.watch.trace import ClassTrace

FACTORS = ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (0.5, 2.0))
"""The four pairs, as multiples of the preset's learning rate and decay. The first is the one that
is calibrated on."""
TIED = ("wte.weight",)
"""nanoGPT's head is its embedding; the laboratory's model uses it by hand."""
NAMES = {"all": "all that is decayed", "hidden matrices": "hidden matrices alone"}
KINDS = tuple(NAMES)


def finished(folder: Path, config: Config) -> bool:
    """True if the folder holds a run with exactly this config that has made its last step."""
    if not (folder / CONFIG).exists():
        return False
    lines = metrics.read(folder)
    done = bool(lines) and lines[-1]["step"] == config.run.steps and "val_loss" in lines[-1]
    return done and Config.load(folder / CONFIG) == config


def records(path: Path) -> list[Record]:
    """The finished AdamW runs in a run's folder, a study's folder (one seed of each, longest
    first), or the file of a study's cell."""
    if (path / CONFIG).exists():
        config = Config.load(path / CONFIG)
        if not finished(path, config):
            raise SystemExit(f"{path} is not finished: its norm at the end is not known.")
        found = [
            summarise(str(path), config, read_json(path / ENVIRONMENT), metrics.read(path), 0.0)
        ]
    else:
        files = sorted((path / CELLS).glob("*.jsonl")) if path.is_dir() else [path]
        found = [record for record in map(read, files) if record.good]
        if path.is_dir():  # a scaled start is a study's control
            found = [record for record in found if record.config["init_scale"] == 1]
    kept = [
        r for r in found if r.config["optimizer"].lower() == "adamw" and r.config["ratio"] is None
    ]
    if not kept:
        raise SystemExit(
            f"{path} holds no finished run of AdamW, and other methods' norms are not predicted by "
            "this. Give one that does."
        )
    first = min(r.config["init_seed"] for r in kept)
    return sorted(
        (r for r in kept if r.config["init_seed"] == first),
        key=lambda r: (-r.config["steps"], -r.config["lr"], -r.config["weight_decay"]),
    )


class Run:
    """A finished AdamW run: its config, its weights at the start by class, and the norms that it
    had."""

    def __init__(self, record: Record) -> None:
        self.config = Config().with_(
            **{key: tuple(v) if isinstance(v, list) else v for key, v in record.config.items()}
        )
        self.lrs = [optim.lr_at(self.config, step) for step in range(1, self.config.run.steps + 1)]
        self.decay = self.config.optim.weight_decay
        self.classes = self._classes(record.environment["data"]["vocab"])
        self.ratios = dict(zip(*record.curves["ratio"], strict=True))
        self.norms: dict[int, dict[str, float]] = {}
        for key, (steps, values) in record.curves.items():
            if key.startswith(PREFIX):
                for step, value in zip(steps, values, strict=True):
                    self.norms.setdefault(step, {})[key[len(PREFIX) :]] = value

    def _classes(self, vocab: int) -> list[TensorClass]:
        model = GPT(self.config.model, padded(vocab))
        model.initialise(self.config.model.init_seed)
        torch._foreach_mul_([p.data for p in model.matrices()], self.config.model.init_scale)
        return classes_of(model, TIED)

    def trace(self) -> dict[str, ClassTrace]:
        """The run as predict.calibrate takes it: by class, or all together where the metrics have
        no norms of classes."""
        kept, noise = (
            x.tolist()
            for x in predict.walk(self.lrs, predict.decays("AdamW", self.lrs, self.decay))
        )
        if self.norms:
            steps, counts = sorted(self.norms), {c.name: c.count for c in self.classes}
            norms = {name: [self.norms[s][name] for s in steps] for name in counts}
        else:
            steps, counts = sorted(self.ratios), {predict.ALL: sum(c.count for c in self.classes)}
            start = math.sqrt(sum(c.count * c.rms**2 for c in self.classes))
            norms = {
                predict.ALL: [start * self.ratios[s] / self.config.model.init_scale for s in steps]
            }
        return {
            n: ClassTrace(counts[n], norms[n], [kept[s] for s in steps], [noise[s] for s in steps])
            for n in counts
        }


def compare(paths: list[Path]) -> dict[str, Any]:
    """Predictions for every run, the calibrated ones from the first."""
    found = {
        record.id: record for path in paths for record in records(path)
    }  # two studies may share a run
    runs = [Run(record) for record in found.values()]
    constants = predict.calibrate(runs[0].trace())
    return {
        "command": shlex.join(["python", "benchmarks/predict.py", *sys.argv[1:]]),
        "revision": revision(),
        "torch": torch.__version__,
        "calibrated on": 0,
        "constants": {name: vars(c) for name, c in constants.items()},
        "runs": [_compared(run, constants) for run in runs],
    }


def _compared(run: Run, constants: dict[str, predict.Constant]) -> dict[str, Any]:
    scale = run.config.model.init_scale
    found = {
        "lr": run.config.optim.lr,
        "weight_decay": run.decay,
        "steps": run.config.run.steps,
        "C": {name: c.value for name, c in predict.calibrate(run.trace()).items()},
        "all": _curves(
            run, run.classes, {step: ratio / scale for step, ratio in run.ratios.items()}, constants
        ),
    }
    if run.norms:
        hidden = [c for c in run.classes if c.hidden]
        start = sum(c.count * c.rms**2 for c in hidden)
        measured = {
            step: math.sqrt(sum(norms[c.name] ** 2 for c in hidden) / start)
            for step, norms in run.norms.items()
        }
        found["hidden matrices"] = _curves(run, hidden, measured, constants)
    return found


def _curves(
    run: Run,
    classes: list[TensorClass],
    ratios: dict[int, float],
    constants: dict[str, predict.Constant],
) -> dict[str, Any]:
    """What some classes together were measured and predicted to do."""
    steps = sorted(ratios)
    found: dict[str, Any] = {
        "measured": ratios[steps[-1]],
        "steps": steps,
        "curve": [round(ratios[s], 4) for s in steps],
    }
    for name, given in (("uncalibrated", 1.0), ("calibrated", constants)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the doubts go into the result
            p = predict.adamw(classes, run.lrs, run.decay, constants=given)
        error, predicted = p.ratio / ratios[steps[-1]] - 1, p.ratios
        curve = [round(predicted[s], 4) for s in steps]
        found[name] = {
            "ratio": p.ratio,
            "low": p.low,
            "high": p.high,
            "error": error,
            "doubts": list(p.doubts),
            "curve": curve,
        }
    return found


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    lines = [
        "| | steps | lr | decay | measured | predicted, C = 1 | error | calibrated on the first | "
        "error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        for run in result["runs"]:
            if kind not in run:
                continue
            cells = [
                kind,
                f"{run['steps']:,}",
                f"{run['lr']:g}",
                f"{run['weight_decay']:g}",
                f"{run[kind]['measured']:.3f}",
            ]
            for key in ("uncalibrated", "calibrated"):
                p = run[kind][key]
                cells += [
                    f"{p['ratio']:.3f} ({p['low']:.2f} to {p['high']:.2f})",
                    f"{p['error']:+.1%}".replace("%", " %"),
                ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Curves while they can be told apart; of more runs, where they ended."""
    import matplotlib

    matplotlib.use("Agg")
    runs, kinds = result["runs"], [kind for kind in KINDS if kind in result["runs"][0]]
    figure = curves(runs, kinds) if len(runs) <= 6 else ends(runs, kinds)
    figure.savefig(path, dpi=110)


BLACK, ORANGE, BLUE = "#333333", "#e08214", "#2171b5"


def ends(runs: list[dict[str, Any]], kinds: list[str]) -> Any:
    """Final norms: predicted, with the bounds of the calibrated prediction, against measured."""
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
            plain = [f["uncalibrated"]["ratio"] for f in found]
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
                x, plain, marker, color=ORANGE, mfc="none", ms=6.5, label=f"C = 1, {steps:,} steps"
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
        ax.set_title(NAMES[kind], loc="left", fontsize=10.5, fontweight="bold")
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *axes[0][0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=len(horizons),
        frameon=False,
    )
    return figure


def curves(runs: list[dict[str, Any]], kinds: list[str]) -> Any:
    """Measured and predicted curves of every run, and the bounds at the end."""
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
                ax.set_ylabel(f"norm / initial norm\n{NAMES[kind]}")
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_xlim(0, end * 1.13)
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="tiny", help="of the runs to train")
    parser.add_argument(
        "--steps", type=int, help="train for so many steps, not as many as the preset says"
    )
    parser.add_argument("--data", help="train on this data, not on what the preset says")
    parser.add_argument(
        "--runs",
        type=Path,
        nargs="+",
        help="folders of finished AdamW runs or of studies, or cells of these; the first run is "
        "calibrated on",
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the runs that are trained; by default under runs/"
    )
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--figure", type=Path, help="draw the result here")
    parser.add_argument(
        "--draw", type=Path, metavar="JSON", help="train nothing: take the result from here"
    )
    asked = parser.parse_args()
    result = (
        json.loads(asked.draw.read_text()) if asked.draw else compare(asked.runs or trained(asked))
    )
    print(table(result))
    print(
        "C by class, each from its own run: "
        + "; ".join(
            ", ".join(f"{n} {c:.2f}" for n, c in run["C"].items()) for run in result["runs"]
        )
    )
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    if asked.figure:
        draw(result, asked.figure)


def trained(asked: argparse.Namespace) -> list[Path]:
    base = preset(asked.preset).with_(optimizer="AdamW", ratio=None)
    changes = {key: getattr(asked, key) for key in ("steps", "data") if getattr(asked, key)}
    base, out = base.with_(**changes), asked.out or Path("runs") / f"predict-{asked.preset}"
    folders = []
    for lr, decay in FACTORS:
        config = base.with_(lr=base.optim.lr * lr, weight_decay=base.optim.weight_decay * decay)
        folder = out / f"lr={config.optim.lr:g},decay={config.optim.weight_decay:g}"
        if not finished(folder, config) and not train(
            config, folder, resume=(folder / CONFIG).exists(), cache=out.parent / "data"
        ):
            raise SystemExit("Stopped, and saved. The same command goes on from there.")
        print(f"{folder} is trained.")
        folders.append(folder)
    return folders


if __name__ == "__main__":
    main()
