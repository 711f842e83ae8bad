"""The study `kept`: higher targets than those of `remarks`, and new seeds."""

from __future__ import annotations

from collections import Counter

import pytest
from fakes import FakeLedger, record

from normcontrol.lab.studies import gpt2, growth, kept, remarks, search
from normcontrol.lab.study import verdict


def ledger(best):
    """Invented losses, lowest at a ratio."""

    def loss(cell):
        found = 4.0 + 0.003 * (-1) ** cell.seed + 1e-4 * (cell.seed % 3)
        return found + 0.02 * abs(dict(cell.settings)["ratio"] - best) * (1 + 0.01 * cell.seed % 5)

    return FakeLedger(kept.STUDY, lambda cell: record(cell, loss(cell)), "tiny")


def test_what_is_run():
    made = ledger(4.8)
    cells = made.cells(made.results())
    ratios = Counter((c.part, dict(c.settings)["ratio"]) for c in cells)
    tuning = {("tuning", ratio): 3 for ratio in (3.8, 4.8, 6.0, 7.6)}
    assert ratios == {**tuning, ("test", 1.95): 20, ("test", 4.8): 20}
    assert {c.config.run.steps for c in cells} == {1800}
    before = {*search.SEEDS, *growth.SEEDS, *remarks.SEEDS, *gpt2.SEEDS}
    assert not before & {c.seed for c in cells if c.part == "test"}


def test_the_runs_of_the_highest_ratio_of_remarks_are_the_same_cells():
    runs = {
        cell.label: cell.config for cell in ledger(4.8).study.cells("tiny", ledger(4.8).results())
    }
    shared = search.trial("tiny", search.RISING, remarks.at(search.RISING, 8), 0, "", remarks.LONG)
    assert runs[shared.label] == shared.config


def test_the_search_does_not_reach_the_new_ratios():
    assert search.SIZES[1] == 9 < len(search.KINDS[search.RISING].values)


@pytest.mark.parametrize(
    ("best", "outcome"),
    [(1.95, "supported"), (4.8, "refuted"), (9.0, "refuted")],
    ids=["the one that is kept", "inside", "beyond the edge"],
)
def test_the_claim_can_be_supported_and_refuted(best, outcome):
    ((_, finding),) = verdict.judge(ledger(best)).findings
    assert finding.outcome == outcome
