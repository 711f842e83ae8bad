"""Writes docs/results.md, a page for every study under docs/results/, and their figures, from the
records under results/.

Adding a study takes its folder under results/ and ``python docs/make_results.py``. What is written
by hand lies beside the records, and is optional for a study:

- ``results/STUDY/notes.md``: its first paragraph is the question that the study asks, the rest is
  what it showed. Links are those of a file in that folder.
- ``results/notes.md``: the page of all results. ``<!-- overview -->`` stands for the table below,
  ``<!-- index -->`` for the list of all studies, and ``**outcome** (study: claim)`` in a table for
  a link to that claim.
- A row of ``OVERVIEW``, for a comparison of AdamWN with AdamW.

All other words and numbers come from the records; ``docs/studies.md`` has the links to the plans.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from normcontrol.lab.data.batches import padded
from normcontrol.lab.report import panels
from normcontrol.lab.report.study_page import curve, drawn
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.study.ledger import STUDY
from normcontrol.lab.study.records import Record
from normcontrol.lab.study.verdict import Verdict, judge
from normcontrol.lab.training.config import Model
from normcontrol.lab.training.model import GPT

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FIGURES = "figures/results"

OVERVIEW = (
    ("growth-tiny", "better with more steps", "200", "rises", "48 trials each"),
    ("settle-tiny", "lower", "600", "constant", "6 and 7 trials"),
    ("search-tiny", "lower", "600", "constant", "48 trials each"),
    ("rise-tiny", "lower", "600", "rises", "48 trials each"),
    ("rounds-tiny", "lower", "600", "constant, text seen ten times", "48 trials each"),
    ("follow-tiny", "level", "600", "the norm of an AdamW run", "AdamW's settings"),
    ("walk-tiny", "lower", "600", "AdamW's end, as a random walk", "AdamW's settings"),
    ("tuned-walk-tiny", "level", "600", "grows as a random walk", "48 trials each"),
    ("growth-tiny", "level in long runs", "1,800", "rises", "48 trials each"),
    ("longest-tiny", "lower in the longest runs", "5,400", "rises", "18 and 17 trials"),
    ("catchup-tiny", "the paper's", "5,400", "AdamW's end, the paper's ramp", "AdamW's settings"),
    ("catchup-tiny", "level", "5,400", "AdamW's end, as a random walk", "AdamW's settings"),
    ("predicted-tiny", "level, recorded", "5,400", "the norm of an AdamW run", "AdamW's settings"),
    ("predicted-tiny", "level, predicted", "5,400", "AdamW's norm, predicted", "AdamW's settings"),
    ("larger-tiny", "lower", "600", "constant", "6 trials each"),
    ("larger-tiny", "level, rising", "600", "rises", "6 trials each"),
    ("matched-tiny", "the paper's", "600", "AdamW's end, the paper's ramp", "AdamW's settings"),
    ("matched-tiny", "level", "600", "AdamW's end, as a random walk", "AdamW's settings"),
    ("settle-small", "lower", "800", "constant", "6 trials each"),
    ("confirm-small", "lower", "800", "constant", "as settle chose"),
    ("gpt2-small", "the paper's target", "3,050", "ratio 2", "nothing"),
    ("gpt2-small", "gain", "3,050", "gain 0.8", "nothing"),
)
"""Comparisons of AdamWN with AdamW: study and claim, and what the records do not say in few words:
the steps, the target, what was tuned."""

OUTCOMES = ("supported", "refuted", "not shown", "not run")


@dataclass(frozen=True)
class Shown:
    """A study as the pages show it."""

    folder: Path
    study: str
    verdict: Verdict
    asks: str
    """The question that it asks, or what it runs if nobody wrote a question."""
    notes: str
    """What it showed, as it was written by hand."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def records(self) -> list[Record]:
        """The runs that it counts, each once."""
        trials = [trial for row in self.verdict.rows for trial in row.choice.trials]
        return list({r.id: r for trial in trials for r in trial.records}.values())

    @property
    def weights(self) -> str:
        """The number of weights of the model of most runs, and the range if there are others."""
        sizes = Counter(size_of(record) for record in self.records)
        if not sizes:
            return "-"
        most, low, high = sizes.most_common(1)[0][0], min(sizes), max(sizes)
        return millions(most) + (f" ({millions(low)} to {millions(high)})" if low < high else "")


def shown(folder: Path) -> Shown:
    ledger = open_folder(folder)
    verdict = judge(ledger)
    path = folder / "notes.md"
    written = path.read_text(encoding="utf-8") if path.exists() else ""
    written = re.sub(
        r"\]\(\.\./\.\./docs/(results/)?", lambda m: "](" + "../" * (not m[1]), written
    )
    question, _, notes = written.strip().partition("\n\n")
    asks = " ".join(question.split()) or verdict.study.about
    return Shown(folder, ledger.name, verdict, asks, notes)


def size_of(record: Record) -> int:
    keys = ("layers", "heads", "width", "context", "bias")
    shape = Model(**{key: record.config[key] for key in keys if key in record.config})
    return size(shape, padded(record.environment["data"]["vocab"]))


@cache
def size(shape: Model, vocab: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(shape, vocab).parameters())


def millions(weights: int) -> str:
    return f"{weights / 1e6:.{0 if weights >= 1e7 else 2 if weights < 1e6 else 1}f} M"


def studies(results: Path) -> list[Shown]:
    return [shown(path.parent) for path in sorted(results.glob(f"*/{STUDY}"))]


def pages(results: Path, found: Sequence[Shown]) -> dict[str, str]:
    """Every page by its path under docs/."""
    made = {"results.md": front(results, found)}
    return made | {f"results/{one.name}.md": "\n".join(page(one)) for one in found}


def front(results: Path, found: Sequence[Shown]) -> str:
    """The page of all results."""
    text = (results / "notes.md").read_text(encoding="utf-8").replace("](../docs/", "](")
    text = re.sub(r"^\|.*\*\*.*$", lambda row: linked(row[0]), text, flags=re.M)
    text = text.replace("<!-- overview -->\n", overview(found))
    return text.replace("<!-- index -->\n", index(found))


def linked(row: str) -> str:
    """A row of a table by question, with links to the claims and every outcome in a line."""
    claim = r"(\*\* )\(([\w-]+): ([^)]+)\)(; )?"

    def link(found: re.Match[str]) -> str:
        start, study, name, more = found.groups()
        return f"{start}([{study}](results/{study}.md#claims), {name})" + "<br>" * bool(more)

    return re.sub(claim, link, row)


def overview(found: Sequence[Shown]) -> str:
    """AdamWN minus AdamW, study by study."""
    headings = ["weights", "steps", "target", "tuned", "AdamWN minus AdamW", "seeds", "claim"]
    by_name = {one.name: one for one in found}
    rows = []
    for name, wanted, *about in OVERVIEW:
        one = by_name[name]
        (finding,) = (found for claim, found in one.verdict.findings if claim.name == wanted)
        numbers = re.search(r"([+-]\d\.\d+(?: ± \d\.\d+)?).*n = (\d+)", finding.text())
        assert numbers is not None
        says = f"[{name}](results/{name}.md), {wanted}: {finding.outcome}"
        rows.append((one.weights, *about, *numbers.groups(), says))
    return table(headings, rows)


def index(found: Sequence[Shown]) -> str:
    """All studies: what each asks, and how its claims came out."""
    rows = []
    for one in found:
        counts = Counter(finding.outcome for _, finding in one.verdict.findings)
        outcomes = ", ".join(f"{counts[key]} {key}" for key in OUTCOMES if counts[key])
        link = f"[{one.name}](results/{one.name}.md)"
        rows.append((link, one.asks, one.weights, f"{len(one.records)}", outcomes or "no claim"))
    return table(("study", "what it asks", "weights", "runs", "claims"), rows)


def page(one: Shown) -> Iterator[str]:
    """The page of a study."""
    name, verdict = one.name, one.verdict
    yield f"# {name}\n\n{one.asks}\n"
    if one.asks != verdict.study.about:
        yield f"*What it runs:* {verdict.study.about}\n"
    yield " · ".join(["[All results](../results.md)", *plan(one.study)]) + "\n"
    if one.notes:
        yield f"## What it showed\n\n{one.notes}\n"
    yield "## Verdict\n"
    yield "".join(f"- {sentence}\n" for sentence in verdict.sentences())
    if verdict.rows:
        yield f"![The four panels of {name}](../{FIGURES}/{name}.png)\n"
        yield table(verdict.headings(), verdict.table())
    if verdict.findings:
        yield "## Claims\n"
        names = [claim.name for claim, _ in verdict.findings]
        rows = [
            (f"*{claim}*: {says}", f"**{outcome}**", *rest)
            for claim, (says, outcome, *rest) in zip(names, verdict.claims(), strict=True)
        ]
        yield table(("claim", "outcome", "numbers", "refuted if"), rows)
    if verdict.study.published:
        yield "## The paper's numbers\n"
        yield table(("published", "paper", "here"), verdict.published())
        yield f"What differs here: {verdict.study.differs.get(verdict.scale, '')}.\n"
    if verdict.flags:
        yield "## What weakens it\n"
        yield "".join(f"- {flag.replace(f'{one.folder.parent}/', '')}\n" for flag in verdict.flags)
    yield "## How it was run\n"
    yield from provenance(one.records)


def plan(study: str) -> list[str]:
    """The link to the plan of a study, if docs/studies.md has one."""
    listed = (DOCS / "studies.md").read_text(encoding="utf-8")
    found = re.search(rf"\[`{study}`\]\(([^)]+)\)", listed)
    return [f"[Plan and full results](../{found[1]})"] if found else []


def provenance(records: Iterable[Record]) -> Iterator[str]:
    """By which commands, on which machine."""
    seen: dict[tuple[str, str], dict[str, None]] = {}
    for record in records:
        e = record.environment
        command = re.sub(
            " --(limit-minutes|only)( [^-]\\S*)+", "", " ".join(e["command"])
        )  # how much of it at a time
        seen.setdefault((e["device"], e["packages"]["torch"]), {})[command] = None
    for (device, version), commands in seen.items():
        lines = "\n".join(commands)
        yield f"On {device} with torch {version} by\n\n```console\n{lines}\n```\n"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return (
        "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        + "\n"
    )


def main() -> None:
    found = studies(ROOT / "results")
    made = pages(ROOT / "results", found)
    (DOCS / "results").mkdir(exist_ok=True)
    for path in (DOCS / "results").glob("*.md"):
        if f"results/{path.name}" not in made:
            path.unlink()
    for name, text in made.items():
        (DOCS / name).write_text(text, encoding="utf-8")
        print(name)
    (DOCS / FIGURES).mkdir(parents=True, exist_ok=True)
    for one in found:
        if trials := drawn(one.verdict):
            panels.draw([curve(trial) for trial in trials], DOCS / FIGURES / f"{one.name}.png")
            print(f"{FIGURES}/{one.name}.png")


if __name__ == "__main__":
    main()
