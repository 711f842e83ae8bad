"""What a study showed: a few sentences, a table, what became of each claim, and everything that
weakens it.

It says no more than the runs allow: without several seeds no interval, without equal budgets no
comparison.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from normcontrol.lab.study.cells import Published, Study
from normcontrol.lab.study.claims import (
    NOT_RUN,
    Claim,
    Evidence,
    Finding,
    Trial,
    difference,
    edges_of,
)
from normcontrol.lab.study.ledger import Ledger
from normcontrol.lab.study.records import Record
from normcontrol.lab.study.statistics import Difference, best_of, steps_to
from normcontrol.lab.training.config import Config

BUDGET = ("steps", "tokens_per_step", "context", "layers", "heads", "width")
"""What must be the same for arms to be compared, beside the data."""


@dataclass(frozen=True)
class Row:
    """An arm, by the trial that stands for it."""

    trial: Trial
    trials: int
    bad: int
    """Runs of the arm that diverged or failed."""
    inside: str
    """Whether the best of its trials lies inside the grid."""
    best_of: list[float]
    differences: dict[str, Difference] = field(default_factory=dict)
    steps_to: float | None = None
    """Steps until it reached the baseline's final validation loss, of all steps."""

    @property
    def arm(self) -> str:
        return self.trial.arm


@dataclass(frozen=True)
class Verdict:
    study: Study
    scale: str
    rows: list[Row]
    flags: list[str]
    findings: list[tuple[Claim, Finding]]
    losses: list[str]
    """The keys of the validation losses, the first one's split belonging to the training data."""

    @property
    def baseline(self) -> Row | None:
        return next(
            (row for row in self.rows if row.arm == self.study.baseline),
            self.rows[0] if self.rows else None,
        )

    def sentences(self) -> list[str]:
        """Two or three sentences: the main comparison, how well it was tuned, and what became of
        the claims."""
        base = self.baseline
        if base is None:
            return ["Nothing was run yet."]
        said = []
        compared = [row for row in self.rows if row is not base and "val_loss" in row.differences]
        # The first of another method: a second decay of the same one is not what a study is about.
        for row in sorted(compared, key=lambda r: _method(r) == _method(base))[:1]:
            said += [_comparison(row, base), _tuning(row, base)]
        if not compared:
            said.append(
                f"{base.trial.name} ended at a validation loss of {base.trial.mean():.4f}; no "
                "other arm can be compared with it yet."
            )
        told = [(claim, finding) for claim, finding in self.findings if finding.outcome != NOT_RUN]
        if told:
            by: dict[str, list[str]] = {}
            for claim, finding in told:
                by.setdefault(finding.outcome, []).append(claim.name)
            said.append(
                "Claims "
                + "; ".join(f"{outcome}: {', '.join(names)}" for outcome, names in by.items())
                + "."
            )
        return said

    def headings(self) -> list[str]:
        more = [
            f"{what} {key.removeprefix('val_loss_')}"
            for key in self.losses[1:]
            for what in ("loss on", "difference on")
        ]
        tuning = ["steps to baseline", "detectable", "trials", "optimum", "diverged, failed"]
        return ["arm", "trial", "n", "val loss", "s.d.", "minus baseline", *more, "ratio", *tuning]

    def table(self) -> list[list[str]]:
        return [self._cells(row) for row in self.rows]

    def _cells(self, row: Row) -> list[str]:
        trial, main = row.trial, row.differences.get("val_loss")
        elsewhere = [
            text
            for key in self.losses[1:]
            for text in (_number(trial.mean(key)), str(row.differences.get(key, "-")))
        ]
        steps = trial.cells[0].config.run.steps
        return [
            row.arm,
            trial.cells[0].trial,
            str(len(trial.seeds)),
            _number(trial.mean()),
            "-" if (spread := trial.spread()) is None else f"{spread:.4f}",
            str(main or "-"),
            *elsewhere,
            _number(trial.mean("ratio"), 3),
            "-" if row.steps_to is None else f"{row.steps_to / steps:.0%}",
            "-" if main is None or main.detectable is None else f"{main.detectable:.4f}",
            str(row.trials),
            row.inside,
            str(row.bad),
        ]

    def published(self) -> list[tuple[Published, float | None]]:
        """The paper's numbers, and ours."""
        found = {row.arm: row.trial for row in self.rows}
        return [
            (p, found[p.arm].mean(p.key) if p.arm in found else None) for p in self.study.published
        ]


def judge(ledger: Ledger) -> Verdict:
    """The verdict on what a study's folder holds by now."""
    study, done = ledger.study, ledger.results()
    cells = ledger.cells(done)
    evidence = Evidence(cells, done)
    flags = list(done.problems)
    known = {record.id for cell in cells if (record := done.of(cell)) is not None}
    foreign = len(done) - len(known)
    if foreign:
        flags.append(
            f"{foreign} files in {ledger.out} are of other settings than the study's, and are left "
            "out."
        )
    missing = sum(done.of(cell) is None for cell in cells)
    if missing:
        flags.append(f"{missing} cells are not run yet.")
    flags += _mixed(done[i] for i in known)
    losses = sorted(
        {key for i in known for key in done[i].final if key.startswith("val_loss")}
    ) or ["val_loss"]
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    chosen = {arm: trial for arm in arms if (trial := evidence.chosen(arm)) is not None}
    base = chosen.get(study.baseline, next(iter(chosen.values()), None))
    rows = []
    for arm, trial in chosen.items():
        trials = evidence.trials(arm)
        bad = sum(not record.good for t in trials for record in t.records)
        row = Row(trial, len(trials), bad, inside(trials), best_of([t.values()[0] for t in trials]))
        if base is not None and trial is not base:
            unlike = differing(trial, base)
            if unlike:
                flags.append(f"{arm} is not compared with {base.arm}: {unlike}.")
            else:
                row = _compared(row, base, losses)
        rows.append(row)
    flags += _counts(rows, base)
    flags += [flag for row in rows if (flag := _better(row.trial, evidence))]
    return Verdict(
        study,
        ledger.scale,
        rows,
        flags,
        [(claim, claim.rule(evidence)) for claim in study.claims],
        losses,
    )


def _mixed(records: Iterable[Record]) -> list[str]:
    """Runs that come from several devices or revisions of the source can differ in their
    rounding."""
    environments = [record.environment for record in records]
    flags = []
    for what, key in (("devices", "device"), ("revisions of the source", "revision")):
        found = sorted({str(e.get(key))[:40].rstrip("+") for e in environments})
        if len(found) > 1:
            flags.append(
                f"The runs are of {len(found)} {what}: {', '.join(name[:24] for name in found)}."
            )
    return flags


def _compared(row: Row, base: Trial, losses: Iterable[str]) -> Row:
    found = {key: d for key in losses if (d := difference(row.trial, base, key)) is not None}
    level = base.mean()
    reached = [_steps(record, level) for record in row.trial.records if record.good]
    steps = (
        statistics.fmean(s for s in reached if s is not None)
        if reached and None not in reached
        else None
    )
    return Row(row.trial, row.trials, row.bad, row.inside, row.best_of, found, steps)


def _steps(record: Record, level: float) -> float | None:
    return steps_to(*record.curves["val_loss"], level)


def differing(trial: Trial, base: Trial) -> str:
    """What else than the method differs between two arms: their budget or their data."""
    mine, theirs = trial.cells[0].config, base.cells[0].config
    unlike = [
        f"{key} {mine.flat()[key]} against {theirs.flat()[key]}"
        for key in BUDGET
        if mine.flat()[key] != theirs.flat()[key]
    ]
    digests = [
        {r.environment.get("data", {}).get("digest") for r in t.records} for t in (trial, base)
    ]
    if digests[0] != digests[1]:
        unlike.append("other data")
    return ", ".join(unlike)


def inside(trials: list[Trial]) -> str:
    """Whether the best trial lies inside the grid, for every setting of which three or more values
    were tried."""
    best = min(trials, key=Trial.mean, default=None)
    if best is None or not math.isfinite(best.mean()):
        return "none finished"
    edges = edges_of(trials)
    if edges is None:
        return "not tuned"
    return (
        f"at the edge: {', '.join(f'{key}={value:g}' for key, value in edges.items())}"
        if edges
        else "inside"
    )


def _counts(rows: list[Row], base: Trial | None) -> list[str]:
    flags = []
    for row in rows:
        if base is not None and row.trial is base:
            others = [r for r in rows if r.differences and r.trials != row.trials]
            if others:
                counts = ", ".join(f"{r.arm} {r.trials}" for r in others)
                flags.append(f"Trials are not equal: {base.arm} had {row.trials}, {counts}.")
    if base is not None and len(base.seeds) == 1:
        flags.append("One seed gives no interval: differences are of single runs.")
    bad = sum(row.bad for row in rows)
    if bad:
        flags.append(
            f"{bad} runs diverged or failed; they are counted in the table, and never chosen."
        )
    return flags


def _better(chosen: Trial, evidence: Evidence) -> str | None:
    found = evidence.better(chosen)
    if found is None:
        return None
    trial, ahead = found
    stands = (
        f"{chosen.arm} is compared by {chosen.cells[0].trial}, which has the most seeds "
        f"({len(chosen.seeds)})"
    )
    return (
        f"{stands}; {trial.cells[0].trial} ended {ahead:.4f} lower with the {len(trial.seeds)} "
        "it has."
    )


def _comparison(row: Row, base: Row) -> str:
    found = row.differences["val_loss"]
    how = "lower" if found.mean < 0 else "higher"
    text = (
        f"{row.trial.name} ended at a validation loss {abs(found.mean):.4f} {how} than "
        f"{base.trial.name} ({found}"
    )
    if found.half is None:
        return text + "; one pair of runs, so not shown)."
    shown = (
        "shown"
        if found.shown
        else f"not shown; {found.detectable:.4f} would have been detected in four of five such "
        "studies"
    )
    return f"{text}, 95 % interval, n = {found.n} paired seeds): {shown}."


def _tuning(row: Row, base: Row) -> str:
    if row.trials == base.trials == 1:
        return "Neither was tuned: each had one trial."
    count = (
        f"Each had {base.trials} trials"
        if row.trials == base.trials
        else f"They had {row.trials} and {base.trials} trials"
    )
    return f"{count}; the best of {row.arm} is {_where(row)}, that of {base.arm} {_where(base)}."


def _where(row: Row) -> str:
    return {
        "inside": "inside its grid",
        "not tuned": "of too few to say whether it is inside a grid",
    }.get(row.inside, row.inside)


def _method(row: Row) -> str:
    return row.trial.cells[0].config.optim.optimizer


def _number(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "diverged"


def lines(verdict: Verdict) -> Iterable[str]:
    """The verdict as text."""
    yield from verdict.sentences()
    if verdict.rows:
        yield ""
        yield from columns([verdict.headings(), *verdict.table()])
        curves = [
            [
                row.arm,
                *(_number(row.best_of[k - 1]) if k <= row.trials else "-" for k in (1, 3, 6, 9)),
            ]
            for row in verdict.rows
        ]
        if any(row.trials > 1 for row in verdict.rows):
            yield ""
            yield from columns([["expected best of k trials, k =", "1", "3", "6", "9"], *curves])
    if verdict.findings:
        yield ""
        for claim, finding in verdict.findings:
            yield f"{finding.outcome.upper():10} {claim.says}"
            yield f"{'':10} Refuted if {claim.refuted_if}."
            if finding.numbers:
                yield f"{'':10} {finding.numbers}"
    if verdict.study.published:
        yield ""
        ours = [
            [p.what, f"{p.value:g}", "-" if value is None else f"{value:.4f}"]
            for p, value in verdict.published()
        ]
        yield from columns([["published", "paper", "here"], *ours])
        yield f"What differs here: {verdict.study.differs.get(verdict.scale, '')}."
    if verdict.flags:
        yield ""
        yield from (f"Note: {flag}" for flag in verdict.flags)


def columns(table: list[list[str]]) -> list[str]:
    """A table as lines, each column as wide as it must be."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def config_of(record: Record) -> Config:
    """The config that a record stores."""
    kept = Config().flat()
    return Config().with_(
        **{
            key: tuple(v) if isinstance(v, list) else v
            for key, v in record.config.items()
            if key in kept
        }
    )
