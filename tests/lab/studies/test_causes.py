"""The study `causes`: what `settle` chose, with new seeds, and the arms that need its records."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import evidence_of, nothing_run, recorded_often

from normcontrol.lab.errors import LabError
from normcontrol.lab.studies import causes, confirm, gpt2, growth, kept, remarks, search, settle
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.studies.settled import ADAMW, ADAMWN, ANGLE, REPLAYED
from normcontrol.lab.study import verdict
from normcontrol.lab.training.config import check
from normcontrol.lab.training.options import check_used

ROOT = Path(__file__).parents[3]


def ledger(above):
    return recorded_often(causes.STUDY, above, "decay", lambda seed: 0.5 + 1e-3 * seed)


@pytest.mark.parametrize("scale", causes.CHOSEN)
def test_the_settings_are_those_that_settle_chose(scale):
    evidence = evidence_of(open_folder(ROOT / f"results/settle-{scale}"))
    for arm, (lr, value) in causes.CHOSEN[scale].items():
        best = min(evidence.trials(arm, "tuning"), key=lambda t: t.mean())
        assert [v for _, v in best.cells[0].settings] == [lr, value]


def test_no_seed_was_run_before():
    before = {*settle.SEEDS, *settle.MORE, *confirm.SEEDS, *search.SEEDS, *growth.SEEDS}
    assert not set(causes.SEEDS) & {*before, *remarks.SEEDS, *gpt2.SEEDS, *kept.SEEDS}


def test_the_runs_of_adamwn_come_first_and_are_logged_often_enough_to_be_replayed():
    first = causes.cells("tiny", nothing_run())
    assert {cell.arm for cell in first} == {ADAMWN}
    assert len(first) == 20
    assert {cell.config.run.log_every for cell in first} == {3}


def test_the_other_arms_have_the_decay_of_another_seed_and_the_decay_of_adamw():
    of = ledger({})
    cells = of.cells(of.results())
    assert [c.arm for c in cells] == [ADAMWN] * 20 + [REPLAYED] * 20 + [ANGLE] * 20
    for cell in cells:
        check(cell.config)
        check_used(cell.config)
    replayed = {c.seed: c.config.optim for c in cells if c.arm == REPLAYED}
    peak = max(range(200), key=lambda i: replayed[181].replay[i])
    for seed, o in replayed.items():
        other = seed + 1 if seed < 200 else 181
        assert o.replay[peak] == pytest.approx((0.5 + 1e-3 * other) * 6e-3, rel=1e-3)
    for cell in cells:
        if cell.arm == ANGLE:
            o = cell.config.optim
            assert (o.lr, o.gain, o.weight_decay) == (6e-3, 0.8, causes.CHOSEN["tiny"][ADAMW][1])


@pytest.mark.parametrize(
    ("above", "outcomes"),
    [
        ({ANGLE: -0.008}, {"feedback": "supported", "free norm": "supported"}),
        ({REPLAYED: 0.02, ANGLE: 0.008}, {"feedback": "refuted", "free norm": "refuted"}),
        ({REPLAYED: 0.01}, {"feedback": "not shown", "free norm": "not shown"}),
    ],
)
def test_the_claims(above, outcomes):
    findings = verdict.judge(ledger(above)).findings
    assert {claim.name: finding.outcome for claim, finding in findings} == outcomes


def test_a_scale_without_a_plan_is_refused():
    with pytest.raises(LabError, match="settle was run at tiny and small"):
        causes.cells("full", nothing_run())
