"""Reads the pages of results, which are made from the records, for tests of what other pages say
about them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def read(name):
    """The text of a page, in one line."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def notes(study):
    """The file with what is written by hand about a study."""
    return f"results/{study}/notes.md"


def page(study):
    """The page of a study."""
    return (ROOT / f"docs/results/{study}.md").read_text(encoding="utf-8")


def cells(line):
    return line.strip("| ").split(" | ")


def row(study, arm):
    """The row of an arm, by the headings of the table."""
    lines = [cells(line) for line in page(study).splitlines() if line.startswith("|")]
    return dict(zip(lines[0], next(line for line in lines if line[0] == arm), strict=False))


def claim(study, text):
    """The outcome of a claim and the numbers behind it."""
    line = next(x for x in page(study).splitlines() if x.startswith("| *") and text in x)
    _, outcome, numbers, _ = cells(line)
    return outcome.strip("*"), numbers


def rounded(difference, digits, sign=""):
    mean, half = map(float, difference.split(" ± "))
    return f"{mean:{sign}.{digits}f} ± {half:.{digits}f}"


def differences(numbers):
    return re.findall(r"[+-]\d\.\d+ ± \d\.\d+", numbers)
