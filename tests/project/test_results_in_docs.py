"""What other pages say about results is what the page of results says, which is made from the
records."""

from __future__ import annotations

import importlib
import json
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


def test_the_summary_is_the_same_in_both_places_and_has_three_sentences():
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/results.md")]
    summaries = [
        re.search(r"- \*\*Shown:.*?\n\n", page, re.DOTALL).group().replace("docs/", "")
        for page in pages
    ]
    assert summaries[0].split() == summaries[1].split()
    sentences = re.split(r"\n- ", summaries[0])
    assert [one.split(":")[0].strip("-* ") for one in sentences] == [
        "Shown",
        "Not shown",
        "What it would take",
    ]
    for one in sentences:
        assert len(re.findall(r"[.!?](?:\s|$)", one)) == 1, one


def test_the_summary_says_what_the_claims_say():
    """Sentence by sentence; if an outcome changes, so has the sentence in both places."""
    rising, lower = "AdamWN, rising target", "has a lower validation loss than AdamW"
    for study, says, outcome in (
        ("confirm-small", f"AdamWN {lower}.", "supported"),
        ("rise-tiny", f"{rising} {lower}.", "refuted"),
        ("growth-tiny", f"{rising}, steps x3 is level with AdamW", "supported"),
        ("larger-tiny", f"{rising} is level with AdamW", "supported"),
        ("walk-tiny", lower, "not shown"),
        ("shape-tiny", "as a random walk is level with AdamW", "supported"),
        ("causes-tiny", "Feedback does not matter", "supported"),
    ):
        assert claim(study, says)[0] == outcome, (study, says)
    for arm in ("AdamWN, ratio 2", "AdamWN, gain 0.8"):
        outcome, numbers = claim("gpt2-small", f"{arm} {lower}.")
        assert (outcome, "one seed has no interval" in numbers) == ("not shown", True)


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


def test_the_difference_of_the_tuned_arms_is_that_of_the_results():
    digits, page = 3, "docs/make_results.py"
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


@pytest.mark.parametrize("name", ["digits", "defaults"])
def test_the_tables_about_targets_are_those_of_the_benchmarks(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module(name)
    runs = json.loads((ROOT / f"results/{name}.json").read_text())["results"]["runs"]
    page = (ROOT / "docs/choosing.md").read_text(encoding="utf-8")
    for row in benchmark.rows(runs):
        assert f"| {' | '.join(row)} |" in page
    if name == "defaults":
        chosen = benchmark.chosen(benchmark.differences(runs))
        assert f"By the rule the default is *{chosen}*" in page


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


@pytest.fixture
def facts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("record_facts")


@pytest.mark.parametrize("page", ["docs/make_results.py", "docs/results.md"])
def test_the_records_whose_seconds_are_too_few_are_those_that_the_page_names(page, facts):
    text = read(page)
    part = text[text.index("The `seconds` in some records") : text.index("A run that was stopped")]
    small, tiny = facts.too_short("claims-small"), facts.too_short("claims-tiny")
    assert (list(small), list(tiny)) == ([1500], [1000])
    (first, least), (second, second_least) = small[1500], tiny[1000]
    low, high = first[0].seconds, first[-1].seconds
    assert len(first) == 5
    assert f"five of 1,500 steps have {low:.0f} to {high:.0f} s, where others" in part
    low, high = (record.seconds for record in second)
    assert f"two of 1,000 steps have {low:.0f} and {high:.0f} s, where others" in part
    for seconds in (least, second_least):
        assert f"need at least {seconds:.0f} s" in part
    for record in first:
        config = record.config
        value = "weight_decay" if config["ratio"] is None else "ratio"
        assert f"lr={config['lr']:g}" in part
        assert f"{value}={config[value]:g}" in part or f"and {config[value]:g}, seed=" in part
    assert {facts.label(record) for record in second} == {
        f"{arm} lr=0.003 weight_decay=0.09 seed=3" for arm in ("AdamW", "AdamW from scaled weights")
    }


@pytest.mark.parametrize("page", ["docs/make_results.py", "docs/results.md"])
def test_the_lead_on_the_other_text_is_that_of_the_chosen_setting(page, facts):
    lead = facts.lead_on_owt()
    numbers = f"{lead['0.3']:.3f} over a decay of 0.3 and {lead['1']:.3f} over a decay of 1"
    assert f"AdamWN's lead there is {numbers}" in read(page)
    assert "AdamWN lr=0.002 ratio=2 ended" in section("claims-small")


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


@pytest.mark.parametrize("page", ["docs/settle.md", "docs/make_results.py"])
def test_what_settle_shows_is_what_its_claims_say(page):
    text = read(page)
    for claimed in ("AdamWN has a lower validation loss than AdamW.", "Feedback does not matter"):
        outcome, numbers = claim("settle-small", claimed)
        assert outcome == "not shown", f"{page} has to say what is shown now"
        (found,) = differences(numbers)
        assert rounded(found, 4).lstrip("-") in text
    outcome, numbers = claim("settle-small", "AdamWN has a lower validation loss than AdamC.")
    assert outcome == "not shown"
    assert f"differ by {rounded(differences(numbers)[0], 4)}" in text
    assert "no claim is decided" in text


def test_what_is_confirmed_and_what_is_refuted_is_what_the_claims_say():
    outcome, numbers = claim("confirm-small", "AdamWN has a lower validation loss than AdamW.")
    assert outcome == "supported"
    (less,) = differences(numbers)
    text = read("docs/make_results.py")
    assert f"AdamWN ended below AdamW by {less.lstrip('-')}" in text
    outcome, _ = claim("transfer-tiny", "Over all conditions, AdamWN at gain 0.8, never tuned")
    assert outcome == "refuted"
    assert "than a tuned decay is [refuted]" in text
    assert f"({kept_gain()} *above* AdamW on average over 14 settings)" in text


def kept_gain():
    """The mean over all conditions of AdamWN at gain 0.8 minus AdamW with its decay kept."""
    outcome, numbers = claim("transfer-tiny", "The same for the mean of the regrets")
    assert outcome == "refuted"
    return differences(numbers)[0].lstrip("+")


def test_what_a_kept_gain_costs_is_what_the_claims_say():
    choosing, readme = read("docs/choosing.md"), read("README.md")
    assert f"0.8 ended {kept_gain()} above it on average" in choosing
    undecided = claim("transfer-small", "The same for the mean of the regrets")[0]
    assert undecided == "not shown"
    assert "on one of 18 M weights nothing is decided" in choosing
    mean, half = map(float, kept_gain().split(" ± "))
    assert mean - half < 0.01 < mean + half
    assert "costs about 0.01](docs/transfer.md) in loss on a GPT of 0.17 M weights" in readme


@pytest.mark.parametrize("page", ["docs/make_results.py", "docs/search.md", "docs/faq.md"])
def test_what_search_shows_is_what_its_claims_say(page):
    text = read(page).replace("*", "")
    for other in ("AdamW", "AdamC")[: 1 if "faq" in page else 2]:
        outcome, numbers = claim("search-tiny", f"AdamWN has a lower validation loss than {other}.")
        assert outcome == "refuted", f"{page} has to say what is shown now"
        assert f"{rounded(differences(numbers)[0], 3)} above" in text
    assert claim("search-tiny", "AdamWN is level with AdamW, within")[0] == "refuted"


def test_what_is_left_from_a_common_start_is_what_the_claims_say():
    text = read("docs/choosing.md").split("### Start at the target")[1].split("##")[0]
    for study, outcome, side in (
        ("confirm-small", "supported", "below](settle.md)"),
        ("search-tiny", "refuted", "above](search.md)"),
    ):
        found, numbers = claim(study, "AdamWN has a lower validation loss than AdamW.")
        assert found == outcome, "docs/choosing.md has to say what is shown now"
        assert f"[{rounded(differences(numbers)[0], 3).lstrip('-')} {side}" in text


@pytest.mark.parametrize("page", ["docs/make_results.py", "docs/search.md"])
def test_what_rise_shows_is_what_its_claims_say(page):
    lower = "AdamWN, rising target has a lower validation loss than"
    constant, adamw = (claim("rise-tiny", f"{lower} {other}.") for other in ("AdamWN", "AdamW"))
    assert [constant[0], adamw[0]] == ["supported", "refuted"], f"{page} has to say what is shown"
    text = read(page)
    assert f"{rounded(differences(adamw[1])[0], 3)} above AdamW" in text
    assert differences(constant[1])[0].lstrip("-") in text


@pytest.mark.parametrize("page", ["docs/make_results.py", "docs/longer.md"])
def test_what_horizon_shows_is_what_its_claims_say(page):
    text = read(page)
    for says in ("steps x3 has a lower validation loss than AdamW, steps x3.", "gains on AdamW"):
        outcome, numbers = claim("horizon-tiny", f"AdamWN, rising target, {says}")
        assert outcome == "not shown", f"{page} has to say what is shown"
        for found in differences(numbers):
            assert found in text


@pytest.mark.parametrize("page", ["docs/make_results.py", "docs/longer.md"])
def test_what_growth_shows_is_what_its_claims_say(page):
    level, change = (
        claim("growth-tiny", f"AdamWN, rising target, {says}")
        for says in ("steps x3 is level with AdamW, steps x3, within 0.01.", "gains on AdamW")
    )
    assert [level[0], change[0]] == ["supported"] * 2, f"{page} has to say what is shown"
    short, long, changed = differences(change[1])
    assert differences(level[1]) == [long]
    text = read(page)
    assert f"from {rounded(short, 3)} with 200 steps to" in text
    assert f"{rounded(long, 3)}" in text
    assert changed.lstrip("-") in text


@pytest.mark.parametrize("page", ["docs/make_results.py", "docs/longer.md"])
def test_what_longest_shows_is_what_its_claims_say(page):
    lower, level = (
        claim("longest-tiny", f"AdamWN, rising target, steps x9 {says}")
        for says in ("has a lower validation loss than AdamW", "is level with AdamW")
    )
    assert [lower[0], level[0]] == ["refuted", "not shown"], f"{page} has to say what is shown"
    (above,) = differences(lower[1])
    text = read(page)
    if page == "docs/longer.md":
        assert f"{rounded(above, 3)} above" in text
    assert above in text


@pytest.mark.parametrize("page", ["docs/make_results.py", "docs/settle.md", "docs/faq.md"])
def test_what_causes_shows_is_what_its_claims_say(page, monkeypatch):
    feedback, free = (
        claim("causes-tiny", says) for says in ("Feedback does not matter", "and a free norm")
    )
    assert [feedback[0], free[0]] == ["supported"] * 2, f"{page} has to say what is shown"
    text = read(page)
    assert differences(feedback[1])[0] in text
    if page in ("docs/make_results.py", "docs/settle.md"):
        assert differences(free[1])[0].lstrip("-") in text
    if page == "docs/settle.md":
        monkeypatch.syspath_prepend(str(ROOT / "docs/figures"))
        made = importlib.import_module("make_settle")
        whole = (ROOT / page).read_text(encoding="utf-8")
        assert made.causes() in whole
        assert made.claims(made.CAUSES) in whole


@pytest.mark.parametrize("page", ["docs/make_results.py", "docs/search.md", "docs/faq.md"])
def test_what_follow_shows_is_what_its_claims_say(page):
    for name, says in (("level", "is level with AdamW"), ("path", "has a lower validation loss")):
        outcome, numbers = claim("follow-tiny", says)
        assert outcome == "supported", f"{page} has to say what is shown"
        if name == "level" or page == "docs/search.md":
            assert differences(numbers)[0] in read(page)


@pytest.mark.parametrize("page", ["docs/make_results.py", "docs/search.md"])
def test_what_shape_and_walk_show_is_what_their_claims_say(page):
    text = read(page)
    outcome, numbers = claim("walk-tiny", "has a lower validation loss than AdamW.")
    assert outcome == "not shown", f"{page} has to say what is shown"
    assert differences(numbers)[0] in text
    for says in ("is level with AdamW", "than AdamWN, at once"):
        outcome, numbers = claim("shape-tiny", says)
        assert outcome == "supported"
        assert differences(numbers)[0].lstrip("-") in text


@pytest.mark.parametrize("page", ["docs/make_results.py", "docs/choosing.md"])
def test_what_remarks_shows_is_what_its_claims_say(page):
    text = read(page)
    digits = 3 if page == "docs/choosing.md" else 4
    for says, outcome in (
        ("The rate hardly matters", "supported"),
        ("LayerNorm too.", "supported"),
        ("The best decay depends", "supported"),
        ("The best target does not depend", "not shown"),
    ):
        found, numbers = claim("remarks-tiny", says)
        assert found == outcome, f"{page} has to say what is shown"
        if page == "docs/make_results.py" or "rate" in says:
            for difference in differences(numbers):
                assert rounded(difference, digits).lstrip("-") in text
    found, numbers = claim("kept-tiny", "The best target does not depend")
    assert found == "refuted", f"{page} has to say what is shown"
    assert rounded(differences(numbers)[0], digits).lstrip("-") in text


@pytest.mark.parametrize("page", ["docs/make_results.py", "docs/settle.md"])
def test_what_settle_shows_at_tiny_is_what_its_claims_say(page):
    text = read(page)
    for other in ("AdamC", "AdamW"):
        outcome, numbers = claim("settle-tiny", f"AdamWN has a lower validation loss than {other}.")
        assert outcome == "not shown", f"{page} has to say what is shown now"
        assert rounded(differences(numbers)[0], 4) in text
    outcome, numbers = claim("settle-tiny", "One norm for all matrices is better")
    assert outcome == "supported"
    digits = 4 if page == "docs/settle.md" else 3
    assert rounded(differences(numbers)[0], digits).lstrip("-") in text
    outcome, numbers = claim("settle-tiny", "Feedback does not matter")
    assert outcome == "not shown", f"{page} has to say what is shown now"
    assert rounded(differences(numbers)[0], 4) in text


def test_the_cpu_step_times_of_the_docs_are_those_of_the_file():
    text = read("docs/performance.md")
    for found in json.loads(read("results/step_cpu.json"))["results"]:
        line = f"| {found['case']} | {found['implementation']} | {found['ratio']:.2f} |"
        assert line in text


def test_the_misses_of_the_docs_are_those_of_the_file():
    text, rows = read("docs/performance.md"), json.loads(read("results/guesses.json"))["results"]
    for ours, line in zip(rows[::2], rows[1::2], strict=True):
        assert [ours["guess"], line["guess"]] == ["1 - rate of the change", "straight line"]
        missed = [f"{row['first third']}, {row['rest']}" for row in (ours, line)]
        assert f"| {ours['lr']} | {ours['rate']} | {missed[0]} | {missed[1]} |" in text


def test_the_gpu_step_times_of_the_docs_are_those_of_the_files():
    files = ("results/step_gpu.json", "results/step_gpu_rate_0.1.json")
    paper, default = (json.loads(read(file))["cases"] for file in files)
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    table = page.split("| case | rate 0.01")[1].split("\n\n")[0].splitlines()[2:]
    assert len(table) > 15
    for line in table:
        case, at_paper, at_default, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        assert at_default == f"{default[case]['ratio']:.3f}"
        assert at_paper == "-" or at_paper == f"{paper[case]['ratio']:.3f}"
    cost = read("README.md").split("## What it costs")[1].split("##")[0]
    for case, where in (("124M: rate 0.1, ratio 1", default), ("124M: global, after", paper)):
        assert f"{where[case]['ratio']:.2f}" in cost
    assert f"clips too, in {default['124M: clipping, after']['ratio']:.2f} of the time" in cost
    assert f"GPT-2 XL takes {default['XL: global, after']['ratio']:.2f} times" in cost


def test_the_fine_tuning_on_a_gpu_is_that_of_the_file():
    text = read("docs/huggingface.md")
    found = json.loads(read("results/finetune_gpu.json"))
    ours, theirs = found["AdamWN"], found["AdamW"]
    assert ours["largest difference"] == theirs["largest difference"] == 0
    before = found["before"]["norm"]
    assert f"{ours['loss']:.4f} and a norm of {ours['norm']:.2f}, which was {before:.2f}" in text
    assert f"AdamW at {theirs['loss']:.4f} and {theirs['norm']:.2f}" in text


def test_the_speed_of_training_on_a_gpu_is_that_of_the_file():
    found = json.loads(read("results/lab_gpu.json"))["results"]
    text = read("docs/lab.md")
    assert f"{found['tokens/s, gpt2, AdamW'] / 1000:.0f},000 tokens a second" in text
    assert f"{found['speed, laboratory / nanoGPT']:.2f} times nanoGPT's loop" in text
    stream = found["speed, laboratory with the stream in bf16 / nanoGPT"]
    assert f"{stream:.3f} times with `--bf16-stream`" in text
    ours = found["speed, AdamWN with the stream in bf16 / nanoGPT"]
    assert f"with `--bf16-stream` {ours:.3f} times nanoGPT's loop" in text
    assert f"({found['speed, AdamWN / AdamW']:.3f} times as fast in this run" in text
    for what, row in (
        ("the kernel of the head", "a kernel for the head"),
        ("the kernel of GELU", "a kernel for GELU"),
        ("cuDNN's attention", "cuDNN's attention, preferred over the others"),
    ):
        assert f"| {row} | {found[f'speed, with / without {what}']:.3f} |" in text
    gain = found["tokens/s, gpt2, AdamW, stream in bf16"] / found["tokens/s, gpt2, AdamW"]
    assert f"| `--bf16-stream` | {gain:.3f} |" in text
    adamwn = found["tokens/s, gpt2, AdamWN"]
    hours = 100_000 * 491_520 / adamwn / 3600
    for page in ("README.md", "docs/make_results.py"):
        assert f"{hours:.0f} hours a run there at {adamwn / 1000:.0f},000 tokens a second" in read(
            page
        )


@pytest.mark.parametrize("page", ["docs/larger.md", "docs/make_results.py", "docs/faq.md"])
def test_what_larger_shows_is_what_its_claims_say(page, monkeypatch):
    text = read(page)
    outcome, numbers = claim("larger-tiny", "AdamWN has a lower validation loss than AdamW.")
    assert outcome == "refuted", f"{page} has to say what is shown"
    digits = 3 if page == "docs/faq.md" else 4
    assert f"{rounded(differences(numbers)[0], digits)} above" in text
    outcome, numbers = claim("larger-tiny", "AdamWN, rising target is level with AdamW")
    assert outcome == "supported", f"{page} has to say what is shown"
    assert page == "docs/faq.md" or differences(numbers)[0] in text
    assert claim("larger-tiny", "AdamWN, rising target has a lower")[0] == "not shown"
    if page == "docs/larger.md":
        monkeypatch.syspath_prepend(str(ROOT / "docs/figures"))
        made = importlib.import_module("make_settle")
        assert made.larger_model() in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["docs/budget.md", "docs/make_results.py"])
def test_what_budget_shows_is_what_its_claims_say(page):
    text = read(page).replace("*", "")
    outcome, numbers = claim("budget-tiny", "AdamWN with half of the steps")
    assert outcome == "refuted", f"{page} has to say what is shown now"
    digits = 2 if page == "docs/budget.md" else 3
    assert f"it ends {rounded(differences(numbers)[0], digits)} above" in text
    assert "of them is refuted" in text
    for claimed in ("At half of the run", "At the end of the run", "With more steps"):
        assert claim("budget-tiny", claimed)[0] == "not shown", (
            f"{page} has to say what is shown now"
        )


@pytest.mark.parametrize("page", ["docs/settle.md", "docs/make_results.py"])
def test_what_the_new_seeds_of_muon_showed_is_what_the_claim_says(page, monkeypatch):
    outcome, numbers = claim("muon-tiny", "Muon under control has a lower")
    assert outcome == "supported", f"{page} has to say what is shown now"
    assert differences(numbers)[0].lstrip("-") in read(page)
    monkeypatch.syspath_prepend(str(ROOT / "docs/figures"))
    best = importlib.import_module("make_settle").muons().splitlines()[-1]
    assert differences(best)[0].lstrip("-") in read(page)


@pytest.mark.parametrize("page", ["docs/settle.md", "docs/make_results.py"])
def test_what_other_optimizers_showed_is_what_their_claims_say(page):
    text = read(page).replace("*", "")
    first = [claim("optimizers-tiny", x) for x in ("Muon under control has", "AdamWN, line 13.c")]
    second = claim("optimizers-tiny-second", "Muon under control has")
    assert [outcome for outcome, _ in (*first, second)] == ["supported", "refuted", "not shown"]
    for _, numbers in (*first, second):
        difference = differences(numbers)[0]
        assert difference in text or f"{difference.lstrip('-')} below" in text, difference
