"""The study `budget`: its cells, which runs count, and the rules of its claims."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import FakeLedger, evidence_of, nothing_run, record

from normcontrol.lab.errors import LabError
from normcontrol.lab.studies import budget, confirm, settle
from normcontrol.lab.studies.budget import TIMESCALE, at
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.studies.settled import ADAMW, ADAMWN
from normcontrol.lab.study import verdict
from normcontrol.lab.training.config import check
from normcontrol.lab.training.options import check_used

RESULTS = Path(__file__).parents[3] / "results"
NOISE = dict(zip(budget.SEEDS, (2e-3, -3e-3, 1e-3, 0.0, -1e-3), strict=True))
DOUBLED = 0.1
"""By how much twice the steps lower the made-up loss of AdamW."""


def made(cell, gap=(0.0, 0.0, 0.0), halfway=0.0):
    """A made-up run. At the end AdamWN is above AdamW by ``gap``, horizon by horizon, and at half
    of the run by ``halfway``."""
    factor = cell.config.run.steps // budget.STEPS["small"]
    place = (1, 2, 4).index(factor)
    loss = 4.3 - DOUBLED * place
    controlled = cell.config.optim.optimizer == "AdamWN"
    if controlled:
        loss += gap[place] + NOISE[cell.seed]
    run = record(cell, loss, points=11)
    if controlled:
        steps, losses = run.curves["val_loss"]
        straight = 10 + (4.3 - DOUBLED * place - 10) / 2
        losses[steps.index(cell.config.run.steps // 2)] = straight + halfway + NOISE[cell.seed]
    return run


def judged(wanted=lambda cell: True, **how):
    def outcome(cell):
        return made(cell, **how) if wanted(cell) else None

    return verdict.judge(FakeLedger(budget.STUDY, outcome, "small"))


def outcomes(*given, **how):
    return {claim.name: finding.outcome for claim, finding in judged(*given, **how).findings}


def cells(scale="small"):
    return budget.cells(scale, nothing_run())


@pytest.mark.parametrize("scale", budget.CHOSEN)
def test_every_cell_can_be_run_with_a_schedule_of_its_own_horizon(scale):
    for cell in cells(scale):
        check(cell.config)
        check_used(cell.config)
        c = cell.config
        assert c.optim.warmup == c.run.steps / 5
        assert c.run.steps / 2 % c.run.eval_every == 0
        assert c.model.init_seed == c.data.data_seed == cell.seed


@pytest.mark.parametrize("scale", budget.CHOSEN)
def test_the_settings_are_those_that_settle_chose_and_the_seeds_are_new(scale):
    evidence = evidence_of(open_folder(RESULTS / f"settle-{scale}"))
    for arm, chosen in budget.CHOSEN[scale].items():
        best = min(evidence.trials(arm, "tuning"), key=lambda t: t.mean())
        assert tuple(value for _, value in best.cells[0].settings) == chosen
    used = {cell.seed for cell in evidence.cells} | {*confirm.SEEDS, *settle.SEEDS, *settle.MORE}
    assert not used & set(budget.SEEDS)


@pytest.mark.parametrize("scale", budget.CHOSEN)
def test_one_arm_keeps_its_decay_and_the_other_lr_times_decay_times_steps(scale):
    base, (lr, decay) = settle.BASES[scale], budget.CHOSEN[scale][ADAMW]
    for cell in cells(scale):
        o, steps = cell.config.optim, cell.config.run.steps
        if cell.arm.startswith(TIMESCALE):
            product = lr * decay * base.run.steps
            assert o.lr * o.weight_decay * steps == pytest.approx(product)
        elif o.optimizer == "AdamW":
            assert o.weight_decay == decay


def test_a_batch_of_cells_is_a_whole_comparison():
    order = list(dict.fromkeys((c.seed, c.part) for c in cells()))
    assert order[:4] == [(31, "x1"), (32, "x1"), (31, "x2"), (32, "x2")]
    assert order[-5:] == [(seed, "x4") for seed in budget.SEEDS]
    for i in range(0, len(cells()), 3):
        three = cells()[i : i + 3]
        assert len({(c.seed, c.part) for c in three}) == 1
        assert len({c.arm for c in three}) == 3


def test_a_scale_at_which_nothing_was_chosen_is_refused():
    with pytest.raises(LabError, match="at full settle was not run yet"):
        cells("full")


def test_what_the_paper_describes_is_supported():
    found = outcomes(gap=(-0.10, -0.13, -0.16), halfway=0.05)
    assert set(found.values()) == {"supported"}


def test_the_contrary_refutes():
    found = outcomes(gap=(0.01, 0.03, 0.05), halfway=-0.05)
    assert set(found.values()) == {"refuted"}


def test_equal_arms_show_nothing_but_that_half_the_steps_are_not_enough():
    found = outcomes()
    assert found.pop("half the steps") == "refuted"
    assert set(found.values()) == {"not shown"}


def test_a_claim_must_hold_against_both_arms_of_adamw():
    lead = {at(TIMESCALE, factor) for factor in (1, 2, 4)}

    def outcome(cell):
        run = made(cell, gap=(-0.02, -0.02, -0.02))
        if cell.arm in lead:
            run.curves["val_loss"][1][-1] -= 0.02
        return run

    findings = verdict.judge(FakeLedger(budget.STUDY, outcome, "small")).findings
    finding = next(f for claim, f in findings if claim.name == "better later")
    assert finding.outcome == "not shown"
    assert "against AdamW: -0.02" in finding.numbers


def test_the_longest_horizon_counts_once_all_seeds_have_it():
    def numbers(wanted):
        findings = judged(wanted, gap=(-0.01, -0.02, -0.03)).findings
        return next(f for claim, f in findings if claim.name == "the gap grows").numbers

    assert "n = 5, steps x1, x2;" in numbers(lambda cell: cell.part != "x4" or cell.seed < 35)
    assert "n = 5, steps x1, x2, x4;" in numbers(lambda cell: True)
    two = numbers(lambda cell: cell.seed < 33 or cell.part == "x1")
    assert "n = 2, steps x1, x2, x4;" in two


def test_one_seed_shows_nothing_and_no_seed_is_not_run():
    assert set(outcomes(lambda cell: cell.seed == 31).values()) == {"not shown"}
    assert set(outcomes(lambda cell: cell.part == "x1").values()) == {"not run"}


def test_a_run_that_diverged_shows_nothing():
    def outcome(cell):
        lost = (cell.arm, cell.seed) == (at(ADAMWN, 2), 33)
        return record(cell, float("inf")) if lost else made(cell, gap=(-0.1, -0.2, -0.3))

    findings = verdict.judge(FakeLedger(budget.STUDY, outcome, "small")).findings
    assert {f.text() for _, f in findings} == {"Not shown because a run diverged"}


def test_the_tables_of_the_page_say_what_the_runs_say(monkeypatch):
    monkeypatch.syspath_prepend(str(RESULTS.parent / "docs/figures"))
    import make_budget

    of = FakeLedger(
        budget.STUDY, lambda cell: made(cell, gap=(-0.05, -0.05, -0.05), halfway=0.02), "small"
    )
    found = budget.runs(evidence_of(of))
    assert "| x2 | AdamW | 4.2000 | 4.2000 | 4.2000 | 4.2000 | 4.2000 | 4.2000 |" in (
        make_budget.losses(found)
    )
    assert "| x4 | AdamW | 5 | " in make_budget.gaps(found)
    needed = make_budget.by_horizon(found)  # half of what a doubling gains: the root of two
    assert "| AdamWN | x2 | AdamW | 1.42 (1.39 to 1.44) |" in needed
    assert "| AdamWN | x4 | AdamW | outside these runs in 5 of 5 seeds |" in needed
    assert "| AdamW | x2 | AdamWN | 0.71 (0.69 to 0.72) |" in needed
    assert "| x1 | AdamW | AdamWN | outside these runs in 5 of 5 seeds |" in (
        make_budget.within(found)
    )
