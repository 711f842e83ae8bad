"""The study `larger`: arms of `settle` and `rise` on a larger model, tuned alike, with new seeds."""

from __future__ import annotations

from collections import Counter

import pytest
from fakes import FakeLedger, nothing_run, record

from normcontrol.lab.errors import LabError
from normcontrol.lab.studies import larger, settle, shape, walk
from normcontrol.lab.studies.search import RISING
from normcontrol.lab.studies.settled import ADAMW, ADAMWN
from normcontrol.lab.study import verdict
from normcontrol.lab.training.config import check, preset


def ledger(above, best_lr=6e-3, scale="tiny"):
    """Made-up results with one best learning rate, and what arms end above AdamW."""

    def loss(cell):
        o = cell.config.optim
        middle = {"weight_decay": 0.56, "gain": 0.8, "ratio": 1.56}
        away = 10 * abs(o.lr - best_lr)
        away += sum(0.01 * abs(v - middle[k]) for k, v in cell.settings if k in middle)
        noise = 0.004 * (cell.seed % 3 - 1) * (cell.arm != ADAMW)
        return 4.0 + away + noise + above.get(cell.arm, 0.0)

    return FakeLedger(larger.STUDY, lambda cell: record(cell, loss(cell)), scale)


def test_the_model_and_the_start_are_those_of_the_plan():
    first = larger.cells("tiny", nothing_run())
    for cell in first:
        check(cell.config)
        assert cell.config.model.width == preset("tiny").model.width == 128
        assert (cell.config.model.init_gain, cell.config.optim.warmup) == (settle.GAIN, 120)
    assert {(c.config.optim.lr, *c.settings[1:]) for c in first if c.arm == ADAMW} == {
        (6e-3, ("weight_decay", decay)) for decay in (0.3, 0.56, 0.9)
    }
    with pytest.raises(LabError, match="larger has no plan for the scale full"):
        larger.cells("full", nothing_run())


def test_small_is_gpt2_from_the_same_start():
    first = larger.cells("small", nothing_run())
    assert {c.arm for c in first} == {ADAMW, ADAMWN}
    for cell in first:
        check(cell.config)
        model, optim, run = cell.config.model, cell.config.optim, cell.config.run
        assert (model.width, model.layers, model.context) == (768, 12, 1024)
        assert (model.init_gain, optim.warmup, run.steps) == (settle.GAIN, 160, 800)
        assert cell.config.data.tokens_per_step == 65_536
    of = ledger({}, 2e-3, "small")
    cells = of.cells(of.results())
    tests = Counter(c.arm for c in cells if c.part == "seeds")
    assert tests == dict.fromkeys((ADAMW, ADAMWN, RISING), 10)
    ramps = {c.config.optim.ramp for c in cells if c.arm == RISING}
    assert ramps == {400}


def test_adamw_and_adamwn_are_tested_pair_by_pair_before_the_third_arm_is_tuned():
    of = ledger({})
    cells = of.cells(of.results())
    tests = [(c.arm, c.seed) for c in cells if c.part == "seeds"]
    assert tests[:4] == [(ADAMW, 321), (ADAMWN, 321), (ADAMW, 322), (ADAMWN, 322)]
    assert tests[40:] == [(RISING, seed) for seed in larger.SEEDS]
    assert next(i for i, c in enumerate(cells) if c.arm == RISING) > 40
    assert not set(larger.SEEDS) & {*walk.SEEDS, *shape.SEEDS, *settle.SEEDS, *settle.MORE}
    trials = Counter(c.arm for c in cells if c.part == "tuning")
    assert set(trials.values()) <= {6, 7, 8}


def test_the_rising_target_begins_at_the_start_and_rises_over_half_of_the_steps():
    of = ledger({})
    for cell in of.cells(of.results()):
        if cell.arm == RISING:
            o = cell.config.optim
            assert (o.ratio_start, o.ramp, cell.config.run.steps) == (1.0, 300, 600)


@pytest.mark.parametrize(
    ("above", "outcomes"),
    [
        ({ADAMWN: 0.02, RISING: 0.0}, ["refuted", "not shown", "supported"]),
        ({ADAMWN: -0.02, RISING: -0.03}, ["supported", "supported", "refuted"]),
    ],
)
def test_the_claims(above, outcomes):
    findings = verdict.judge(ledger(above)).findings
    assert [finding.outcome for _, finding in findings] == outcomes
