"""The page of all results: its answers are those of the claims, it is short, and every study has a
page that it links to."""

from __future__ import annotations

import importlib
import re
import shutil

import pytest
from results_pages import ROOT, cells, claim, differences, notes, page, read

RESULTS = (ROOT / "docs/results.md").read_text(encoding="utf-8")
STUDIES = sorted(path.parent.name for path in (ROOT / "results").glob("*/study.json"))
ITEM = re.compile(
    r"([\d.]+ M)(?:, [^:]+)?: \*\*([\w ]+)\*\* \(\[([\w-]+)\]\(results/([\w-]+)\.md#claims\), (.+)\)"
)
NUMBER = re.compile(r"[+-]?\d\.\d{3,}(?: ± \d\.\d{3,})?")


@pytest.fixture(scope="module")
def make_results():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        yield importlib.import_module("make_results")


def part(heading):
    return RESULTS.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(heading):
    """The rows of the tables under a heading."""
    lines = [line for line in part(heading).splitlines() if line.startswith("| ")]
    return [cells(line) for line in lines if not re.match(r"\| (---|question|study) ", line)]


QUESTIONS = rows("By question")
INDEX = {re.match(r"\[([\w-]+)\]", found[0])[1]: found for found in rows("All studies")}


def test_the_pages_are_those_that_the_records_and_notes_make(make_results):
    made = make_results.pages(ROOT / "results", make_results.studies(ROOT / "results"))
    assert {f"results/{study}.md" for study in STUDIES} == made.keys() - {"results.md"}
    found = [ROOT / "docs/results.md", *(ROOT / "docs/results").iterdir()]
    names = {path.relative_to(ROOT / "docs").as_posix(): path for path in found}
    assert names.keys() == made.keys(), "run python docs/make_results.py"
    for name, path in names.items():
        assert path.read_text(encoding="utf-8") == made[name], "run python docs/make_results.py"


def test_the_page_answers_in_this_order_and_is_short():
    assert re.findall(r"^## (.+)$", RESULTS, re.M) == [
        "AdamWN minus AdamW",
        "By question",
        "All studies",
        "How to read the tables",
        "About the records",
    ]
    assert "**In short.**" in RESULTS.split("\n## ")[0]
    prose = [line for line in RESULTS.splitlines() if not line.startswith("|")]
    assert len(re.findall(r"\w\S*", re.sub(r"\]\([^)]*\)", "]", " ".join(prose)))) < 1500


@pytest.mark.parametrize(("question", "answer", "outcomes"), QUESTIONS, ids=lambda cell: cell[:40])
def test_an_answer_is_what_the_claims_say(question, answer, outcomes, monkeypatch):
    assert question.endswith("?")
    assert "<br>" not in question + answer
    assert len(re.findall(r"[.!?](?:\s|$)", answer)) <= 2
    if outcomes == "no claim":
        assert NUMBER.findall(answer) == []
        return
    numbers = []
    for item in outcomes.split("<br>"):
        size, outcome, study, linked, name = ITEM.fullmatch(item).groups()
        assert study == linked
        assert INDEX[study][2].split(" (")[0] == size, item
        found, behind = claim(study, f"| *{name}*: ")
        assert found == outcome, item
        numbers += NUMBER.findall(behind)
    if "Muon" in question:  # the runs with less decay were added later, without a claim
        monkeypatch.syspath_prepend(str(ROOT / "docs/figures"))
        numbers += differences(importlib.import_module("make_settle").muons())
    unsigned = [number.lstrip("+-") for number in numbers]
    for number in NUMBER.findall(answer):
        assert number in (numbers if number[0] in "+-" else unsigned), number


def test_the_questions_cover_every_study_that_has_claims():
    """A study whose question is asked again later may be left to its page."""
    cited = {ITEM.fullmatch(x)[3] for *_, last in QUESTIONS for x in last.split("<br>") if "*" in x}
    repeated = {"horizon-tiny"}  # by growth
    first = {study for study in STUDIES if (ROOT / notes(study)).exists()}
    assert first - cited - repeated == {study for study in first if "no claim" in INDEX[study][4]}


def test_the_final_norms_over_learning_rates_are_those_of_the_claims():
    _, tiny = claim("claims-tiny", "The final norm does not depend on the learning rate")
    _, small = claim("claims-small", "The final norm does not depend on the learning rate")
    own, one_seed = (x.split("AdamWN ")[1].split("; AdamW")[0] for x in (tiny, small))
    most = max(map(float, re.findall(r"\d\.\d+", own)))
    for path in ("results/notes.md", notes("claims-tiny")):
        assert f"by {100 * (most - 1):.1f} % at most" in read(path)
    most = max(map(float, re.findall(r"\d\.\d+", one_seed)))
    assert f"differs by {100 * (most - 1):.1f} % in one seed" in read("results/notes.md")
    said = f"was at most {most} times the smallest, in one seed"
    assert said in read(notes("claims-small"))


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_has_a_line_and_a_page(study):
    name, asks, weights, runs, outcomes = INDEX[study]
    assert name == f"[{study}](results/{study}.md)"
    text = page(study)
    assert text.startswith(f"# {study}\n\n{asks}\n\n")
    assert "[All results](../results.md)" in text
    assert f"](../figures/results/{study}.png)" in text
    assert (ROOT / f"docs/figures/results/{study}.png").exists()
    said = re.findall(r"^\| \*[^*]+\*: .*? \| \*\*([\w ]+)\*\* \|", text, re.M)
    counted = [f"{said.count(x)} {x}" for x in ("supported", "refuted", "not shown", "not run")]
    assert outcomes == (", ".join(x for x in counted if x[0] != "0") or "no claim")
    assert re.match(r"[\d.]+ M", weights)
    assert int(runs) > 0


def test_the_sizes_are_those_that_the_pages_name():
    sizes = {found[2].split(" (")[0] for found in INDEX.values()}
    assert sizes >= {"0.17 M", "0.94 M", "18 M", "45 M", "124 M"}


def test_a_page_links_to_the_plan_of_its_study():
    listed = (ROOT / "docs/studies.md").read_text(encoding="utf-8")
    plans = dict(re.findall(r"^\| \[`([\w-]+)`\]\(([^)]+)\) \|", listed, re.M))
    assert len(plans) >= 20
    for study in STUDIES:
        found = re.findall(r"\[Plan and full results\]\(\.\./(.+)\)", page(study))
        name = re.split("-(?:tiny|small)", study)[0]
        target = "paper.md" if name.startswith("figure") else plans.get(name)
        assert found == ([target] if target else []), study


@pytest.mark.parametrize("study", [study for study in STUDIES if (ROOT / notes(study)).exists()])
def test_notes_begin_with_the_question(study):
    question, _, showed = (ROOT / notes(study)).read_text(encoding="utf-8").partition("\n\n")
    assert question.endswith("?")
    assert showed.strip()


def test_a_study_needs_nothing_but_its_records(make_results, tmp_path):
    """Without notes it has a page without them, whose first line is what it runs."""
    folder = tmp_path / "kept-tiny"
    shutil.copytree(ROOT / "results/kept-tiny", folder, ignore=shutil.ignore_patterns("notes.md"))
    (one,) = make_results.studies(tmp_path)
    text = "\n".join(make_results.page(one))
    about = one.verdict.study.about
    assert text.startswith(f"# kept-tiny\n\n{about}\n\n[All results](../results.md)")
    assert text.count(about) == 1
    assert "What it showed" not in text
    assert text.split("## Verdict")[1] == page("kept-tiny").split("## Verdict")[1]
    assert cells(make_results.index([one]).splitlines()[2])[1:4] == [about, "0.17 M", "52"]


def test_notes_are_written_for_the_folder_that_they_lie_in(make_results, tmp_path):
    """Their links lead from there on GitHub, and from the page on the site."""
    folder = tmp_path / "kept-tiny"
    shutil.copytree(ROOT / "results/kept-tiny", folder)
    links = "[a](../../docs/idea.md#b) [c](../../docs/results/d.md) [e](../../src/f.py)"
    (folder / "notes.md").write_text(f"Is it\nso?\n\n{links}\n")
    (one,) = make_results.studies(tmp_path)
    assert one.asks == "Is it so?"
    assert one.notes == "[a](../idea.md#b) [c](d.md) [e](../../src/f.py)"


def test_a_study_of_which_nothing_was_run_has_a_page(make_results, tmp_path):
    (tmp_path / "kept-tiny").mkdir()
    shutil.copy(ROOT / "results/kept-tiny/study.json", tmp_path / "kept-tiny")
    (one,) = make_results.studies(tmp_path)
    assert "- Nothing was run yet.\n" in "\n".join(make_results.page(one))
    assert cells(make_results.index([one]).splitlines()[2])[2:] == ["-", "0", "1 not run"]
