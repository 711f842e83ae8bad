"""The study `longest`: tuned around what was best in shorter runs, up to edges that hold nothing better."""

from __future__ import annotations

from collections import Counter

import pytest
from fakes import DATA, FakeLedger, nothing_run, record

from normcontrol.lab.studies import causes, growth, kept, longest, search
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.study import verdict
from normcontrol.lab.study.cells import identity
from normcontrol.lab.training.config import check


def ledger(lead, best_lr=8.5e-3, best_warmup=270):
    """Made-up results with one optimum for both arms, and a lead of AdamWN."""

    def loss(cell):
        o = cell.config.optim
        away = 10 * abs(o.lr - best_lr) + 1e-5 * abs(o.warmup - best_warmup)
        gained = lead + 0.002 * (-1) ** cell.seed if search.RISING in cell.arm else 0.0
        return 3.7 + away - gained

    return FakeLedger(longest.STUDY, lambda cell: record(cell, loss(cell)), "tiny")


def test_it_starts_with_the_settings_that_growth_tested_in_shorter_runs():
    first = longest.cells("tiny", nothing_run())
    for arm in longest.KINDS:
        mine = next(c for c in first if c.arm == longest.LONGEST.name(arm))
        theirs = search.trial("tiny", arm, growth.CHOSEN[arm], 0, "test", growth.LONG)
        assert mine.config.run.steps == 3 * theirs.config.run.steps == 5400
        one, other = dict(mine.settings), dict(theirs.settings)
        assert one.pop("warmup") == 3 * other.pop("warmup")
        assert one == other


def test_both_arms_are_tuned_alike_and_tested_pair_by_pair_with_new_seeds():
    of = ledger(0.0)
    cells = of.cells(of.results())
    parts = [Counter(c.part for c in cells if c.arm == arm) for arm in longest.ARMS]
    assert parts[0] == parts[1]
    assert parts[0]["test"] == 30
    assert [(c.arm, c.seed) for c in cells[-4:]] == [
        (arm, seed) for seed in (229, 230) for arm in longest.ARMS
    ]
    before = {*search.CHOSEN_BY, *search.SEEDS, *growth.SEEDS, *kept.SEEDS, *causes.SEEDS}
    assert not before & {c.seed for c in cells if c.part == "test"}
    for cell in cells:
        check(cell.config)


def test_no_trial_is_made_twice():
    of = ledger(0.0)
    tried = [c for c in of.cells(of.results()) if c.part == "search"]
    assert len({identity(c.config, DATA) for c in tried}) == len(tried) >= 2 * 17


def test_edges_are_moved_until_the_best_lies_inside():
    of = ledger(0.0, best_lr=0.017, best_warmup=135)
    cells = of.cells(of.results())
    for arm in longest.ARMS:
        tried = [c.config.optim for c in cells if c.arm == arm and c.part == "search"]
        chosen = next(c.config.optim for c in cells if c.arm == arm and c.part == "test")
        assert chosen.lr == pytest.approx(0.017)
        assert max(o.lr for o in tried) > chosen.lr
        assert min(o.warmup for o in tried) < chosen.warmup
    outcomes = [finding.outcome for _, finding in verdict.judge(of).findings]
    assert outcomes == ["not shown", "supported"]


@pytest.mark.parametrize(
    ("lead", "outcomes"),
    [(0.03, ["supported", "refuted"]), (-0.03, ["refuted", "refuted"])],
)
def test_the_claims(lead, outcomes):
    findings = verdict.judge(ledger(lead)).findings
    assert [finding.outcome for _, finding in findings] == outcomes


def test_adamw_has_decays_that_go_further_down():
    assert longest.LONGEST.decays[longest.CENTRE[1]] == 0.06
    assert min(longest.LONGEST.decays) < min(search.DECAYS)
    usual = search.trial("tiny", ADAMW, (5, 2, 2, 1), 0, "test")
    assert dict(usual.settings)["weight_decay"] == 0.06
