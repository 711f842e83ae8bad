"""The page of a study, and the same figures as PNG and PDF for papers. It turns a verdict into runs
and tables; how those are laid out is in ``page.py``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normcontrol.lab.own_files import without_folder
from normcontrol.lab.report import panels
from normcontrol.lab.report.page import COLOURS, Page, Run, Table
from normcontrol.lab.study.cells import SEEDS, Cell
from normcontrol.lab.study.claims import HOW
from normcontrol.lab.study.evidence import Trial
from normcontrol.lab.study.ledger import Ledger
from normcontrol.lab.study.records import Record
from normcontrol.lab.study.verdict import Row, Verdict, judge
from normcontrol.lab.training.config import Config, differences

FIGURES = ("figures.png", "figures.pdf")
NOTE = (
    "Each arm by its trial with the most seeds, and of those the best in the first third of the "
    "seeds that all have. Differences pair runs that share initial weights and the order of the "
    "data, in the seeds that chose neither (pairs: how many); ± is half of the 95 % interval "
    "(Student's t), each by itself. n, val loss and s.d. (the standard deviation) are of all seeds "
    "of the trial. Detectable: the difference that four of five such studies would show."
)


def write(ledger: Ledger, out: Path) -> Path:
    """Write index.html, figures.png and figures.pdf into ``out``; return the page."""
    verdict = judge(ledger)
    if ledger.study.name == "figure1":
        panels.draw_figure_1(*(out / name for name in FIGURES))
    elif verdict.rows:
        curves = [curve(trial) for trial in drawn(verdict)]
        panels.draw(curves, *(out / name for name in FIGURES))
    base = verdict.baseline
    page = Page(
        verdict.title,
        list(filter(None, [ledger.study.about, *verdict.sentences()])),
        runs(ledger, verdict),
        tables(verdict),
        verdict.flags,
        {name: (out / name).read_bytes() for name in FIGURES if (out / name).exists()},
        "the baseline" if base is None else base.trial.name,
    )
    return page.write(out / "index.html")


def drawn(verdict: Verdict) -> list[Trial]:
    """The trials to draw: one for each arm that can be compared. Runs that belong to two arms are
    drawn once. Of more trials than there are colours, those of the baseline's part are drawn."""
    found: list[Trial] = []
    for row in verdict.rows:
        ids = {record.id for record in row.trial.records}
        if (row is verdict.baseline or row.differences) and not any(
            ids <= {r.id for r in other.records} for other in found
        ):
            found.append(row.trial)
    if verdict.baseline is not None and len(found) > len(COLOURS):
        part = verdict.baseline.trial.cells[0].part
        found = [trial for trial in found if trial.cells[0].part == part]
    return found


def runs(ledger: Ledger, verdict: Verdict) -> list[Run]:
    """Every run of the study. Those of the trials that represent their arms are drawn at first."""
    done = ledger.results()
    chosen = {(record.id, trial.arm) for trial in drawn(verdict) for record in trial.records}
    base = verdict.baseline
    bases = set() if base is None else {(record.id, base.arm) for record in base.trial.records}
    found, seen = [], set()
    order = {row.arm: i for i, row in enumerate(verdict.rows)}
    for cell in sorted(
        ledger.cells(done), key=lambda c: (order.get(c.arm, len(order)), c.trial, c.seed)
    ):
        record = done.of(cell)
        if record is not None and (key := (record.id, cell.arm)) not in seen:
            seen.add(key)
            found.append(_run(cell, record, key in chosen, key in bases))
    return found


def _run(cell: Cell, record: Record, chosen: bool, baseline: bool) -> Run:
    return Run(
        cell.arm,
        cell.trial,
        cell.seed,
        record.config,
        dict(record.curves),
        record.final,
        record.status,
        record.error,
        chosen,
        baseline,
        record.initial_gain,
    )


def tables(verdict: Verdict) -> list[Table]:
    """The tables of a study: results, claims, published numbers, tuning, and what was run."""
    found = []
    if verdict.rows:
        note = verdict.study.story.note if verdict.study.story else NOTE
        found.append(Table("Results", verdict.headings(), verdict.table(), note))
    if verdict.findings:
        headings: tuple[str, ...] = ("claim", "outcome", "numbers", "refuted if")
        note = f"{HOW} The rules are code of the study, not of this page."
        found.append(Table("Claims", headings, verdict.claims(), note))
    if verdict.study.published:
        note = f"What differs: {verdict.study.differs.get(verdict.scale, '')}."
        headings = ("what", "paper", "here")
        found.append(Table("The paper's numbers", headings, verdict.published(), note))
    if verdict.counts:
        headings = ("arm", *(f"k = {k}" for k in verdict.counts))
        found.append(Table("Expected best of k trials", headings, verdict.best_of()))
    return [*found, *_what_was_run(verdict)]


PLACE = ("device", "software", "revision", "data", "command")


def _what_was_run(verdict: Verdict) -> list[Table]:
    """What each arm changes, the model and the training of the baseline, and where it was run."""
    base = verdict.baseline
    if base is None:
        return []
    config = base.trial.config
    m, d, o = config.model, config.data, config.optim
    layers = f"{m.layers} layer{'s' * (m.layers > 1)}"
    heads = f"{m.heads} head{'s' * (m.heads > 1)}"
    about = [
        ("model", f"GPT-2 shape: {layers}, {heads}, {m.width} wide"),
        ("context", f"{m.context} tokens"),
        ("steps", f"{config.run.steps:,} of {d.tokens_per_step:,} tokens"),
        ("learning rate", f"{o.lr:g} ({o.schedule})"),
    ]
    places = _places(verdict)
    if len(places) == 1:
        about += zip(PLACE, *places, strict=True)
    changes = [(row.arm, _changes(row, base)) for row in verdict.rows]
    found = [
        Table(
            "What each arm changes", ("arm", "settings that differ from the baseline's"), changes
        ),
        Table("What was run", ("", ""), about),
    ]
    if len(places) > 1:
        rows = [(*place, str(count)) for place, count in places.items()]
        found.append(Table("Where it was run", (*PLACE, "runs above"), rows))
    return found


def _changes(row: Row, base: Row) -> str:
    """In words, what differs between the settings of an arm and those of the baseline."""
    if row is base:
        return "the baseline"
    changed = differences(_without_seeds(base.trial.config), _without_seeds(row.trial.config))
    settings = [cell.config.flat() for cell in row.trial.cells]
    return ", ".join(f"{key} {_in_words([own[key] for own in settings])}" for key in changed)


def _in_words(values: Sequence[Any]) -> str:
    """The value of a setting; the lowest and highest if it is another one for each seed, such as
    the ratio of a challenge."""
    low, high = (
        (min(values), max(values)) if isinstance(values[0], float) else (values[0], values[0])
    )
    words = [f"{v:.4g}" if isinstance(v, float) else without_folder(str(v)) for v in (low, high)]
    return words[0] if low == high else f"{words[0]} to {words[1]}, by seed"


def _without_seeds(config: Config) -> Config:
    return config.with_(**dict.fromkeys(SEEDS, 0))


def _places(verdict: Verdict) -> dict[tuple[str, ...], int]:
    """Device, software, revision, data and command of the runs that represent their arms, with the
    number of these runs."""
    places: dict[tuple[str, ...], int] = {}
    records = [record for row in verdict.rows for record in row.trial.records]
    for e in (record.environment for record in records if record.environment):
        data = e["data"]
        place = (
            f"{e['device']}, {e['processes']} process{'es' if e['processes'] > 1 else ''}",
            f"normcontrol {e['normcontrol']}, torch {e['packages']['torch']}",
            e["revision"][:12],
            f"{data['folder']}, tokenizer {data['tokenizer']} ({data['digest'][:12]})",
            " ".join(e["command"]),
        )
        places[place] = places.get(place, 0) + 1
    return places


def curve(trial: Trial) -> panels.Curve:
    """A trial's curves, seed by seed."""
    runs = {
        cell.seed: {key: dict(zip(*record.curves[key], strict=True)) for key in panels.MEASURED}
        for cell, record in zip(trial.cells, trial.records, strict=True)
    }
    gains = [gain for record in trial.records if (gain := record.initial_gain) is not None]
    gain = statistics.fmean(gains) if gains else None
    return panels.Curve(trial.name, runs, trial.target(), gain)
