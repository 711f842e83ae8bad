"""What other pages say about results is what the page of results says, which is made from the
records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def read(name):
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def section(study):
    """The part of the page about a study."""
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    return page.split(f"\n## {study}\n")[1].split("\n## ")[0]


def row(study, arm):
    """The row of an arm, by the headings of the table."""
    lines = [line.strip("| ").split(" | ") for line in section(study).splitlines() if "|" in line]
    return dict(zip(lines[0], next(line for line in lines if line[0] == arm), strict=False))


def claim(study, text):
    """The outcome of a claim and the numbers behind it."""
    line = next(x for x in section(study).splitlines() if x.startswith("| ") and text in x)
    _, outcome, numbers, _ = line.strip("| ").split(" | ")
    return outcome.strip("*"), numbers


def rounded(difference, digits, sign=""):
    mean, half = map(float, difference.split(" ± "))
    return f"{mean:{sign}.{digits}f} ± {half:.{digits}f}"


def differences(numbers):
    return re.findall(r"[+-]\d\.\d+ ± \d\.\d+", numbers)


TUNED = "when both are tuned with equal trials"
START = "It is not explained by the start"
LEVEL = "It is explained by the start"


@pytest.mark.parametrize("page", ["README.md", "docs/make_results.py"])
def test_the_difference_of_the_tuned_arms_is_that_of_the_results(page):
    digits = 2 if page == "README.md" else 3
    (tiny,) = differences(claim("claims-tiny", TUNED)[1])
    *_, small = differences(claim("claims-small", TUNED)[1])
    scaled = differences(claim("claims-tiny", START)[1])[0]
    text = read(page)
    assert f"{rounded(tiny, digits).lstrip('-')} below AdamW" in text
    assert rounded(small, digits).lstrip("-") in text
    assert f"AdamWN {rounded(scaled, 3, '+')}" in text


@pytest.mark.parametrize("page", ["README.md", "docs/faq.md", "docs/make_results.py"])
def test_what_is_not_shown_is_called_so(page):
    for study in ("claims-tiny", "claims-small"):
        outcomes = [claim(study, text)[0] for text in (TUNED, START, LEVEL)]
        assert outcomes == ["not shown"] * 3, f"{page} has to say what is shown now"
    text = read(page)
    assert re.search("not shown|neither difference is shown|nor shown", text.replace("*", ""))
    assert not re.search("better than tuned AdamW|is level with AdamWN", text)


def test_the_table_of_methods_is_that_of_the_family():
    page = read("docs/methods.md")
    for arm in ("AdamWN", "CPR-kI0", "AdamH", "CPR-WS"):
        tiny, small = (
            row(study, arm)["minus baseline"] for study in ("family-tiny", "family-small")
        )
        assert f"| {arm} | {rounded(tiny, 3)} | {rounded(small, 3)} |" in page
    shown = {arm: claim("family-tiny", f"{arm} has a lower")[0] for arm in ("AdamWN", "CPR-kI0")}
    assert set(shown.values()) == {"supported"}
    unclear = {arm: claim("family-tiny", f"{arm} has a lower")[0] for arm in ("AdamH", "CPR-WS")}
    assert set(unclear.values()) == {"not shown"}
