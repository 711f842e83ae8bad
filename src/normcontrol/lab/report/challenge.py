"""What a challenge showed: a table, two sentences, a picture, and one self-contained page."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from normcontrol.lab.report import figures as charts
from normcontrol.lab.report.page import Page, Run, Table
from normcontrol.lab.studies.challenge import Result
from normcontrol.lab.study.statistics import Difference, paired
from normcontrol.lab.training import optimizers as optim
from normcontrol.lab.training.config import Config, differences
from normcontrol.lab.training.run_folder import ENVIRONMENT

HEADINGS = ("arm", "val loss", "minus baseline", "norm ratio", "target", "skipped")


def write(results: list[Result], out: Path) -> Path:
    """Write results.json, panels.png, panels.pdf and index.html into ``out``; return the page."""
    curves = [curve(result) for result in results]
    charts.figures(curves, out / "panels.png", out / "panels.pdf")
    record = [
        {
            "arm": result.arm.name,
            "changes": {
                key: value
                for key, (_, value) in differences(results[0].configs[0], result.configs[0]).items()
            },
            "val_loss": result.final("val_loss"),
            "ratio": result.final("ratio"),
        }
        for result in results
    ]
    (out / "results.json").write_text(json.dumps(record, indent=2) + "\n")
    names = (
        "AdamW, and AdamWN at its norm"
        if len(results) == 2
        else f"AdamW and {len(results) - 1} challengers"
    )
    downloads = {name: (out / name).read_bytes() for name in ("panels.png", "panels.pdf")}
    page = Page(
        names,
        [verdict(results)],
        _runs(results),
        _tables(results),
        (),
        downloads,
        results[0].arm.name,
    )
    return page.write(out / "index.html")


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """The table, a row for each arm."""
    table: list[tuple[str, ...]] = []
    for result in results:
        loss, ratio = result.final("val_loss"), result.final("ratio")
        target = _target(result)
        table.append(
            (
                result.arm.name,
                f"{statistics.fmean(loss):.4f}",
                "-" if result is results[0] else str(difference(result, results[0])),
                f"{statistics.fmean(ratio):.3f}",
                "-" if target is None else f"{target:.3f}",
                str(sum(sum("skipped" in line for line in lines) for lines in result.metrics())),
            )
        )
    return table


def difference(result: Result, baseline: Result) -> Difference:
    return paired(result.final("val_loss"), baseline.final("val_loss"))


def verdict(results: list[Result]) -> str:
    """One sentence on what the first challenger did, as strong as the numbers allow and no
    stronger."""
    baseline, challenger = results[0], results[1] if len(results) > 1 else results[0]
    base = (
        f"{baseline.arm.name} ended at a validation loss of {_mean(baseline, 'val_loss'):.4f} "
        "with the norm of its weights at "
    )
    base += f"{_mean(baseline, 'ratio'):.3f} times the initial one"
    if challenger is baseline:
        return base + "."
    d = difference(challenger, baseline)
    how = "lower" if d.mean < 0 else "higher"
    loss, ratio = _mean(challenger, "val_loss"), _mean(challenger, "ratio")
    claim = (
        f"{base}, and {challenger.arm.name} at {loss:.4f}, {abs(d.mean):.4f} {how}, with its "
        f"norm held at {ratio:.3f} times"
    )
    for control in results[2:]:
        if (
            "init_scale" in control.arm.changes
        ):  # what could explain the difference away belongs beside it
            claim += (
                ", while AdamW merely started from weights of that norm ended at "
                f"{_mean(control, 'val_loss'):.4f}"
            )
    if d.half is None:
        return (
            f"{claim}: one pair of runs, so an illustration and not evidence (--seeds 5 gives "
            "an interval)."
        )
    shown = "shown" if d.shown else "not shown"
    return (
        f"{claim}: the difference {d} (95 % interval, n = {d.n} paired seeds) is {shown}, at "
        "these settings, with neither arm tuned."
    )


def curve(result: Result) -> charts.Curve:
    """An arm's curves, seed by seed."""
    runs = {
        seed: {
            key: {
                line["step"]: line[key] for line in lines if key in line and "skipped" not in line
            }
            for key in charts.MEASURED
        }
        for seed, lines in enumerate(result.metrics())
    }
    return charts.Curve(result.arm.name, runs, _target(result))


def _target(result: Result) -> float | None:
    targets = [optim.target_at(config.optim, config.run.steps) for config in result.configs]
    kept = [t for t in targets if t is not None]
    return statistics.fmean(kept) if kept else None


def _mean(result: Result, key: str) -> float:
    return statistics.fmean(result.final(key))


def _tables(results: list[Result]) -> list[Table]:
    config, seeds = results[0].configs[0], len(results[0].folders)
    environment = json.loads((results[0].folders[0] / ENVIRONMENT).read_text())
    interval = (
        "is one pair here, which has no interval"
        if seeds == 1
        else "has its 95 % interval (Student's t) behind ±"
    )
    note = (
        "Validation loss: mean over the whole fixed validation split after the last step, over "
        f"{seeds} seed{'s' * (seeds > 1)}. "
        '"Minus baseline" pairs runs that share initial weights and the order of the data, and '
        f"{interval}. Every arm had one trial at "
        "these settings: none was tuned."
    )
    changes = [(r.arm.name, _changes(config, r.configs[0])) for r in results]
    return [
        Table("Results", HEADINGS, rows(results), note),
        Table(
            "What each arm changes", ("arm", "settings that differ from the baseline's"), changes
        ),
        Table("What was run", ("", ""), _about(config, environment)),
    ]


def _runs(results: list[Result]) -> list[Run]:
    found = []
    for result in results:
        for seed, (config, lines) in enumerate(zip(result.configs, result.metrics(), strict=True)):
            points = {
                key: [
                    (line["step"], line[key])
                    for line in lines
                    if key in line and "skipped" not in line
                ]
                for key in ("loss", "val_loss", "ratio")
            }
            curves = {
                key: ([s for s, _ in series], [v for _, v in series])
                for key, series in points.items()
            }
            final = {key: series[-1][1] for key, series in points.items() if series}
            found.append(
                Run(
                    result.arm.name,
                    "",
                    seed,
                    config.flat(),
                    curves,
                    final,
                    baseline=result is results[0],
                )
            )
    return found


def _changes(baseline: Config, other: Config) -> str:
    changed = differences(baseline, other)
    return (
        ", ".join(
            f"{key} {new:.4g}" if isinstance(new, float) else f"{key} {new}"
            for key, (_, new) in changed.items()
        )
        or "the baseline"
    )


def _about(config: Config, environment: dict[str, Any]) -> list[tuple[str, ...]]:
    m, d = config.model, config.data
    return [
        ("command", shlex.join(["normcontrol", *sys.argv[1:]])),
        (
            "model",
            f"GPT-2 shape: {m.layers} layers, {m.heads} heads, {m.width} wide, context {m.context}",
        ),
        (
            "training",
            f"{config.run.steps:,} steps of {d.tokens_per_step:,} tokens, learning rate "
            f"{config.optim.lr:g} ({config.optim.schedule})",
        ),
        (
            "data",
            f"{d.data}, tokenizer {environment['data']['tokenizer']}, SHA-256 "
            f"{environment['data']['digest'][:16]}...",
        ),
        (
            "device",
            f"{environment['device']}, {environment['processes']} "
            f"process{'es' if environment['processes'] > 1 else ''}",
        ),
        (
            "software",
            f"normcontrol {environment['normcontrol']} ({environment['revision'][:12]}), torch "
            f"{environment['packages']['torch']}",
        ),
    ]
