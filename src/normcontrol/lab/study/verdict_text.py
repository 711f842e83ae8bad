"""The verdict on a study as lines of text, for a terminal. It decides nothing about the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from normcontrol.lab.study.claims import HOW
from normcontrol.lab.study.verdict import Verdict
from normcontrol.lab.text import columns, wrapped


def lines(verdict: Verdict, width: int | None = None) -> Iterator[str]:
    """The verdict, line by line, for a terminal of this width."""
    for sentence in verdict.sentences():
        yield from wrapped(sentence, width)
    if verdict.rows:
        yield ""
        yield from columns([verdict.headings(), *verdict.table()], width)
        if verdict.counts:
            headings = ["expected best of k trials, k =", *map(str, verdict.counts)]
            yield ""
            yield from columns([headings, *verdict.best_of()], width)
    if verdict.findings:
        yield ""
        yield from wrapped(HOW, width)
        for says, outcome, numbers, refuted_if in verdict.claims():
            said = [says, f"Refuted if {refuted_if}.", *([numbers] if numbers else [])]
            inner = None if width is None else max(width - 11, 12)
            for i, line in enumerate(line for text in said for line in wrapped(text, inner)):
                yield f"{'' if i else outcome.upper():10} {line}"
    if verdict.study.published:
        yield ""
        yield from columns([("published", "paper", "here"), *verdict.published()], width)
        differs = verdict.study.differs.get(verdict.scale, "")
        yield from wrapped(f"What differs here: {differs}.", width)
    if verdict.flags:
        yield ""
        for flag in verdict.flags:
            yield from wrapped(f"Note: {flag}", width)
