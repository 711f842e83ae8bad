"""What the README and other pages say about results is what the pages of results say, which are made
from the records."""

from __future__ import annotations

import importlib
import re

import pytest
from results_pages import ROOT, claim, differences, notes, page, read, rounded, row

TUNED = "when both are tuned with equal trials"
START = "It is not explained by the start"
LEVEL = "It is explained by the start"


def test_the_summary_is_the_same_in_both_places_and_has_three_sentences():
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/results.md")]
    summaries = [
        re.search(r"- \*\*Shown:.*?\n\n", page, re.DOTALL).group().replace("docs/", "")
        for page in pages
    ]
    assert summaries[0].split() == summaries[1].split()
    points = re.split(r"\n- ", summaries[0])
    assert [one.split(":")[0].strip("-* ") for one in points] == [
        "Shown",
        "Not shown",
        "What it would take",
    ]
    for one in points:
        text = re.sub(r"\]\([^)]*\)", "", one)
        assert len(re.findall(r"[.!?](?:\s|$)", text)) == 1, one
        assert len(text.split()) <= 60, one


def test_the_summary_says_what_the_claims_say():
    """Sentence by sentence; if an outcome changes, so has the sentence in both places."""
    lower, summary = "has a lower validation loss than AdamW", read("README.md")
    for study, says, outcome in (
        ("confirm-small", f"AdamWN {lower}.", "supported"),
        ("search-tiny", f"AdamWN {lower}.", "refuted"),
        ("tuned-walk-tiny", "as a random walk is level with AdamW", "supported"),
        ("follow-tiny", "is level with AdamW", "supported"),
        ("causes-tiny", "Feedback does not matter", "supported"),
    ):
        assert claim(study, says)[0] == outcome, (study, says)
    for study, where in (("confirm-small", "below AdamW"), ("search-tiny", "above it")):
        (found,) = differences(claim(study, f"AdamWN {lower}.")[1])
        assert f"[{abs(float(found.split()[0])):.3f} {where}]" in summary
    outcome, numbers = claim("gpt2-small", f"AdamWN, gain 0.8 {lower}.")
    assert (outcome, "n = 3" in numbers) == ("supported", True)
    assert f"[{abs(float(differences(numbers)[0].split()[0])):.3f} below AdamW]" in summary


def test_the_table_of_the_readme_has_rows_of_that_of_the_results():
    def rows(page, heading):
        lines = (ROOT / page).read_text(encoding="utf-8").split(heading)[1].split("\n\n")[0]
        return [line.strip("| ").split(" | ") for line in lines.splitlines()[2:]]

    heading = "| weights | steps | target | tuned | AdamWN minus AdamW | seeds |"
    all_rows = [row[:6] for row in rows("docs/results.md", heading)]
    some = rows("README.md", heading)
    assert some == [row for row in all_rows if row in some]  # in the same order
    left_out = [row for row in all_rows if row[0] != "0.17 M" and row not in some]
    assert [(row[0], row[3]) for row in left_out] == [("45 M", "6 trials each")]  # see ``confirm``
    assert {row[1] for row in some if row[0] == "0.17 M"} == {"600", "1,800", "5,400"}


def test_the_page_of_coverage_has_the_outcomes_of_the_results_and_names_files_that_exist():
    page = (ROOT / "docs/coverage.md").read_text(encoding="utf-8")
    stated = re.findall(r'\*\*([\w ]+)\*\* \(([\w-]+): "([^"]+)"\)', page)
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len(stated) == sum(line.count("**") for line in rows) / 2 > 8
    for outcome, study, text in stated:
        assert claim(study, text)[0] == outcome, (study, text)
    links = re.findall(r"\]\((\.\./[\w./-]+)\)", page)
    assert len(links) > 15
    for link in links:
        assert (ROOT / "docs" / link).exists(), link


def test_the_difference_of_the_tuned_arms_is_that_of_the_results():
    (tiny,) = differences(claim("claims-tiny", TUNED)[1])
    *_, small = differences(claim("claims-small", TUNED)[1])
    scaled = differences(claim("claims-tiny", START)[1])[0]
    text = read(notes("claims-tiny"))
    assert f"{rounded(tiny, 3).lstrip('-')} below AdamW" in text
    assert f"AdamWN {rounded(scaled, 3, '+')}" in text
    assert rounded(small, 3).lstrip("-") in read(notes("claims-small"))


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/faq.md",
        "results/notes.md",
        notes("claims-tiny"),
        notes("claims-small"),
    ],
)
def test_what_is_not_shown_is_called_so(page):
    for study in ("claims-tiny", "claims-small"):
        outcomes = [claim(study, text)[0] for text in (TUNED, START, LEVEL)]
        assert outcomes == ["not shown"] * 3, f"{page} has to say what is shown now"
    text = read(page)
    assert re.search("[Nn]ot shown|neither difference is shown|nor shown", text.replace("*", ""))
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


@pytest.fixture
def facts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("record_facts")


@pytest.mark.parametrize("path", ["results/{}/notes.md", "docs/results/{}.md"])
def test_the_records_whose_seconds_are_too_few_are_those_that_the_page_names(path, facts):
    def part(study):
        found = re.search(r"records of 1,\d00 steps have too few.*?\)\.", read(path.format(study)))
        return found[0]

    small, tiny = facts.too_short("claims-small"), facts.too_short("claims-tiny")
    assert (list(small), list(tiny)) == ([1500], [1000])
    (first, least), (second, second_least) = small[1500], tiny[1000]
    low, high = first[0].seconds, first[-1].seconds
    said = part("claims-small")
    assert len(first) == 5
    assert f"Five {said}" in read(path.format("claims-small"))
    assert f"they have {low:.0f} to {high:.0f} s, where others need at least {least:.0f} s" in said
    for record in first:
        config = record.config
        value = "weight_decay" if config["ratio"] is None else "ratio"
        assert f"lr={config['lr']:g}" in said
        assert f"{value}={config[value]:g}" in said or f"and {config[value]:g}, seed=" in said
    low, high = (record.seconds for record in second)
    said = part("claims-tiny")
    assert f"Two {said}" in read(path.format("claims-tiny"))
    assert f"they have {low:.0f} and {high:.0f} s, where others" in said
    assert f"need at least {second_least:.0f} s" in said
    assert {facts.label(record) for record in second} == {
        f"{arm} lr=0.003 weight_decay=0.09 seed=3" for arm in ("AdamW", "AdamW from scaled weights")
    }


@pytest.mark.parametrize("path", [notes("claims-small"), "docs/results/claims-small.md"])
def test_the_lead_on_the_other_text_is_that_of_the_chosen_setting(path, facts):
    lead = facts.lead_on_owt()
    numbers = f"{lead['0.3']:.3f} over a decay of 0.3 and {lead['1']:.3f} over a decay of 1"
    assert f"AdamWN's lead there is {numbers}" in read(path)
    assert "AdamWN lr=0.002 ratio=2 ended" in page("claims-small")


def test_the_effective_decays_of_adamwn_are_those_of_the_records(facts):
    decays = facts.effective_decays()
    text = read("docs/recipes.md")
    falls = [numbers["decay fell"] for numbers in decays.values()]
    assert f"of the {len(decays)} runs of 1,500 steps with rate 0.1" in text
    (lr,) = {round(numbers["lr fell"], 1) for numbers in decays.values()}
    assert f"falls by a factor of {lr} and the effective decay by {min(falls):.1f} to" in text
    assert f"to {max(falls):.1f} (the curve `decay` of the records)" in text
    two, lower = (decays[f"AdamWN lr=0.002 ratio={r} seed=0"] for r in ("2", "1.6"))
    assert f"decay of {two['AdamW']:.2f} or AdamC with {two['AdamC']:.2f} would" in text
    assert f"ratio 1.6 it is {lower['AdamW']:.2f} and {lower['AdamC']:.2f}" in text
