"""The norm that AdamW is predicted to reach against the norm that it reaches, for four pairs of learning rate and decay.

Without ``--runs`` it trains them (finished ones are not trained again); with it, it reads the folders of AdamW runs that the
laboratory has made. Predicted twice: with no constant (C = 1), and with constants calibrated on the first run alone.
``--draw`` draws the figure of an earlier result.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch

from normcontrol import predict
from normcontrol.classes import TensorClass, classes_of
from normcontrol.lab import metrics, optim
from normcontrol.lab.challenge import finished
from normcontrol.lab.config import Config, preset
from normcontrol.lab.data import padded
from normcontrol.lab.files import read_json
from normcontrol.lab.folder import CONFIG, ENVIRONMENT, revision
from normcontrol.lab.model import GPT
from normcontrol.lab.telemetry import PREFIX
from normcontrol.lab.train import train
from normcontrol.record import ClassTrace

FACTORS = ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (0.5, 2.0))
"""The four pairs, as multiples of the preset's learning rate and decay. The first is the one that is calibrated on."""
TIED = ("wte.weight",)
"""nanoGPT's head is its embedding; the laboratory's model uses it by hand."""


class Run:
    """A finished AdamW run: its config, its weights at the start by class, and the norms that it had."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, Config.load(folder / CONFIG)
        o = self.config.optim
        if optim.known_name(o.optimizer) != "AdamW" or o.ratio is not None:
            raise SystemExit(f"{folder} is a run of {o.optimizer}, whose norm is not AdamW's: give folders of AdamW runs.")
        lines = metrics.read(folder)
        if not finished(folder, self.config):
            raise SystemExit(f"{folder} is not finished: its norm at the end is not known.")
        self.lrs = [optim.lr_at(self.config, step) for step in range(1, self.config.run.steps + 1)]
        self.decay = o.weight_decay
        self.classes = self._classes(read_json(folder / ENVIRONMENT)["data"]["vocab"])
        self.ratios = {line["step"]: line["ratio"] for line in lines if "ratio" in line}
        self.norms = {line["step"]: {k[len(PREFIX) :]: v for k, v in line.items() if k.startswith(PREFIX)} for line in lines}
        self.norms = {step: norms for step, norms in self.norms.items() if norms}

    def _classes(self, vocab: int) -> list[TensorClass]:
        model = GPT(self.config.model, padded(vocab))
        model.initialise(self.config.model.init_seed)
        torch._foreach_mul_([p.data for p in model.matrices()], self.config.model.init_scale)
        return classes_of(model, TIED)

    def trace(self) -> dict[str, ClassTrace]:
        """The run as predict.calibrate takes it: by class, or all together where the metrics have no norms of classes."""
        kept, noise = predict.walk(self.lrs, predict.decays("AdamW", self.lrs, self.decay))
        if self.norms:
            steps, counts = sorted(self.norms), {c.name: c.count for c in self.classes}
            norms = {name: [self.norms[s][name] for s in steps] for name in counts}
        else:
            steps, counts = sorted(self.ratios), {predict.ALL: sum(c.count for c in self.classes)}
            start = math.sqrt(sum(c.count * c.rms**2 for c in self.classes))
            norms = {predict.ALL: [start * self.ratios[s] / self.config.model.init_scale for s in steps]}
        return {n: ClassTrace(counts[n], norms[n], [kept[s] for s in steps], [noise[s] for s in steps]) for n in counts}

    def predicted(self, constants: predict.Constants) -> predict.Prediction:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the doubts go into the result
            return predict.adamw(self.classes, self.lrs, self.decay, constants=constants)


def compare(folders: list[Path]) -> dict[str, Any]:
    """Predictions for every run, the calibrated ones from the first."""
    runs = [Run(folder) for folder in folders]
    constants = predict.calibrate(runs[0].trace())
    return {
        "command": "python benchmarks/predict.py",
        "revision": revision(),
        "torch": torch.__version__,
        "calibrated on": 0,
        "constants": {name: vars(c) for name, c in constants.items()},
        "runs": [_compared(run, constants) for run in runs],
    }


def _compared(run: Run, constants: dict[str, predict.Constant]) -> dict[str, Any]:
    plain, fitted = run.predicted(1.0), run.predicted(constants)
    scale, steps = run.config.model.init_scale, sorted(run.ratios)
    measured = run.ratios[steps[-1]] / scale
    own = predict.calibrate(run.trace())
    last = run.norms[max(run.norms)] if run.norms else {}
    return {
        "lr": run.config.optim.lr,
        "weight_decay": run.decay,
        "steps": run.config.run.steps,
        "measured": measured,
        "uncalibrated": _one(plain, measured),
        "calibrated": _one(fitted, measured),
        "C": {name: c.value for name, c in own.items()},
        "classes": {
            c.weights.name: {
                "measured": last[c.weights.name] / (c.weights.rms * math.sqrt(c.weights.count)),
                "uncalibrated": c.ratio,
                "calibrated": f.ratio,
            }
            for c, f in zip(plain.classes, fitted.classes, strict=True)
            if last
        },
        "curve": {
            "steps": steps,
            "measured": [round(run.ratios[s] / scale, 5) for s in steps],
            "uncalibrated": [round(plain.ratios[s], 5) for s in steps],
            "calibrated": [round(fitted.ratios[s], 5) for s in steps],
        },
    }


def _one(p: predict.Prediction, measured: float) -> dict[str, Any]:
    return {"ratio": p.ratio, "low": p.low, "high": p.high, "error": p.ratio / measured - 1, "doubts": list(p.doubts)}


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    lines = ["| lr | decay | measured | predicted, C = 1 | error | calibrated on the first | error |", "|---|---|---|---|---|---|---|"]
    for run in result["runs"]:
        cells = [f"{run['lr']:g}", f"{run['weight_decay']:g}", f"{run['measured']:.3f}"]
        for key in ("uncalibrated", "calibrated"):
            p = run[key]
            cells += [f"{p['ratio']:.3f} ({p['low']:.2f} to {p['high']:.2f})", f"{p['error']:+.1%}".replace("%", " %")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Measured and predicted curves of every run, and the bounds at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured, plain, fitted = "#333333", "#e08214", "#2171b5"
    runs = result["runs"]
    figure, axes = plt.subplots(1, len(runs), figsize=(3.1 * len(runs), 3.3), sharey=True, layout="constrained", squeeze=False)
    for i, (ax, run) in enumerate(zip(axes[0], runs, strict=True)):
        curve, end = run["curve"], run["steps"]
        ax.plot(curve["steps"], curve["uncalibrated"], color=plain, lw=1.8, ls="--", label="predicted, C = 1")
        ax.plot(curve["steps"], curve["calibrated"], color=fitted, lw=1.8, label="predicted, calibrated on the first run")
        ax.plot(curve["steps"], curve["measured"], color=measured, lw=2.2, label="measured")
        for key, colour, shift in (("uncalibrated", plain, 1.04), ("calibrated", fitted, 1.09)):
            p = run[key]
            bars = [[p["ratio"] - p["low"]], [p["high"] - p["ratio"]]]
            ax.errorbar([end * shift], [p["ratio"]], yerr=bars, color=colour, fmt="o", ms=4, capsize=3)
        first = ": calibrated on" if i == result["calibrated on"] else ""
        ax.set_title(f"lr {run['lr']:g}, decay {run['weight_decay']:g}{first}", loc="left", fontsize=10.5, fontweight="bold")
        ax.set_xlabel("step")
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_xlim(0, end * 1.13)
    axes[0][0].set_ylabel("norm / initial norm")
    axes[0][0].legend(frameon=False, fontsize=8.5, loc="upper left")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny", help="of the runs to train")
    parser.add_argument("--steps", type=int, help="train for so many steps, not as many as the preset says")
    parser.add_argument("--data", help="train on this data, not on what the preset says")
    parser.add_argument("--runs", type=Path, nargs="+", help="folders of finished AdamW runs; the first one is calibrated on")
    parser.add_argument("--out", type=Path, help="folder of the runs that are trained; by default under runs/")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--figure", type=Path, help="draw the result here")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="train nothing: take the result from here")
    asked = parser.parse_args()
    result = json.loads(asked.draw.read_text()) if asked.draw else compare(asked.runs or trained(asked))
    print(table(result))
    print(
        "C by class, each from its own run: " + "; ".join(", ".join(f"{n} {c:.2f}" for n, c in run["C"].items()) for run in result["runs"])
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
        if not finished(folder, config) and not train(config, folder, resume=(folder / CONFIG).exists(), cache=out.parent / "data"):
            raise SystemExit("Stopped, and saved. The same command goes on from there.")
        print(f"{folder} is trained.")
        folders.append(folder)
    return folders


if __name__ == "__main__":
    main()
