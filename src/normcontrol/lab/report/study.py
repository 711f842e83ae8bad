"""A study's report: the page, and the same figures as PNG and PDF for papers."""

from __future__ import annotations

from pathlib import Path

from normcontrol.lab.report import figures as charts
from normcontrol.lab.report.page import Page, Run, Table
from normcontrol.lab.study.cells import Cell
from normcontrol.lab.study.claims import Trial
from normcontrol.lab.study.ledger import Ledger
from normcontrol.lab.study.records import Record
from normcontrol.lab.study.verdict import Verdict, config_of, judge
from normcontrol.lab.training import optimizers as optim

FIGURES = ("figures.png", "figures.pdf")


def write(ledger: Ledger, out: Path) -> Path:
    """Write index.html, figures.png and figures.pdf into ``out``; return the page."""
    out.mkdir(parents=True, exist_ok=True)
    verdict = judge(ledger)
    downloads = {}
    if ledger.study.name == "figure1":
        charts.schedules(out / FIGURES[0], out / FIGURES[1])
    elif verdict.rows:
        charts.figures(
            [curve(trial) for trial in drawn(verdict)], out / FIGURES[0], out / FIGURES[1]
        )
    downloads = {name: (out / name).read_bytes() for name in FIGURES if (out / name).exists()}
    base = verdict.baseline
    page = Page(
        f"{ledger.study.name}, {ledger.scale}",
        [ledger.study.about, *verdict.sentences()],
        runs(ledger, verdict),
        tables(ledger, verdict),
        verdict.flags,
        downloads,
        "the baseline" if base is None else base.trial.name,
    )
    return page.write(out / "index.html")


def drawn(verdict: Verdict) -> list[Trial]:
    """The trials to draw: one for each arm that can be compared, runs that stand in two arms
    once."""
    found: list[Trial] = []
    for row in verdict.rows:
        ids = {record.id for record in row.trial.records}
        if (row is verdict.baseline or row.differences) and not any(
            ids <= {r.id for r in other.records} for other in found
        ):
            found.append(row.trial)
    return found


def runs(ledger: Ledger, verdict: Verdict) -> list[Run]:
    """Every run of the study, those of the trials that stand for their arms drawn first."""
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
        if record is not None and (record.id, cell.arm) not in seen:
            seen.add((record.id, cell.arm))
            found.append(
                _run(cell, record, (record.id, cell.arm) in chosen, (record.id, cell.arm) in bases)
            )
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
    )


def tables(ledger: Ledger, verdict: Verdict) -> list[Table]:
    note = (
        "Each arm by its trial with the most seeds, and of those the best. Differences pair runs "
        "that share initial weights and the order "
        "of the data; ± is half of the 95 % interval (Student's t), s.d. the standard deviation of "
        "the loss over seeds. Detectable: the "
        "difference that four of five such studies would show."
    )
    found = [Table("Results", verdict.headings(), verdict.table(), note)] if verdict.rows else []
    if verdict.findings:
        rows = [
            (claim.says, finding.outcome, finding.numbers, claim.refuted_if)
            for claim, finding in verdict.findings
        ]
        found.append(
            Table(
                "Claims",
                ("claim", "outcome", "numbers", "refuted if"),
                rows,
                "The rules are code of the study, not of this page.",
            )
        )
    if verdict.study.published:
        rows3 = [
            (p.what, f"{p.value:g}", "-" if value is None else f"{value:.4f}")
            for p, value in verdict.published()
        ]
        found.append(
            Table(
                "The paper's numbers",
                ("what", "paper", "here"),
                rows3,
                f"What differs: {verdict.study.differs.get(ledger.scale, '')}.",
            )
        )
    ks = sorted(
        {1, 2, 3, 6, 9} & set(range(1, 1 + max((row.trials for row in verdict.rows), default=0)))
    )
    if len(ks) > 1:
        curves = [
            (row.arm, *(f"{row.best_of[k - 1]:.4f}" if k <= row.trials else "-" for k in ks))
            for row in verdict.rows
        ]
        found.append(Table("Expected best of k trials", ("arm", *(f"k = {k}" for k in ks)), curves))
    return found + _where(verdict)


def _where(verdict: Verdict) -> list[Table]:
    """On what, with what and by which command it was run."""
    if not verdict.rows:
        return []
    places: dict[tuple[str, ...], int] = {}
    for row in verdict.rows:
        for record in row.trial.records:
            e = record.environment
            data = f"{e['data']['folder']} ({e['data']['digest'][:12]})"
            key = (
                e["device"],
                f"torch {e['packages']['torch']}",
                e["revision"][:12],
                data,
                " ".join(e["command"]),
            )
            places[key] = places.get(key, 0) + 1
    rows = [(*key, str(count)) for key, count in places.items()]
    return [
        Table(
            "Where it was run",
            ("device", "torch", "revision", "data", "command", "runs above"),
            rows,
        )
    ]


def curve(trial: Trial) -> charts.Curve:
    """A trial's curves, seed by seed."""
    runs = {
        cell.seed: {key: dict(zip(*record.curves[key], strict=True)) for key in charts.MEASURED}
        for cell, record in zip(trial.cells, trial.records, strict=True)
    }
    config = config_of(trial.records[0])
    # The curve is the matrices' norm; with LayerNorm controlled too, the target is another norm's.
    target = None if config.optim.norm_layers else optim.target_at(config.optim, config.run.steps)
    return charts.Curve(trial.name, runs, target)
