"""The verdict on a study: sentences, a table, the outcome of each claim, and what weakens them.

It says no more than the runs allow: without several seeds there is no interval, arms with unequal
budgets are not compared, and nothing is shown about arms that were not tuned alike (see
``comparison.py``). How it is presented is decided elsewhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from normcontrol.lab.study.cells import Published, Study
from normcontrol.lab.study.claims import (
    NOT_RUN,
    NOT_SHOWN,
    Claim,
    Finding,
    chosen_by,
    is_lower,
    together,
)
from normcontrol.lab.study.comparison import (
    Choice,
    Comparison,
    choose,
    differing,
    in_words,
    named,
    seeds_in_words,
)
from normcontrol.lab.study.evidence import Evidence, Trial
from normcontrol.lab.study.ledger import Ledger
from normcontrol.lab.study.records import Record
from normcontrol.lab.study.statistics import Difference, best_of, steps_to

ONE_SEED = "One seed gives no interval: differences are of single runs."


@dataclass(frozen=True)
class Row:
    """An arm, represented by one of its trials."""

    choice: Choice
    bad: int
    """Runs of the arm that diverged or failed."""
    best_of: list[float]
    """The expected lowest loss of 1, 2, ... of its trials."""
    comparison: Comparison | None = None
    """That with the baseline; None if they cannot be compared."""
    differences: dict[str, Difference] = field(default_factory=dict)
    """The paired difference to the baseline, for each validation loss; empty if they cannot be
    compared."""
    steps_to: float | None = None
    """Steps until it reached the baseline's final validation loss."""

    @property
    def trial(self) -> Trial:
        return self.choice.trial

    @property
    def trials(self) -> int:
        """How many trials the arm has."""
        return len(self.choice.trials)

    @property
    def inside(self) -> str:
        """In words, whether the best trial lies inside the grid, for every setting of which several
        values were tried."""
        if not any(math.isfinite(trial.mean()) for trial in self.choice.trials):
            return "none finished"
        edges = self.choice.edges()
        if edges is None:
            return "not tuned"
        return f"at the edge: {in_words(edges)}" if edges else "inside"

    @property
    def arm(self) -> str:
        return self.trial.arm

    @property
    def difference(self) -> Difference | None:
        """The paired difference of the validation loss to the baseline."""
        return self.differences.get("val_loss")


def _mean(trial: Trial, key: str = "val_loss", digits: int = 4) -> str:
    """The mean of a final value over the seeds; if some of them have none, how their runs ended."""
    return _number(trial.mean(key), [trial], digits)


def _number(value: float, trials: Iterable[Trial], digits: int = 4) -> str:
    ended = " and ".join(dict.fromkeys(word for trial in trials for word in trial.unfinished))
    return f"{value:.{digits}f}" if math.isfinite(value) else ended or "-"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _share_of_steps(row: Row) -> str:
    share = None if row.steps_to is None else row.steps_to / row.trial.config.run.steps
    return _or_dash(share, ".0%")


COLUMNS: dict[str, Callable[[Row], str]] = {
    "arm": lambda row: row.arm,
    "trial": lambda row: row.trial.settings,
    "n": lambda row: str(len(row.trial.seeds)),
    "val loss": lambda row: _mean(row.trial),
    "s.d.": lambda row: _or_dash(row.trial.spread(), ".4f"),
    "minus baseline": lambda row: str(row.difference or "-"),
    "pairs": lambda row: str(row.difference.n) if row.difference else "-",
    "ratio": lambda row: _mean(row.trial, "ratio", 3),
    "norm ratio": lambda row: _mean(row.trial, "ratio", 3),
    "gain": lambda row: _mean(row.trial, "gain", 3),
    "target": lambda row: _or_dash(row.trial.target(), ".3f"),
    "skipped": lambda row: str(sum(record.skipped for record in row.trial.records)),
    "steps to baseline": _share_of_steps,
    "detectable": lambda row: _or_dash(getattr(row.difference, "detectable", None), ".4f"),
    "trials": lambda row: str(row.trials),
    "optimum": lambda row: row.inside,
    "diverged, failed": lambda row: str(row.bad),
}
"""The columns of a table of arms, by their headings."""

COUNTS = (1, 2, 3, 6, 9)
"""The numbers of trials for which the expected best is shown, if there are so many."""

USUAL = (
    *("arm", "trial", "n", "val loss", "s.d.", "minus baseline", "pairs", "ratio"),
    *("steps to baseline", "detectable", "trials", "optimum", "diverged, failed"),
)
"""The columns that a study has unless its story names others."""


@dataclass(frozen=True)
class Verdict:
    """What a study showed."""

    study: Study
    scale: str
    rows: list[Row]
    flags: list[str]
    """What weakens it."""
    findings: list[tuple[Claim, Finding]]
    losses: list[str]
    """The keys of the validation losses. The first is that of the data trained on."""

    @property
    def baseline(self) -> Row | None:
        return next(
            (row for row in self.rows if row.arm == self.study.baseline),
            self.rows[0] if self.rows else None,
        )

    @property
    def title(self) -> str:
        story = self.study.story
        return story.title if story else f"{self.study.name}, {self.scale}"

    def sentences(self) -> list[str]:
        """The main comparison, how well it was tuned, and the outcomes of the claims."""
        base = self.baseline
        if base is None:
            return ["Nothing was run yet."]
        if self.study.story:
            return self.study.story.sentences(self)
        found = []
        compared = [row for row in self.rows if row is not base and row.difference]
        # Arms with another method come before arms with the baseline's at other settings.
        for row in sorted(compared, key=lambda r: _method(r) == _method(base))[:1]:
            found += [_comparison(row, base, bool(self.study.claims)), _tuning(row, base)]
        if not compared:
            loss = base.trial.mean()
            ended = (
                f"ended at a validation loss of {loss:.4f}"
                if math.isfinite(loss)
                else _mean(base.trial)
            )
            found.append(f"{base.trial.name} {ended}; no other arm can be compared with it yet.")
        by: dict[str, list[str]] = {}
        for claim, finding in self.findings:
            if finding.outcome != NOT_RUN:
                by.setdefault(finding.outcome, []).append(claim.name)
        if by:
            outcomes = (f"{outcome}: {', '.join(names)}" for outcome, names in by.items())
            found.append(f"Claims {'; '.join(outcomes)}.")
        return found

    def headings(self) -> list[str]:
        return list(self._columns())

    def table(self) -> list[list[str]]:
        columns = self._columns().values()
        return [[column(row) for column in columns] for row in self.rows]

    def _columns(self) -> dict[str, Callable[[Row], str]]:
        """The columns of the study; beside the difference, those of the other validation losses."""
        columns = {}
        for heading in self.study.story.columns if self.study.story else USUAL:
            columns[heading] = COLUMNS[heading]
            if heading == "minus baseline":
                for key in self.losses[1:]:
                    columns |= _other_loss(key)
        return columns

    def claims(self) -> list[tuple[str, str, str, str]]:
        """For each claim: the claim, its outcome, the numbers behind it, and what refutes it."""
        return [(c.says, found.outcome, found.text(), c.refuted_if) for c, found in self.findings]

    def published(self) -> list[tuple[str, str, str]]:
        """For each published number: what it is, the paper's value, and ours."""
        trials = {row.arm: row.trial for row in self.rows}

        def ours(p: Published) -> float | None:
            return trials[p.arm].mean(p.key) if p.arm in trials else None

        return [(p.what, f"{p.value:g}", _or_dash(ours(p), ".4f")) for p in self.study.published]

    @property
    def counts(self) -> list[int]:
        """The numbers of trials for which the expected best is shown; none if no arm has two."""
        most = max((row.trials for row in self.rows), default=0)
        return [k for k in COUNTS if k <= most] if most > 1 else []

    def best_of(self) -> list[list[str]]:
        """For each arm with several trials, the expected lowest loss of k of them, for each k of
        ``counts``."""
        return [
            [
                row.arm,
                *(
                    _number(row.best_of[k - 1], row.choice.trials) if k <= row.trials else "-"
                    for k in self.counts
                ),
            ]
            for row in self.rows
            if row.trials > 1
        ]


def _other_loss(key: str) -> dict[str, Callable[[Row], str]]:
    name = key.removeprefix("val_loss_")
    return {
        f"loss on {name}": lambda row: _mean(row.trial, key),
        f"difference on {name}": lambda row: str(row.differences.get(key, "-")),
    }


def judge(ledger: Ledger) -> Verdict:
    """The verdict on the results that a study's folder has by now."""
    study, done = ledger.study, ledger.results()
    cells = ledger.cells(done)
    evidence = Evidence(cells, done)
    records = {record.id: record for cell in cells if (record := done.of(cell)) is not None}
    flags = [*done.problems, *_incomplete(ledger, evidence, len(records))]
    flags += _mixed(records.values())
    found = {key for r in records.values() for key in r.final if key.startswith("val_loss")}
    losses = sorted(found) or ["val_loss"]
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    chosen = {arm: choice for arm in arms if (choice := choose(evidence.trials(arm)))}
    base = chosen.get(study.baseline, next(iter(chosen.values()), None))
    rows = []
    apart: dict[str, list[str]] = {}
    for arm, choice in chosen.items():
        bad = sum(not record.good for t in choice.trials for record in t.records)
        row = Row(choice, bad, best_of(choice.singly()))
        if base is not None and choice is not base:
            unequal = differing(choice.trial, base.trial)
            if not unequal:
                row = _compared(row, base, losses)
            if row.difference is None:
                why = unequal or Comparison(choice, base).untested()
                apart.setdefault(f"not compared with {base.arm}: {why}.", []).append(arm)
        rows.append(row)
    flags += [f"{named(some, 'is', 'are')} {why}" for why, some in apart.items()]
    flags += _counts(rows, base)
    flags += [flag for row in rows if (flag := _better(row.choice))]
    findings = together(study.claims, evidence)
    return Verdict(study, ledger.scale, rows, flags, findings, losses)


def _incomplete(ledger: Ledger, evidence: Evidence, known: int) -> list[str]:
    """Flags for files that do not belong to the study, and for cells without a file."""
    flags = []
    foreign = len(evidence.done) - known
    if foreign:
        files = "1 file" if foreign == 1 else f"{foreign} files"
        flags.append(f"Left out: {files} in {ledger.out} of other settings than the study's.")
    missing = sum(evidence.done.of(cell) is None for cell in evidence.cells)
    if missing:
        flags.append(f"{missing} {'cell is' if missing == 1 else 'cells are'} not run yet.")
    return flags


def _mixed(records: Iterable[Record]) -> list[str]:
    """Flags for runs of several devices or revisions of the source, whose rounding can differ."""
    environments = [record.environment for record in records if record.environment]
    flags = []
    for what, key in (("devices", "device"), ("revisions of the source", "revision")):
        found = sorted({str(e.get(key))[:40].rstrip("+") for e in environments})
        if len(found) > 1:
            flags.append(
                f"The runs are of {len(found)} {what}: {', '.join(name[:24] for name in found)}."
            )
    return flags


def _compared(row: Row, base: Choice, losses: Iterable[str]) -> Row:
    """The row with its differences to the baseline."""
    compared = Comparison(row.choice, base)
    found = {key: d for key in losses if (d := compared.difference(key)) is not None}
    curves = [record.curves["val_loss"] for record in row.trial.records if record.good]
    level = base.trial.mean()
    reached = [steps_to(steps, losses, level) for steps, losses in curves if math.isfinite(level)]
    in_all = [steps for steps in reached if steps is not None]
    mean = statistics.fmean(in_all) if in_all and len(in_all) == len(reached) else None
    return replace(row, comparison=compared, differences=found, steps_to=mean)


def _counts(rows: list[Row], base: Choice | None) -> list[str]:
    """Flags for unequal numbers of trials, for a single seed, and for runs that diverged or
    failed."""
    flags = []
    if base is not None:
        trials = len(base.trials)
        others = [row for row in rows if row.differences and row.trials != trials]
        if others:
            by: dict[int, list[str]] = {}
            for row in others:
                by.setdefault(row.trials, []).append(row.arm)
            counts = ", ".join(f"{named(arms)} {n}" for n, arms in by.items())
            flags.append(f"Trials are not equal: {base.arm} had {trials}, {counts}.")
        if len(base.trial.seeds) == 1:
            flags.append(ONE_SEED)
    bad = sum(row.bad for row in rows)
    if bad:
        runs = (
            "1 run diverged or failed; it is"
            if bad == 1
            else f"{bad} runs diverged or failed; they are"
        )
        flags.append(f"{runs} counted in the table, and never chosen.")
    return flags


def _better(choice: Choice) -> str | None:
    """A flag for an arm of which another trial did better where the chosen one is tested."""
    found = choice.ahead(choice.fresh)
    if found is None:
        return None
    trial, seeds, less = found
    return (
        f"{choice.arm} is compared by {choice.trial.settings}, with {len(choice.trial.seeds)} "
        f"seeds; {trial.settings}, with {len(trial.seeds)}, ended {-less.mean:.4f} lower in "
        f"{seeds_in_words(seeds)}."
    )


def _comparison(row: Row, base: Row, has_claims: bool) -> str:
    """The difference of two arms. Claims are tested together: what is shown by itself need not be
    shown among them."""
    found, compared = row.differences["val_loss"], row.comparison
    assert compared is not None
    how = "lower" if found.mean < 0 else "higher"
    text = (
        f"{row.trial.name} ended at a validation loss {abs(found.mean):.4f} {how} than "
        f"{base.trial.name} ({found}"
    )
    unfair = compared.unfair()
    also = "".join(f"; {reason}" for reason in unfair)
    if found.half is None:
        return f"{text}; one pair of runs{chosen_by(compared)}, so not shown{also})."
    text += f", 95 % interval, n = {found.n} paired seeds{chosen_by(compared)})"
    if not found.shown:
        return (
            f"{text}: not shown; {found.detectable:.4f} would have been detected in four of five "
            f"such studies{also}."
        )
    if unfair:
        return f"{text}: not shown, because {'; '.join(unfair)}."
    if is_lower(compared).outcome == NOT_SHOWN:
        return f"{text}: not shown, because another trial of the arm that ended higher did better."
    return f"{text}: shown{' by itself' if has_claims else ''}."


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
    return row.trial.config.optim.optimizer
