"""The README and the docs are correct: every Python example runs and prints what the page shows,
links lead to existing pages, and tables agree with the results."""

from __future__ import annotations

import functools
import inspect
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from fork_server import python

import normcontrol

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTES = sorted((ROOT / "results").rglob("notes.md"))  # of which the pages of results are made
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e-?\d+)?")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text()], ids=name)
def test_every_python_example_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    # Traced, but without generated code, which would take minutes.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr("normcontrol.warn.GIVEN", set())
    torch.manual_seed(0)
    namespace: dict = {"__name__": page.stem}
    text, printed = page.read_text(), ""
    for block in FENCED.finditer(text):
        line = text[: block.start(2)].count("\n")
        if block[1] == "python":
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="AdamWN does not decay")
                exec(
                    compile("\n" * line + block[2], str(page), "exec", dont_inherit=True), namespace
                )
            printed = capsys.readouterr().out
        elif block[1] == "text" and printed:  # the output of the last example, or its beginning
            assert_alike(block[2], printed)
            printed = ""


def assert_alike(shown: str, printed: str) -> None:
    """The same words, and numbers equal to two digits: the last ones may differ between
    machines."""
    lines = printed.splitlines()[: len(shown.splitlines())]
    words = [NUMBER.sub("#", line).split() for line in lines]
    assert [NUMBER.sub("#", line).split() for line in shown.splitlines()] == words
    for ours, theirs in zip(NUMBER.findall(shown), NUMBER.findall("\n".join(lines)), strict=True):
        assert float(ours.replace(",", "")) == pytest.approx(
            float(theirs.replace(",", "")), rel=0.01
        ), shown


@pytest.mark.parametrize("page", [*PAGES, *NOTES, ROOT / "CHANGELOG.md"], ids=name)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name(page)} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{name(page)} links to {target}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "").lower()).replace(" ", "-") for h in headings}


def test_every_public_name_is_in_the_reference():
    headings = re.findall(r"^### `(\w+)`$", (ROOT / "docs/api.md").read_text(), re.M)
    assert sorted(headings) == sorted(normcontrol.__all__)


@pytest.mark.parametrize("of", ["AdamWN", "NormControl", "NormTrace", "param_groups", "reproject_"])
def test_the_reference_gives_the_signature(of):
    shown = next(
        block[2]
        for block in FENCED.finditer((ROOT / "docs/api.md").read_text())
        if block[2].startswith(of + "(")
    )
    shown = re.sub(r"\s+", " ", shown)
    for parameter in list(inspect.signature(getattr(normcontrol, of)).parameters.values()):
        default = parameter.default
        if default is inspect.Parameter.empty:
            assert parameter.name in shown
        else:
            value = re.search(rf"\b{parameter.name}=(\([^)]*\)|[^,)]+)", shown)
            assert value is not None, parameter.name
            assert eval(value[1]) == default, parameter.name


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    assert {p.name for p in (ROOT / "docs").glob("*.md")} - {"README.md"} == set(
        re.findall(r"\]\(([\w-]+\.md)\)", index)
    )


def test_every_page_is_in_the_navigation_of_the_site():
    """All but those of the studies, which the page of results lists."""
    config = (ROOT / "mkdocs.yml").read_text()
    assert re.search(r"^not_in_nav: \|\n(  .*\n)*  /results/\n", config, re.M)
    named = re.findall(r"^ +- .+: ([\w-]+\.md)$", config, re.M)
    made = ["changes.md", "index.md", "reference.md", "tutorial.md"]  # by tools/site.py
    assert sorted(named) == sorted(
        [p.name for p in (ROOT / "docs").glob("*.md") if p.name != "README.md"] + made
    )


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "README.md"], ids=name)
def test_every_page_begins_with_its_answer(page):
    title, first = page.read_text().split("\n\n")[:2]
    assert title.startswith("# ")
    assert not re.match(r"#|\||```|!\[|- |Written |This page|`pip ", first), (
        f"{name(page)} begins with '{first[:60]}': begin with a sentence that answers its title"
    )


def test_the_readme_answers_in_the_order_of_the_first_minute():
    text = (ROOT / "README.md").read_text()
    assert re.findall(r"^## (.+)$", text, re.M) == [
        "Install",
        "What to set",
        "What it costs",
        "Does it train better?",
        "What keeps working",
        "Where to read on",
        "Credits and citation",
        "Challenge your own run",
        "Commands",
    ]
    start, *_ = text.split("## Install")
    diff, figure = start.index("# opt = torch.optim.AdamW("), start.index("![")
    assert start.index("# equation 3") < diff < figure
    assert start.count("![") == text.count("![") == 1
    for section, bullets in (("What to set", 4), ("Does it train better?", 3)):
        said = text.split(f"## {section}\n")[1].split("\n## ")[0]
        assert len(re.findall("^- ", said, re.M)) == bullets


def test_the_prose_of_the_readme_stays_near_900_words():
    text = re.sub(r"\]\([^)]*\)", "]", FENCED.sub("", (ROOT / "README.md").read_text()))
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert len(re.findall(r"\w\S*", " ".join(prose))) < 950


def run(*command: str, cwd: Path) -> str:
    ended = python(*command, cwd=cwd)
    assert ended.status == 0, ended.err
    return ended.out


def test_the_quickstart_runs(tmp_path):
    said = run(str(ROOT / "examples/quickstart.py"), "--short", cwd=tmp_path)
    assert len(re.findall(r"^AdamWN? +0\.0", said, re.M)) == 6
    assert (tmp_path / "runs/quickstart.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    said = run(str(ROOT / "benchmarks/step_cpu.py"), "--short", "--json", "step.json", cwd=tmp_path)
    assert "fused" in said
    assert (tmp_path / "step.json").exists()


def test_the_figures_are_those_that_the_scripts_make():
    script = (ROOT / "docs/figures/make_figures.py").read_text()
    made = set(re.findall(r'save\(figure, "([\w.]+)"\)', script))
    made_elsewhere = {
        "quickstart.png",  # make quickstart
        "demo.png",  # make demo
        "predict.png",  # benchmarks/predict.py
        "predict_small.png",  # benchmarks/predict.py
        "grokking.png",  # examples/grokking.py
        "follow.png",  # docs/figures/make_search.py
        "transfer.png",  # docs/figures/make_transfer.py
        "transfer_tiny.png",  # docs/figures/make_transfer.py
        "settle.png",  # docs/figures/make_settle.py
        "search.png",  # docs/figures/make_search.py
        "flow.png",  # docs/figures/make_flow.py
    }
    assert {p.name for p in (ROOT / "docs/figures").glob("*.png")} == made | made_elsewhere


@pytest.mark.slow
def test_grokking_runs(tmp_path):
    said = run(str(ROOT / "examples/grokking.py"), "--steps", "40", cwd=tmp_path)
    assert len(re.findall(r"^AdamWN?, .* generalised never$", said, re.M)) == 10
    assert (tmp_path / "runs/grokking.png").stat().st_size > 10_000


@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_the_predictions_page_has_the_tables_of_its_results(scale, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import predict

    result = json.loads((ROOT / f"results/predict_{scale}.json").read_text())
    assert predict.table(result) in (ROOT / "docs/predict.md").read_text()
    halves = json.loads((ROOT / "results/predict_halves.json").read_text())
    assert predict.predict_halves.table(halves) in (ROOT / "docs/predict.md").read_text()


def test_the_pages_of_search_have_the_tables_of_their_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/figures"))
    import make_search

    for name, folder, study in (
        ("search", make_search.RESULTS, make_search.search),
        ("search", make_search.RISE, make_search.rise),
        ("search", make_search.FOLLOW, make_search.follow),
        ("search", make_search.SHAPE, make_search.shape),
        ("search", make_search.TUNED_WALK, make_search.tuned_walk),
        ("longer", make_search.HORIZON, make_search.horizon),
        ("longer", make_search.GROWTH, make_search.horizon),
        ("longer", make_search.LONGEST, make_search.longest),
    ):
        page = (ROOT / f"docs/{name}.md").read_text()
        assert make_search.table(make_search.evidence(folder), study.ARMS) in page
        assert make_search.claims(folder) in page
    text = (ROOT / "docs/repeated.md").read_text()
    for folder in (make_search.REPEATED, make_search.ROUNDS):
        found = make_search.evidence(folder)
        assert make_search.table(found, make_search.REPEATED_ARMS) in text
        assert make_search.claims(folder) in text
        assert make_search.fit(found) in text
    assert make_search.tuned_before(found) in text
    for folder in (make_search.REMARKS, make_search.KEPT):
        assert make_search.claims(folder) in page
        assert make_search.longer(make_search.evidence(folder)) in page


@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_the_page_of_transfer_has_the_tables_of_its_results(scale, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/figures"))
    import make_transfer

    page, found = (ROOT / "docs/transfer.md").read_text(), make_transfer.evidence(scale)
    assert make_transfer.table(found) in page
    assert make_transfer.differences(make_transfer.losses(found)) in page
    assert make_transfer.worst(found) in page
    if scale == "small":
        words = " ".join(page.split())
        assert f"regrets of {make_transfer.means(found)} in seeds 1 and 2" in words
        every = make_transfer.every_mean(found)
        fixed, hidden, adamw, timescale, adamc = (every[arm][0] for arm in make_transfer.STYLES)
        assert (
            f"timescale rule are {fixed}, {adamw} and {timescale}, that of AdamC is {adamc}"
            in words
        )
        assert f"and that of the hidden matrices {hidden} (three seeds each)" in words
        assert [seeds for _, seeds in every.values()] == [3] * 5
        at = {
            condition: make_transfer.final_gain(found, f"AdamW at {condition}")
            for condition in ("lr x4", "batch x1/4", "steps x3")
        }
        adamw, ours = (
            make_transfer.final_gain(found, arm) for arm in ("AdamW", "AdamWN, gain 0.8")
        )
        assert f"a gain of {at['lr x4']} at four times the rate and of {adamw} at the base" in words
        assert f"while AdamWN ended at {ours} (means over the seeds)" in words
        assert f"AdamW ended at a gain of {at['batch x1/4']}, and AdamWN's loss" in words
        assert f"than at the base, at {at['steps x3']}, and AdamWN's loss was lower" in words


@pytest.mark.parametrize("scale", ["small", "tiny"])
def test_the_page_of_settle_has_the_tables_of_its_results(scale, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/figures"))
    import make_settle

    folder = ROOT / f"results/settle-{scale}"
    page, found = (ROOT / "docs/settle.md").read_text(), make_settle.evidence(folder)
    for part in (make_settle.tuning, make_settle.seeds, make_settle.differences):
        assert part(found) in page
    assert make_settle.claims(folder) in page
    assert make_settle.decays(found) in page
    assert make_settle.confirmed() in page
    assert make_settle.muons() in (ROOT / "docs/muon.md").read_text()
    assert make_settle.paper_model() in (ROOT / "docs/gpt2.md").read_text()
    assert make_settle.more_decay() in (ROOT / "docs/gpt2.md").read_text()
    if scale == "tiny":
        assert make_settle.course(found) in page


def test_the_page_of_budget_has_the_tables_of_its_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/figures"))
    import make_budget

    page = (ROOT / "docs/budget.md").read_text()
    assert ("Not run yet." in page) != make_budget.RESULTS.exists()
    if "Not run yet." in page:
        return
    found = make_budget.runs()
    for part in (
        make_budget.losses,
        make_budget.gaps,
        make_budget.by_horizon,
        make_budget.within,
    ):
        assert part(found) in page
    assert make_budget.claims() in page
