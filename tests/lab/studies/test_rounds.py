"""The study `rounds`: `repeated` once more, with longer warm-ups and new seeds."""

from __future__ import annotations

from collections import Counter

import pytest
from fakes import FakeLedger, record

from normcontrol.lab.studies import (
    STUDIES,
    catchup,
    growth,
    larger,
    predicted,
    repeated,
    rounds,
    search,
    tuned_walk,
)
from normcontrol.lab.studies.settled import ADAMW, ADAMWN
from normcontrol.lab.study import verdict


def ledger(gap=-0.03, warmup=300):
    """Made-up runs: how far AdamWN is from AdamW on the repeated text, and the best warm-up there."""

    def loss(cell):
        again = cell.config.data.unique_tokens > 0
        away = 1e-4 * abs(cell.config.optim.warmup - (warmup if again else 120))
        away += abs(cell.config.optim.lr - 8.5e-3)
        noise = 1e-5 * (cell.seed % 7)
        return record(cell, 4.3 + away + noise + (gap if again else 0.0) * (ADAMWN in cell.arm))

    return FakeLedger(rounds.STUDY, loss, "tiny")


def named():
    made = ledger()
    return made.cells(made.results())


def test_it_is_known_by_its_name():
    assert STUDIES["rounds"] is rounds.STUDY


def test_no_seed_was_run_before():
    before = {
        seed for study in (growth, larger, search, catchup, predicted) for seed in study.SEEDS
    }
    before |= {*tuned_walk.PROTOCOL.seeds, *repeated.REPEATED.seeds}
    assert not before & set(rounds.SEEDS)


def test_both_arms_have_as_many_trials_and_seeds():
    counts = Counter((cell.arm, cell.part == "test") for cell in named())
    for arm in (ADAMW, ADAMWN):
        assert counts[f"{arm}, repeated text", False] == counts[arm, False] == 68
        assert (counts[f"{arm}, repeated text", True], counts[arm, True]) == (40, 20)


def test_the_control_is_the_setting_that_repeated_tested():
    (control,) = {cell.settings for cell in named() if cell.arm == rounds.TUNED_BEFORE}
    assert dict(control) == {"lr": 8.5e-3, "weight_decay": 1.0, "warmup": 210, "min_lr": 0.03}


def test_warm_ups_go_beyond_those_of_repeated():
    again = [f"{arm}, repeated text" for arm in (ADAMW, ADAMWN)]
    found = {c.config.optim.warmup for c in named() if c.arm in again}
    assert found <= {60, 120, 210, 300, 390, 480}
    assert max(found) > 300


@pytest.mark.parametrize(
    ("gap", "warmup", "outcomes"),
    [
        (-0.03, 300, ["supported", "supported"]),
        (0.03, 300, ["refuted", "refuted"]),
        (-0.03, 480, ["not shown", "not shown"]),
    ],
)
def test_the_claims_follow_the_losses(gap, warmup, outcomes):
    findings = [finding for _, finding in verdict.judge(ledger(gap, warmup)).findings]
    assert [finding.outcome for finding in findings] == outcomes
