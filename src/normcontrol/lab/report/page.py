"""One self-contained HTML page: figures to hover, zoom and toggle, tables that sort, every config.

It makes a page from runs and tables and does not know studies. Its style and script are in
``web/``; the page loads nothing from the network.
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from normcontrol.lab.files import write_text
from normcontrol.lab.text import printable

WEB = Path(__file__).parent / "web"
COLOURS = (
    *("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#5254a3", "#ad494a"),
)
LARGEST = 2**53
"""Up to this number, JavaScript has all integers."""
CURVES = ("loss", "val_loss", "ratio")
SHOWN = ("trial", "seed", "label", "status", "error", "chosen", "baseline", "initial_gain")
"""What the script gets of a run as it is."""
MANY = 4
"""The number of runs of an arm from which on their mean is drawn."""


@dataclass(frozen=True)
class Run:
    """A run as the page shows it."""

    arm: str
    trial: str
    seed: int
    config: dict[str, Any]
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]]
    final: dict[str, float]
    status: str = "finished"
    error: str = ""
    chosen: bool = True
    """Drawn at first; the others on request."""
    baseline: bool = False
    """Other runs with its seed are compared with this one."""
    initial_gain: float | None = None
    """The gain of the initial weights, to which ratios refer."""

    @property
    def label(self) -> str:
        return printable(" ".join(filter(None, (self.arm, self.trial, f"seed={self.seed}"))))


@dataclass(frozen=True)
class Table:
    """A table with a heading, and a note under it."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The content of a page, from top to bottom."""

    title: str
    sentences: Sequence[str]
    runs: Sequence[Run]
    tables: Sequence[Table] = ()
    flags: Sequence[str] = ()
    downloads: dict[str, bytes] = field(default_factory=dict)
    """Files that can be saved from the page, by name: the same figures for a paper."""
    baseline: str = "the baseline"

    def render(self) -> str:
        flags = "".join(f"<li>{_escaped(flag)}</li>" for flag in self.flags)
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escaped(self.title)}</title>
<link rel="icon" href="data:,">
<style>{_web("page.css")}</style>
</head>
<body>
<button id="theme" type="button" aria-label="light or dark">◐</button>
<main>
<h1>{_escaped(self.title)}</h1>
{"".join(f'<p class="verdict">{_escaped(sentence)}</p>' for sentence in self.sentences)}
{f'<ul class="note">{flags}</ul>' if flags else ""}
{self._figures()}
{"".join(map(_table, self.tables))}
{_runs(self.runs)}
</main>
<dialog id="config"><form method="dialog"><button>close</button></form><h2></h2><pre></pre></dialog>
<script type="application/json" id="data">{self._data()}</script>
<script>{_web("page.js")}</script>
</body>
</html>
"""

    def write(self, path: Path) -> Path:
        write_text(path, self.render())
        return path

    def _figures(self) -> str:
        if not self.runs:
            return '<div id="legend"></div><div id="panels"></div>'
        saved = " · ".join(_download(name, content) for name, content in self.downloads.items())
        arms = Counter(run.arm for run in self.runs if run.chosen)
        mean = (
            "Thick: the mean of an arm's seeds. " if max(arms.values(), default=0) >= MANY else ""
        )
        return f"""<div id="legend" class="legend"></div>
<div id="panels" class="panels"></div>
<p class="note">{mean}Click a name to hide or show it. Point at a curve to read it; drag over a
panel to zoom in, double-click to zoom out.
{f"For papers: {saved}." if saved else ""}</p>"""

    def _data(self) -> str:
        """The runs for the script as JSON. To keep it small, a config is stored as its differences
        from the first, and equal lists of steps are stored once."""
        first = self.runs[0].config if self.runs else {}
        steps: dict[str, int] = {}
        runs = []
        for run in self.runs:
            curves = {}
            for key in CURVES:
                at, values = run.curves.get(key, ((), ()))
                curves[key] = [steps.setdefault(_floats(at), len(steps)), _floats(values)]
            runs.append(
                {
                    "arm": printable(run.arm),
                    **{key: getattr(run, key) for key in SHOWN},
                    "config": {k: v for k, v in run.config.items() if first.get(k) != v},
                    "curves": curves,
                }
            )
        content = {
            "runs": runs,
            "steps": list(steps),
            "config": first,
            "colours": COLOURS,
            "many": MANY,
            "baseline": printable(self.baseline),
        }
        # No "<": neither "</script>" nor "<!--" in a name can end or change the script.
        text = json.dumps(_exact(content), separators=(",", ":"), allow_nan=False)
        return text.replace("<", "\\u003c")


def _escaped(text: str) -> str:
    """A text for HTML, whatever characters are in it."""
    return html.escape(printable(text))


def _exact(value: Any) -> Any:
    """The value for JSON. Numbers that a script would round or not read are texts: large seeds, and
    those that are not finite."""
    if isinstance(value, Mapping):
        return {key: _exact(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(one) for one in value]
    is_large = isinstance(value, int) and abs(value) > LARGEST
    is_other = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_large or is_other else value


def _floats(values: Sequence[float]) -> str:
    return base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()


def _web(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def _download(name: str, content: bytes) -> str:
    kind = {"png": "image/png", "pdf": "application/pdf"}[name.rpartition(".")[2]]
    data, name = base64.b64encode(content).decode(), _escaped(name)
    return f'<a download="{name}" href="data:{kind};base64,{data}">{name}</a>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{_escaped(heading)}</th>" for heading in table.headings)
    body = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in table.rows)
    note = f'<p class="note">{_escaped(table.note)}</p>' if table.note else ""
    return f"""<h2>{_escaped(table.title)}</h2>
<div class="scroll"><table class="sorts"><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table></div>{note}
"""


def _cell(text: str) -> str:
    mark = f' class="{text}"' if text in ("supported", "refuted") else ""
    return f"<td{mark}>{_escaped(text)}</td>"


def _runs(runs: Sequence[Run]) -> str:
    keys = sorted({key for run in runs for key in run.final if key.startswith("val_loss")})
    headings = [
        "arm",
        "trial",
        "seed",
        "status",
        *(key.replace("_", " ") for key in keys),
        "norm ratio",
        "gain",
        "settings",
    ]
    body = []
    for number, run in enumerate(runs):
        values = [f"{run.final[key]:.4f}" if key in run.final else "-" for key in keys]
        values += [f"{run.final[k]:.3f}" if k in run.final else "-" for k in ("ratio", "gain")]
        cells = "".join(map(_cell, (run.arm, run.trial, str(run.seed), run.status, *values)))
        body.append(
            f'<tr>{cells}<td><button type="button" data-run="{number}">config</button></td></tr>'
        )
    head = "".join(f"<th>{_escaped(heading)}</th>" for heading in headings)
    return f"""<h2>Every run</h2>
<div class="scroll"><table class="sorts" id="runs"><thead><tr>{head}</tr></thead><tbody>
{chr(10).join(body)}
</tbody></table></div>
"""
