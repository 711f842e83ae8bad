"""The study `rise`: one more arm, tuned like those of `search`, whose runs it shares."""

from __future__ import annotations

from collections import Counter

from fakes import FakeLedger, record

from normcontrol.lab.studies import rise, search
from normcontrol.lab.studies.settled import ADAMW, ADAMWN
from normcontrol.lab.study import verdict
from normcontrol.lab.training.optimizers import target_at


def loss(cell):
    lead = 0.03 if cell.arm == search.RISING else 0.0
    return 4.3 + 0.003 * (-1) ** cell.seed + 0.1 * abs(cell.config.optim.lr - 8.5e-3) - lead


def ledger(study):
    return FakeLedger(study, lambda cell: record(cell, loss(cell)), "tiny")


def named(study):
    made = ledger(study)
    return made.cells(made.results())


def test_the_arms_of_search_are_the_same_cells_and_the_new_one_has_as_many():
    ours, theirs = named(rise.STUDY), named(search.STUDY)
    for arm in (ADAMW, ADAMWN):
        assert [c for c in ours if c.arm == arm] == [c for c in theirs if c.arm == arm]
    counts = Counter(cell.arm for cell in ours)
    assert counts[search.RISING] == counts[ADAMW] == 88


def test_the_target_rises_over_half_of_the_steps_and_stays():
    cell = search.trial("tiny", search.RISING, (5, 5, 3, 2), 0, "search")
    ratio = dict(cell.settings)["ratio"]
    at = [target_at(cell.config, step) for step in (0, 150, 300, 600)]
    assert at == [1.0, 1.0 + (ratio - 1) / 2, ratio, ratio]


def test_a_lower_loss_is_shown_against_both():
    outcomes = {c.name: f.outcome for c, f in verdict.judge(ledger(rise.STUDY)).findings}
    assert outcomes == {
        "lower than constant": "supported",
        "lower": "supported",
        "level": "refuted",
    }
