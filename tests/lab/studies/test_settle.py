"""The study `settle`: the order of its cells, how arms are tuned, what is replayed, its rules."""

from __future__ import annotations

import math

import pytest
from fakes import DATA, FakeLedger, nothing_run, record

from normcontrol.lab.studies import settle
from normcontrol.lab.studies.settled import (
    ADAMC,
    ADAMW,
    ADAMWN,
    ANGLE,
    FAST,
    HIDDEN,
    REPLAYED,
    SQRT,
    TENSOR,
)
from normcontrol.lab.studies.tuning import TRIALS, TUNING
from normcontrol.lab.study import verdict
from normcontrol.lab.study.cells import identity
from normcontrol.lab.training.config import check
from normcontrol.lab.training.optimizers import lr_at
from normcontrol.lab.training.options import check_used

TUNED = (ADAMW, ADAMWN, ADAMC, FAST, SQRT, TENSOR, HIDDEN)
NOISE = {0: 0.0, 1: 2e-4, 2: -3e-4, 3: 1e-4, 4: 0.0, 5: -1e-4, 6: 2e-4, 7: 0.0, 8: 1e-4}


def loss_of(cell, better=None, best_lr=4e-3):
    """A made-up loss with an optimum inside the first values; noise of each arm's seeds."""
    o = cell.config.optim
    away = 0.1 * abs(math.log(o.lr / best_lr))
    if cell.part == TUNING:
        arm = settle.ARMS[cell.arm]
        away += 0.1 * abs(math.log(getattr(o, arm.key) / arm.values[3]))
    noise = NOISE[cell.seed] * (1 + sum(map(ord, cell.arm)) % 3)
    return 4.0 + away + (better or {}).get(cell.arm, 0.0) + noise


def decaying(cell, loss):
    """A record with a curve of the decay, as AdamWN has it."""
    made = record(cell, loss)
    steps = range(4, cell.config.run.steps + 1, 4)
    decays = [0.5 + 0.001 * cell.seed + 1e-4 * step for step in steps]
    made.curves["decay"] = (list(steps), decays)
    return made


def ledger(scale="small", wanted=lambda cell: True, **made):
    def outcome(cell):
        return decaying(cell, loss_of(cell, **made)) if wanted(cell) else None

    return FakeLedger(settle.STUDY, outcome, scale)


@pytest.fixture(scope="module")
def cells():
    of = ledger()
    return of.cells(of.results())


def test_every_cell_can_be_run_and_starts_alike(cells):
    for cell in cells:
        check(cell.config)
        check_used(cell.config)
        c = cell.config
        assert (c.model.init_gain, c.optim.warmup, c.run.steps) == (0.8, 160, 800)
        assert c.model.init_seed == c.data.data_seed == cell.seed


@pytest.mark.parametrize("scale", settle.BASES)
def test_the_first_trials_are_the_same_at_every_scale(scale):
    first = settle.cells(scale, nothing_run())
    assert [cell.arm for cell in first] == [ADAMW] * 3 + [ADAMWN] * 3
    assert {cell.seed for cell in first} == {0}
    for cell in first:
        check(cell.config)


def test_cells_come_in_the_order_of_their_importance(cells):
    found = list(dict.fromkeys((cell.part, cell.arm) for cell in cells))
    assert found == [
        *((TUNING, arm) for arm in (ADAMW, ADAMWN)),
        *(("seeds", arm) for arm in (ADAMW, ADAMWN)),
        ("replay", REPLAYED),
        (TUNING, ADAMC),
        ("seeds", ADAMC),
        *(("more seeds", arm) for arm in (ADAMW, ADAMWN)),
        ("angle", ANGLE),
        *((part, arm) for arm in (FAST, SQRT, TENSOR, HIDDEN) for part in (TUNING, "seeds")),
    ]


def test_the_main_comparison_is_run_pair_by_pair(cells):
    tested = [(cell.arm, cell.seed) for cell in cells if cell.part == "seeds"][:4]
    assert tested == [(ADAMW, 1), (ADAMWN, 1), (ADAMW, 2), (ADAMWN, 2)]


def test_all_arms_are_tuned_with_as_many_trials_and_with_the_first_seed_alone(cells):
    for arm in TUNED:
        tried = [cell for cell in cells if cell.arm == arm and cell.part == TUNING]
        assert {cell.seed for cell in tried} == {0}
        assert len({identity(cell.config, DATA) for cell in tried}) == TRIALS
        fresh = [cell for cell in cells if cell.arm == arm and cell.part != TUNING]
        assert {cell.seed for cell in fresh} >= {1, 2, 3, 4, 5}
        assert 0 not in {cell.seed for cell in fresh}


def test_where_the_best_is_at_an_edge_more_is_tried_up_to_a_limit():
    of = ledger(best_lr=1.0)  # the more the better
    tried = [c for c in of.cells(of.results()) if c.part == TUNING and c.arm == ADAMW]
    rates = sorted({c.config.optim.lr for c in tried})
    assert rates == pytest.approx([0.002, 0.004, 0.008, 0.016, 0.032])
    assert len(tried) == TRIALS + 1  # the ladder of learning rates ends here
    findings = {claim.name: finding for claim, finding in verdict.judge(of).findings}
    assert "at the edge of its grid (lr=0.032)" in findings["lower"].text()


def test_the_replay_is_that_of_another_seed_step_by_step(cells):
    recorded = {c.seed: c.config for c in cells if (c.arm, c.part) == (ADAMWN, "seeds")}
    for cell in cells:
        if cell.arm == REPLAYED:
            other = cell.seed % 5 + 1
            shrinks = cell.config.optim.replay
            assert len(shrinks) == 200
            for i in (0, 60, 199):
                step = 4 * (i + 1)
                decay = 0.5 + 0.001 * other + 1e-4 * step
                assert shrinks[i] == pytest.approx(decay * lr_at(recorded[other], step), abs=1e-9)


def test_the_matched_angle_has_the_steps_of_one_and_the_decay_of_the_other(cells):
    one = next(c.config for c in cells if (c.arm, c.part) == (ADAMWN, "seeds")).optim
    other = next(c.config for c in cells if (c.arm, c.part) == (ADAMW, "seeds")).optim
    for cell in cells:
        if cell.arm == ANGLE:
            o = cell.config.optim
            assert (o.lr, o.gain, o.weight_decay) == (one.lr, one.gain, other.weight_decay)


def outcomes(of):
    return {claim.name: finding.outcome for claim, finding in verdict.judge(of).findings}


def test_equal_arms_are_level_and_none_is_lower():
    found = outcomes(ledger())
    levels = ("level", "feedback", "level with AdamC", "angle", "rate", "root")
    assert {found[name] for name in levels} == {"supported"}
    lower = ("lower", "lower than AdamC", "one norm", "all matrices")
    assert "supported" not in {found[name] for name in lower}


def test_a_difference_beyond_the_margin_refutes_that_arms_are_level():
    found = outcomes(ledger(better={ADAMWN: -0.02}))
    assert {found[name] for name in ("lower", "lower than AdamC", "one norm")} == {"supported"}
    assert {found[name] for name in ("level", "feedback", "angle")} == {"refuted"}


def test_what_was_not_run_is_not_judged_and_one_seed_shows_nothing():
    main = (ADAMW, ADAMWN)
    found = outcomes(ledger(wanted=lambda cell: cell.part == TUNING and cell.arm in main))
    assert (found["lower"], found["feedback"], found["angle"]) == ("not shown", *["not run"] * 2)
    found = outcomes(ledger(wanted=lambda cell: cell.arm in main and cell.seed < 2))
    assert (found["lower"], found["level"]) == ("not shown", "not shown")


def test_a_replayed_arm_is_compared_in_the_seeds_that_it_has():
    def wanted(cell):
        return cell.arm in (ADAMW, ADAMWN) or (cell.arm == REPLAYED and cell.seed in (1, 2, 3))

    findings = {claim.name: f for claim, f in verdict.judge(ledger(wanted=wanted)).findings}
    assert "n = 3" in findings["feedback"].numbers
    assert findings["lower than AdamC"].outcome == "not run"
