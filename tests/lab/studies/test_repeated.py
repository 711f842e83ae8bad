"""The study `repeated`: AdamW and AdamWN on a text that is seen ten times."""

from __future__ import annotations

import random

import pytest
from fakes import FakeLedger, record

from normcontrol.lab.errors import LabError
from normcontrol.lab.studies import STUDIES, repeated, search
from normcontrol.lab.studies.settled import ADAMW, ADAMWN
from normcontrol.lab.study import verdict
from normcontrol.lab.training.config import check, differences
from normcontrol.lab.training.options import check_used

ONCE, AGAIN = 0.03, -0.03
"""AdamWN minus AdamW in the made-up runs."""


def ledger(again=AGAIN):
    def loss(cell):
        noise = random.Random(f"{cell.arm} {cell.seed}").gauss(0, 1e-3)
        away = 0.1 * abs(cell.config.optim.lr - 8.5e-3)
        gap = ONCE if cell.config.data.unique_tokens == 0 else again
        return record(cell, 4.3 + noise + away + gap * cell.arm.startswith(ADAMWN))

    return FakeLedger(repeated.STUDY, loss, "tiny")


def named():
    made = ledger()
    return made.cells(made.results())


def test_it_is_known_by_its_name_and_has_one_scale():
    assert STUDIES["repeated"] is repeated.STUDY
    with pytest.raises(LabError, match="There is no plan for the scale small"):
        repeated.cells("small", ledger().results())


def test_the_runs_with_text_seen_once_are_those_of_search():
    ours = [cell for cell in named() if cell.arm in repeated.ARMS]
    made = FakeLedger(search.STUDY, lambda cell: record(cell, 4.3), "tiny")
    points = {cell for cell in made.cells(made.results()) if cell.part == "search"}
    assert {cell for cell in ours if cell.part == "search" and cell.settings} & points
    assert {cell.config.data.unique_tokens for cell in ours} == {0}


def test_the_others_see_ten_times_the_same_text_and_are_else_alike():
    for arm in repeated.ARMS:
        once = next(c for c in named() if c.arm == arm and c.seed == 71)
        again = next(c for c in named() if c.arm == f"{arm}, repeated text" and c.seed == 71)
        check(again.config)
        check_used(again.config)
        run, data = again.config.run, again.config.data
        assert run.steps * data.tokens_per_step == 10 * data.unique_tokens == 614_400
        tuned = {key for key, _ in again.settings}
        assert differences(once.config, again.config).keys() - tuned == {"unique_tokens"}


def test_both_arms_have_as_many_trials():
    for part, count in (("search", 48), ("test", 20)):
        for arm in (ADAMW, ADAMWN):
            found = [c for c in named() if c.arm == f"{arm}, repeated text" and c.part == part]
            assert len(found) == count


@pytest.mark.parametrize(
    ("again", "outcomes"),
    [
        (AGAIN, ["supported", "refuted", "supported"]),
        (ONCE, ["refuted", "refuted", "not shown"]),
        (0.0, ["not shown", "supported", "supported"]),
    ],
)
def test_the_claims_follow_the_losses(again, outcomes):
    findings = [finding for _, finding in verdict.judge(ledger(again)).findings]
    assert [finding.outcome for finding in findings] == outcomes
    assert "from text seen once (+0.0297 ± 0.0008) to repeated text (" in findings[2].numbers
