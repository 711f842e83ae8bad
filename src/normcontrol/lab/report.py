"""What a challenge showed: a table, two sentences, a picture, and one self-contained page."""

from __future__ import annotations

import base64
import html
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normcontrol.lab import charts, optim
from normcontrol.lab.challenge import Result
from normcontrol.lab.config import Config, differences
from normcontrol.lab.folder import ENVIRONMENT
from normcontrol.lab.stats import Difference, paired

HEADINGS = ("arm", "val loss", "minus baseline", "norm ratio", "target", "skipped")


def write(results: list[Result], out: Path) -> Path:
    """Write results.json, panels.png and index.html into ``out``; return the page."""
    curves = [curve(result) for result in results]
    charts.png(curves, out / "panels.png")
    record = [
        {
            "arm": result.arm.name,
            "changes": {key: value for key, (_, value) in differences(results[0].configs[0], result.configs[0]).items()},
            "val_loss": result.final("val_loss"),
            "ratio": result.final("ratio"),
        }
        for result in results
    ]
    (out / "results.json").write_text(json.dumps(record, indent=2) + "\n")
    page = out / "index.html"
    page.write_text(_page(results, charts.svgs(curves), (out / "panels.png").read_bytes()), encoding="utf-8")
    return page


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
    """One sentence on what the first challenger did, as strong as the numbers allow and no stronger."""
    baseline, challenger = results[0], results[1] if len(results) > 1 else results[0]
    base = f"{baseline.arm.name} ended at a validation loss of {_mean(baseline, 'val_loss'):.4f} with the norm of its weights at "
    base += f"{_mean(baseline, 'ratio'):.3f} times the initial one"
    if challenger is baseline:
        return base + "."
    d = difference(challenger, baseline)
    how = "lower" if d.mean < 0 else "higher"
    loss, ratio = _mean(challenger, "val_loss"), _mean(challenger, "ratio")
    claim = f"{base}, and {challenger.arm.name} at {loss:.4f}, {abs(d.mean):.4f} {how}, with its norm held at {ratio:.3f} times"
    for control in results[2:]:
        if "init_scale" in control.arm.changes:  # what could explain the difference away belongs beside it
            claim += f", while AdamW merely started from weights of that norm ended at {_mean(control, 'val_loss'):.4f}"
    if d.half is None:
        return f"{claim}: one pair of runs, so an illustration and not evidence (--seeds 5 gives an interval)."
    shown = "shown" if d.shown else "not shown"
    return f"{claim}: the difference {d} (95 % interval, n = {d.n} paired seeds) is {shown}, at these settings, with neither arm tuned."


def curve(result: Result) -> charts.Curve:
    """An arm's curves, averaged over its seeds at the steps that all of them have."""
    runs = result.metrics()

    def mean(key: str) -> tuple[list[int], list[float]]:
        series = [{line["step"]: line[key] for line in lines if key in line and "skipped" not in line} for lines in runs]
        steps = sorted(set.intersection(*(set(s) for s in series)))
        return steps, [statistics.fmean(s[step] for s in series) for step in steps]

    return charts.Curve(result.arm.name, mean("loss"), mean("val_loss"), mean("ratio"), _target(result))


def _target(result: Result) -> float | None:
    targets = [optim.target_at(config.optim, config.run.steps) for config in result.configs]
    kept = [t for t in targets if t is not None]
    return statistics.fmean(kept) if kept else None


def _mean(result: Result, key: str) -> float:
    return statistics.fmean(result.final(key))


def _page(results: list[Result], panels: list[str], picture: bytes) -> str:
    environment = json.loads((results[0].folders[0] / ENVIRONMENT).read_text())
    config, seeds = results[0].configs[0], len(results[0].folders)
    figures = "\n".join(f"<figure>{panel}</figure>" for panel in panels)
    names = "AdamW, and AdamWN at its norm" if len(results) == 2 else f"AdamW and {len(results) - 1} challengers"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>normcontrol challenge: {html.escape(names)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{html.escape(names)}</h1>
<p class="verdict">{html.escape(verdict(results))}</p>
{_legend(results)}
<div class="panels">
{figures}
</div>
<p><a download="panels.png" href="data:image/png;base64,{base64.b64encode(picture).decode()}">The four panels as one PNG</a></p>
<h2>Results</h2>
{_table(HEADINGS, rows(results))}
<p class="note">Validation loss: mean over the whole fixed validation split after the last step, over {seeds}
{"seed" if seeds == 1 else "seeds"}. "Minus baseline" pairs runs that share initial weights and the order of the data
{"and is one pair here, which has no interval" if seeds == 1 else "; ± is half of the 95 % interval (Student's t)"}. Every arm had one
trial at these settings: none was tuned.</p>
<h2>What each arm changes</h2>
{_table(("arm", "settings that differ from the baseline's"), [(r.arm.name, _changes(config, r.configs[0])) for r in results])}
<h2>What was run</h2>
{_table(("", ""), _about(config, environment))}
<details><summary>All settings of the baseline</summary>
{_table(("setting", "value"), [(key, str(value)) for key, value in config.flat().items()])}
</details>
</main>
</body>
</html>
"""


def _legend(results: list[Result]) -> str:
    items = [
        f'<li><span class="dot" style="background:{charts.COLOURS[i % len(charts.COLOURS)]}"></span>{html.escape(result.arm.name)}</li>'
        for i, result in enumerate(results)
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _table(headings: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{html.escape(h)}</th>" for h in headings) if any(headings) else ""
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>\n" for line in lines)
    return f'<div class="scroll"><table>{f"<thead><tr>{head}</tr></thead>" if head else ""}<tbody>\n{body}</tbody></table></div>'


def _changes(baseline: Config, other: Config) -> str:
    changed = differences(baseline, other)
    return (
        ", ".join(f"{key} {new:.4g}" if isinstance(new, float) else f"{key} {new}" for key, (_, new) in changed.items()) or "the baseline"
    )


def _about(config: Config, environment: dict[str, Any]) -> list[tuple[str, ...]]:
    m, d = config.model, config.data
    return [
        ("command", shlex.join(["normcontrol", *sys.argv[1:]])),
        ("model", f"GPT-2 shape: {m.layers} layers, {m.heads} heads, {m.width} wide, context {m.context}"),
        (
            "training",
            f"{config.run.steps:,} steps of {d.tokens_per_step:,} tokens, learning rate {config.optim.lr:g} ({config.optim.schedule})",
        ),
        ("data", f"{d.data}, tokenizer {environment['data']['tokenizer']}, SHA-256 {environment['data']['digest'][:16]}..."),
        ("device", f"{environment['device']}, {environment['processes']} process{'es' if environment['processes'] > 1 else ''}"),
        (
            "software",
            f"normcontrol {environment['normcontrol']} ({environment['revision'][:12]}), torch {environment['packages']['torch']}",
        ),
    ]


STYLE = """
:root { --ink: #1c1e21; --paper: #ffffff; --faint: #c9ccd1; --soft: #f4f5f7; --link: #0b62c4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6eb; --paper: #17191c; --faint: #484d54; --soft: #22252a; --link: #7db4ff; }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2rem; }
a { color: var(--link); }
.verdict { font-size: 1.1rem; max-width: 48rem; }
.note { max-width: 48rem; opacity: .8; font-size: .9rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; } figure svg { width: 100%; height: auto; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; padding: 0; }
.dot { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .5em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem 1rem .35rem 0; border-bottom: 1px solid var(--faint); vertical-align: top; }
summary { cursor: pointer; margin-top: 1rem; }
"""
