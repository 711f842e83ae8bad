"""What pages and notes say about a study is what its claims say."""

from __future__ import annotations

import importlib

import pytest
from results_pages import ROOT, claim, differences, notes, read, rounded

from normcontrol.lab import studies


@pytest.mark.parametrize("page", ["docs/settle.md", notes("settle-small")])
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
    assert "no claim is decided" in text.lower()


def test_what_is_confirmed_and_what_is_refuted_is_what_the_claims_say():
    outcome, numbers = claim("confirm-small", "AdamWN has a lower validation loss than AdamW.")
    assert outcome == "supported"
    (less,) = differences(numbers)
    text = read(notes("confirm-small"))
    assert f"AdamWN ended below AdamW by {less.lstrip('-')}" in text
    outcome, _ = claim("transfer-tiny", "Over all conditions, AdamWN at gain 0.8, never tuned")
    assert outcome == "refuted"
    text = read(notes("transfer-tiny")).replace("*", "")
    claimed = "that a gain of 0.8 has a smaller regret than a decay tuned at the base"
    assert f"Refuted: {claimed}. " in text
    assert f"on average over 14 settings ({kept_gain()} above AdamW)" in text


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
    said = (
        "is never tuned [costs about 0.01](docs/transfer.md) in loss, compared with a tuned decay"
    )
    assert f"On a GPT of 0.17 M weights, a gain of 0.8 that {said}" in readme


@pytest.mark.parametrize("page", [notes("search-tiny"), "docs/search.md", "docs/faq.md"])
def test_what_search_shows_is_what_its_claims_say(page):
    text = read(page).replace("*", "")
    for other in ("AdamW", "AdamC")[: 1 if "faq" in page else 2]:
        outcome, numbers = claim("search-tiny", f"AdamWN has a lower validation loss than {other}.")
        assert outcome == "refuted", f"{page} has to say what is shown now"
        digits = 3 if page.startswith("docs") else 4
        assert f"{rounded(differences(numbers)[0], digits)} above" in text
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


@pytest.mark.parametrize("page", [notes("rise-tiny"), "docs/search.md"])
def test_what_rise_shows_is_what_its_claims_say(page):
    lower = "AdamWN, rising target has a lower validation loss than"
    constant, adamw = (claim("rise-tiny", f"{lower} {other}.") for other in ("AdamWN", "AdamW"))
    assert [constant[0], adamw[0]] == ["supported", "refuted"], f"{page} has to say what is shown"
    text = read(page)
    digits = 3 if page == "docs/search.md" else 4
    assert f"{rounded(differences(adamw[1])[0], digits)} above AdamW" in text
    assert differences(constant[1])[0].lstrip("-") in text


@pytest.mark.parametrize("page", [notes("horizon-tiny"), "docs/longer.md"])
def test_what_horizon_shows_is_what_its_claims_say(page):
    text = read(page)
    for says in ("steps x3 has a lower validation loss than AdamW, steps x3.", "gains on AdamW"):
        outcome, numbers = claim("horizon-tiny", f"AdamWN, rising target, {says}")
        assert outcome == "not shown", f"{page} has to say what is shown"
        for found in differences(numbers):
            assert found in text


@pytest.mark.parametrize("page", [notes("growth-tiny"), "docs/longer.md"])
def test_what_growth_shows_is_what_its_claims_say(page):
    level, change = (
        claim("growth-tiny", f"AdamWN, rising target, {says}")
        for says in ("steps x3 is level with AdamW, steps x3, within 0.01.", "gains on AdamW")
    )
    assert [level[0], change[0]] == ["supported"] * 2, f"{page} has to say what is shown"
    short, long, changed = differences(change[1])
    assert differences(level[1]) == [long]
    text = read(page)
    if page == "docs/longer.md":
        short, long = rounded(short, 3), rounded(long, 3)
    assert f"from {short} with 200 steps to" in text
    assert long in text
    assert changed.lstrip("-") in text


@pytest.mark.parametrize("page", [notes("longest-tiny"), "docs/longer.md"])
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


@pytest.mark.parametrize("page", [notes("causes-tiny"), "docs/settle.md", "docs/faq.md"])
def test_what_causes_shows_is_what_its_claims_say(page, monkeypatch):
    feedback, free = (
        claim("causes-tiny", says) for says in ("Feedback does not matter", "and a free norm")
    )
    assert [feedback[0], free[0]] == ["supported"] * 2, f"{page} has to say what is shown"
    text = read(page)
    assert differences(feedback[1])[0] in text
    if page != "docs/faq.md":
        assert differences(free[1])[0].lstrip("-") in text
    if page == "docs/settle.md":
        monkeypatch.syspath_prepend(str(ROOT / "docs/figures"))
        made = importlib.import_module("make_settle")
        whole = (ROOT / page).read_text(encoding="utf-8")
        assert made.causes() in whole
        assert made.claims(made.CAUSES) in whole


@pytest.mark.parametrize("page", [notes("follow-tiny"), "docs/search.md", "docs/faq.md"])
def test_what_follow_shows_is_what_its_claims_say(page):
    for name, says in (("level", "is level with AdamW"), ("path", "has a lower validation loss")):
        outcome, numbers = claim("follow-tiny", says)
        assert outcome == "supported", f"{page} has to say what is shown"
        if name == "level" or page != "docs/faq.md":
            assert differences(numbers)[0].lstrip("-" if name == "path" else "") in read(page)


@pytest.mark.parametrize("page", ["", "docs/search.md"], ids=["notes", "page"])
def test_what_shape_and_walk_show_is_what_their_claims_say(page):
    outcome, numbers = claim("walk-tiny", "has a lower validation loss than AdamW.")
    assert outcome == "not shown", f"{page} has to say what is shown"
    assert differences(numbers)[0] in read(page or notes("walk-tiny"))
    for says in ("is level with AdamW", "than AdamWN, at once"):
        outcome, numbers = claim("shape-tiny", says)
        assert outcome == "supported"
        assert differences(numbers)[0].lstrip("-") in read(page or notes("shape-tiny"))


@pytest.mark.parametrize("page", ["", "docs/choosing.md"], ids=["notes", "page"])
def test_what_remarks_shows_is_what_its_claims_say(page):
    text = read(page or notes("remarks-tiny"))
    digits = 3 if page else 4
    for says, outcome in (
        ("The rate hardly matters", "supported"),
        ("LayerNorm too.", "supported"),
        ("The best decay depends", "supported"),
        ("The best target does not depend", "not shown"),
    ):
        found, numbers = claim("remarks-tiny", says)
        assert found == outcome, f"{page} has to say what is shown"
        if not page or "rate" in says:
            for difference in differences(numbers):
                assert rounded(difference, digits).lstrip("-") in text
    found, numbers = claim("kept-tiny", "The best target does not depend")
    assert found == "refuted", f"{page} has to say what is shown"
    text = read(page or notes("kept-tiny"))
    assert rounded(differences(numbers)[0], digits).lstrip("-") in text


@pytest.mark.parametrize("page", [notes("settle-tiny"), "docs/settle.md"])
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


@pytest.mark.parametrize("page", ["docs/larger.md", notes("larger-tiny"), "docs/faq.md"])
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


@pytest.mark.parametrize(
    ("study", "plan", "level"),
    [("matched", "docs/larger.md", "supported"), ("catchup", "docs/longer.md", "not shown")],
)
def test_what_is_said_of_adamws_norm_is_what_the_claims_say(study, plan, level, monkeypatch):
    """On the page of the plan, in the notes and, rounded, in the questions."""
    folder, walk = f"{study}-tiny", "AdamWN, as a random walk"
    ramp, ramps = claim(folder, "AdamWN, the paper's ramp has a lower")
    lower, _ = claim(folder, f"{walk} has a lower")
    is_level, walks = claim(folder, f"{walk} is level with AdamW")
    assert (ramp, lower, is_level) == ("refuted", "not shown", level), "the pages have to say so"
    for page in (plan, notes(folder)):
        text = read(page)
        assert f"{rounded(differences(ramps)[0], 4)} above" in text, page
        assert differences(walks)[0].lstrip("+") in text, page
    assert rounded(differences(ramps)[0], 3) in read("docs/faq.md")
    monkeypatch.syspath_prepend(str(ROOT / "docs/figures"))
    made = importlib.import_module("make_settle")
    tables = made.at_adamws_norm(made.RESULTS.with_name(folder))
    assert tables in (ROOT / plan).read_text(encoding="utf-8")


def test_what_is_said_of_norms_that_are_followed_in_long_runs_is_what_the_claims_say(monkeypatch):
    predicted, recorded = (
        claim("predicted-tiny", f"AdamWN, AdamW's norm {how} is level")
        for how in ("predicted", "followed")
    )
    assert (predicted[0], recorded[0]) == ("not shown", "not shown"), "the pages have to say so"
    assert "p = 0.047, 0.093 after Holm" in recorded[1]
    monkeypatch.syspath_prepend(str(ROOT / "docs/figures"))
    made = importlib.import_module("make_settle")
    arms, shown = studies.predicted.ARMS, studies.predicted.PREDICTED
    page = (ROOT / "docs/longer.md").read_text(encoding="utf-8")
    assert made.at_adamws_norm(made.PREDICTED, arms, shown) in page
    along = made.course(made.evidence(made.PREDICTED), studies.follow.FOLLOWING).splitlines()[2:]
    means = [line.split("|")[2].split()[0] for line in along]
    assert f"{', '.join(means[:3])} and {means[3]}" in page
    for text in (read("docs/longer.md"), read(notes("predicted-tiny"))):
        assert differences(predicted[1])[0] in text
        assert differences(recorded[1])[0] in text


@pytest.mark.parametrize("page", ["docs/budget.md", notes("budget-tiny")])
def test_what_budget_shows_is_what_its_claims_say(page):
    text = read(page).replace("*", "")
    outcome, numbers = claim("budget-tiny", "AdamWN with half of the steps")
    assert outcome == "refuted", f"{page} has to say what is shown now"
    digits = 2 if page == "docs/budget.md" else 3
    assert f"it ends {rounded(differences(numbers)[0], digits)} above" in text
    claimed = "that AdamWN reaches with half of the steps what AdamW reaches with all of them"
    assert f"Refuted: {claimed}" in text
    for begins in ("At half of the run", "At the end of the run", "With more steps"):
        assert claim("budget-tiny", begins)[0] == "not shown", (
            f"{page} has to say what is shown now"
        )


@pytest.mark.parametrize("page", ["docs/muon.md", notes("muon-tiny")])
def test_what_the_new_seeds_of_muon_showed_is_what_the_claim_says(page, monkeypatch):
    outcome, numbers = claim("muon-tiny", "Muon under control has a lower")
    assert outcome == "supported", f"{page} has to say what is shown now"
    assert differences(numbers)[0].lstrip("-") in read(page)
    monkeypatch.syspath_prepend(str(ROOT / "docs/figures"))
    best = importlib.import_module("make_settle").muons().splitlines()[-1]
    assert differences(best)[0].lstrip("-") in read(page)


@pytest.mark.parametrize("page", ["", "docs/muon.md"], ids=["notes", "page"])
def test_what_other_optimizers_showed_is_what_their_claims_say(page):
    first = [claim("optimizers-tiny", x) for x in ("Muon under control has", "AdamWN, line 13.c")]
    second = claim("optimizers-tiny-second", "Muon under control has")
    assert [outcome for outcome, _ in (*first, second)] == ["supported", "refuted", "not shown"]
    for study, (_, numbers) in zip(("", "", "-second"), (*first, second), strict=True):
        text = read(page or notes(f"optimizers-tiny{study}")).replace("*", "")
        difference = differences(numbers)[0]
        assert difference in text or f"{difference.lstrip('-')} below" in text, difference
