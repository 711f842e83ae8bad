"""The verdict on a study as lines of text, for a terminal. It decides nothing about the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from normcontrol.lab.study.claims import HOW
from normcontrol.lab.study.verdict import Verdict

COUNTS = (1, 3, 6, 9)
"""The numbers of trials for which the expected best is shown."""


def lines(verdict: Verdict) -> Iterator[str]:
    """The verdict, line by line."""
    yield from verdict.sentences()
    if verdict.rows:
        yield ""
        yield from columns([verdict.headings(), *verdict.table()])
        if any(row.trials > 1 for row in verdict.rows):
            headings = ["expected best of k trials, k =", *map(str, COUNTS)]
            yield ""
            yield from columns([headings, *verdict.best_of(COUNTS)])
    if verdict.findings:
        yield ""
        yield HOW
        for says, outcome, numbers, refuted_if in verdict.claims():
            yield f"{outcome.upper():10} {says}"
            yield f"{'':10} Refuted if {refuted_if}."
            if numbers:
                yield f"{'':10} {numbers}"
    if verdict.study.published:
        yield ""
        yield from columns([("published", "paper", "here"), *verdict.published()])
        yield f"What differs here: {verdict.study.differs.get(verdict.scale, '')}."
    if verdict.flags:
        yield ""
        yield from (f"Note: {flag}" for flag in verdict.flags)


def columns(table: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines, each column as wide as its widest cell."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
