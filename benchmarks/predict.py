"""Compares the predicted with the measured norm of AdamW runs.

By default it trains four runs, with four pairs of learning rate and decay. Runs that are already
finished are not trained again. With ``--runs`` it reads AdamW runs of the laboratory instead:
folders of runs or of studies. Every norm is predicted twice: uncalibrated (C = 1), and with
constants that were calibrated on the first run alone. ``--draw`` draws the figure of an earlier
result. ``--halves`` fits the law of C to one half of the committed runs and tests it on the other.
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

import predict_halves
import torch
from predict_figures import TITLES, draw
from predict_runs import Run, finished, records

from normcontrol import predict
from normcontrol.groups.classes import TensorClass
from normcontrol.lab.training.config import preset
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.run_folder import CONFIG, revision

FACTORS = ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (0.5, 2.0))
"""The four pairs, as multiples of the learning rate and decay of the preset. The constants are
calibrated on the first one."""


def compare(paths: list[Path]) -> dict[str, Any]:
    """Predict the norms of every run, with C = 1 and with the constants of the first run."""
    # By id, because two studies may contain the same run.
    found = {record.id: record for path in paths for record in records(path)}
    runs = [Run(record) for record in found.values()]
    constants = predict.calibrate(runs[0].trace(), runs[0].tied)
    return {
        "command": shlex.join(["python", "benchmarks/predict.py", *sys.argv[1:]]),
        "revision": revision(),
        "torch": torch.__version__,
        "calibrated on": 0,
        "constants": {name: vars(c) for name, c in constants.items()},
        "runs": [_compared(run, constants) for run in runs],
    }


def _compared(run: Run, constants: dict[str, predict.Constant]) -> dict[str, Any]:
    found = {
        "lr": run.config.optim.lr,
        "weight_decay": run.decay,
        "steps": run.config.run.steps,
        "C": {name: c.value for name, c in predict.calibrate(run.trace()).items()},
        "all": _curves(run, run.classes, run.ratios, constants),
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
    """The measured and predicted norms of some classes together."""
    steps = sorted(ratios)
    found: dict[str, Any] = {
        "measured": ratios[steps[-1]],
        "steps": steps,
        "curve": [round(ratios[s], 4) for s in steps],
    }
    for name, given in (("uncalibrated", 1.0), ("calibrated", constants)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # doubts are stored in the result instead
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
    for kind in TITLES:
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="tiny", help="preset of the runs to train")
    parser.add_argument(
        "--steps", type=int, help="number of steps to train, in place of that of the preset"
    )
    parser.add_argument("--data", help="data to train on, in place of that of the preset")
    parser.add_argument(
        "--runs",
        type=Path,
        nargs="+",
        help="folders of finished AdamW runs or of studies, or cells of studies; the constants are "
        "calibrated on the first run",
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the trained runs, by default below runs/"
    )
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--figure", type=Path, help="save the figure to this file")
    parser.add_argument(
        "--draw", type=Path, metavar="JSON", help="train nothing: read the result from this file"
    )
    parser.add_argument(
        "--halves",
        action="store_true",
        help="fit the law of C to one half of the committed runs, and test it on the other half",
    )
    arguments = parser.parse_args()
    if arguments.halves:
        result = predict_halves.halves()
        print(predict_halves.table(result))
        print(f"exponents fitted to the first half: {result['fitted']}; in use: {result['in use']}")
        for row in result["rows"]:
            print(
                f"outside the bounds, {row['runs']}, {row['kind']}: {row['law']['outside']} of "
                f"{row['pairs']} predictions"
            )
        print(f"factors that widen the bounds (all classes, tied): {result['widening']}")
        for title, ranges in result["C"].items():
            values = (f"{n} {low:.2f} to {high:.2f}" for n, (low, high) in ranges.items())
            print(f"C, {title}: {', '.join(values)}")
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        return
    result = (
        json.loads(arguments.draw.read_text())
        if arguments.draw
        else compare(arguments.runs or trained(arguments))
    )
    print(table(result))
    print(
        "C by class, each from its own run: "
        + "; ".join(
            ", ".join(f"{n} {c:.2f}" for n, c in run["C"].items()) for run in result["runs"]
        )
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.figure:
        draw(result, arguments.figure)


def trained(arguments: argparse.Namespace) -> list[Path]:
    """Train the four runs, except those that are finished, and return their folders."""
    base = preset(arguments.preset).with_(optimizer="AdamW", ratio=None)
    changes = {key: getattr(arguments, key) for key in ("steps", "data") if getattr(arguments, key)}
    base, out = base.with_(**changes), arguments.out or Path("runs") / f"predict-{arguments.preset}"
    folders = []
    for lr, decay in FACTORS:
        config = base.with_(lr=base.optim.lr * lr, weight_decay=base.optim.weight_decay * decay)
        folder = out / f"lr={config.optim.lr:g},decay={config.optim.weight_decay:g}"
        if not finished(folder, config) and not train(
            config, folder, resume=(folder / CONFIG).exists(), cache=out.parent / "data"
        ):
            raise SystemExit("Stopped and saved. The same command continues from the checkpoint.")
        print(f"{folder} is finished.")
        folders.append(folder)
    return folders


if __name__ == "__main__":
    main()
