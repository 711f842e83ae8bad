"""The study `optimizers`: its cells, what they share with `settle`, and the rules of its claims."""

from __future__ import annotations

import math

import pytest
from fakes import DATA, FakeLedger, record

from normcontrol.lab.studies import optimizers, settle
from normcontrol.lab.studies.optimizers import DECOUPLED, MUON, MUON_CONTROLLED
from normcontrol.lab.studies.settled import ADAMW, ADAMWN
from normcontrol.lab.studies.tuning import TRIALS, TUNING
from normcontrol.lab.study import verdict
from normcontrol.lab.study.cells import identity
from normcontrol.lab.training.config import check
from normcontrol.lab.training.options import check_used

ARMS = (ADAMW, ADAMWN, MUON, MUON_CONTROLLED, DECOUPLED)
NOISE = {0: 0.0, 1: 2e-4, 2: -3e-4, 3: 1e-4, 4: 0.0, 5: -1e-4}


def outcome(cell, better):
    """A made-up run with an optimum inside the first values; noise of each arm's seeds."""
    o, tuned = cell.config.optim, optimizers.TUNED["tiny"]
    away = 0.1 * abs(math.log(o.lr / tuned.base.optim.lr))
    arm = tuned.arms[cell.arm]
    away += 0.1 * abs(math.log(getattr(o, arm.key) / arm.values[3]))
    noise = NOISE[cell.seed] * (1 + sum(map(ord, cell.arm)) % 3)
    return record(cell, 4.0 + away + better.get(cell.arm, 0.0) + noise)


def ledger(wanted=lambda cell: True, **better):
    by_arm = {
        {"controlled": MUON_CONTROLLED, "decoupled": DECOUPLED}[k]: v for k, v in better.items()
    }
    return FakeLedger(optimizers.STUDY, lambda c: outcome(c, by_arm) if wanted(c) else None)


def outcomes(of):
    return {claim.name: finding.outcome for claim, finding in verdict.judge(of).findings}


@pytest.fixture(scope="module")
def cells():
    of = ledger()
    return of.cells(of.results())


def test_every_cell_can_be_run(cells):
    for cell in cells:
        check(cell.config)
        check_used(cell.config)
        assert cell.config.model.init_seed == cell.config.data.data_seed == cell.seed


def test_arms_are_tuned_alike_with_the_first_seed_and_tested_with_others(cells):
    assert list(dict.fromkeys(cell.arm for cell in cells)) == list(ARMS)
    for arm in ARMS:
        tried = [cell for cell in cells if cell.arm == arm and cell.part == TUNING]
        assert ({cell.seed for cell in tried}, len(tried)) == ({0}, TRIALS)
        tested = [cell.seed for cell in cells if cell.arm == arm and cell.part != TUNING]
        assert tested == list(settle.SEEDS)


def test_the_runs_of_adamw_and_adamwn_are_those_of_settle(cells):
    of = FakeLedger(settle.STUDY, lambda cell: outcome(cell, {}) if cell.arm in ARMS else None)
    theirs = {identity(cell.config, DATA) for cell in of.cells(of.results())}
    shared = [cell for cell in cells if cell.arm in (ADAMW, ADAMWN)]
    assert len(shared) == 2 * (TRIALS + 5)
    assert {identity(cell.config, DATA) for cell in shared} <= theirs


def test_the_first_decays_of_line_13b_are_those_of_line_13a(cells):
    lr = settle.BASES["tiny"].optim.lr
    first = {
        arm: [c.config.optim.weight_decay for c in cells if c.arm == arm][:3]
        for arm in (ADAMW, DECOUPLED)
    }
    assert first[DECOUPLED] == pytest.approx([lr * decay for decay in first[ADAMW]])


def test_equal_arms_are_level_and_none_is_lower():
    found = outcomes(ledger())
    assert (found["Muon level"], found["13.b level"]) == ("supported", "supported")
    assert "supported" not in (found["Muon lower"], found["13.c lower"])


def test_a_difference_decides_which_is_lower():
    found = outcomes(ledger(controlled=-0.02, decoupled=0.02))
    assert (found["Muon lower"], found["13.c lower"]) == ("supported", "supported")
    assert (found["Muon level"], found["13.b level"]) == ("refuted", "refuted")
    found = outcomes(ledger(controlled=0.02, decoupled=-0.02))
    assert (found["Muon lower"], found["13.c lower"]) == ("refuted", "refuted")


def test_what_was_not_run_is_not_judged():
    found = outcomes(ledger(lambda cell: cell.arm in (ADAMW, ADAMWN)))
    assert set(found.values()) == {"not run"}
