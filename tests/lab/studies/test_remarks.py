"""The study `remarks`: other rates, LayerNorm, and the best decay and target in longer runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeLedger, evidence_of, record

from normcontrol.lab.studies import growth, horizon, remarks, rise, search
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.study import verdict

ROOT = Path(__file__).parents[3]
OUTCOMES = {
    "rate": "supported",
    "LayerNorm": "supported",
    "decay": "supported",
    "target": "supported",
}


def loss(cell, slow=0.005, layernorm=0.03, best_decay=0.1, best_ratio=1.95):
    """Invented losses in which every remark holds; the arguments change one of them each."""
    c, found = cell.config, 4.3 + 0.003 * (-1) ** cell.seed + 1e-4 * (cell.seed % 3)
    if c.run.steps == 600:  # the point that `rise` chose is the best
        found += (
            9 * abs(c.optim.lr - 0.017)
            + 1e-3 * abs(c.optim.warmup - 210)
            + abs(c.optim.min_lr - 0.03)
        )
        found += abs((c.optim.ratio or 0) - 1.95)
    if c.optim.rate == 0.01:
        found += slow * (1 + 0.1 * (-1) ** (cell.seed // 2))
    if c.optim.norm_layers:
        found += layernorm
    if c.run.steps == 1800:
        best = best_decay if cell.arm.startswith("AdamW,") else best_ratio
        key = search.KINDS[ADAMW if cell.arm.startswith("AdamW,") else search.RISING].key
        found += 0.05 * abs(dict(cell.settings)[key] / best - 1) * (1 + 0.01 * (cell.seed % 5))
    return found


def ledger(**changes):
    return FakeLedger(remarks.STUDY, lambda cell: record(cell, loss(cell, **changes)), "tiny")


def outcomes(**changes):
    return {c.name: f.outcome for c, f in verdict.judge(ledger(**changes)).findings}


def test_what_is_run():
    made = ledger()
    cells = made.cells(made.results())
    parts = Counter((c.arm, c.part) for c in cells)
    for arm in (search.RISING, search.RISING_LAYERNORM):
        assert [parts[arm, part] for part in ("search", "choice", "test")] == [48, 20, 20]
    for arm in (ADAMW, search.RISING):
        name = remarks.LONG.name(arm)
        assert (parts[name, "tuning"], parts[name, "test"]) == (7 * 3, 2 * 20)
    assert sorted(c.config.optim.rate for c in cells if ", k = " in c.arm) == [0.01] * 20 + [1] * 20


def test_no_seed_of_the_test_was_run_before():
    assert not set(remarks.SEEDS) & {*search.SEEDS, *search.CHOSEN_BY, *growth.SEEDS}


@pytest.mark.parametrize(("arm", "study"), [(ADAMW, "search"), (search.RISING, "rise")])
def test_the_settings_are_those_that_were_chosen(arm, study):
    chosen = search.choice(evidence_of(open_folder(ROOT / f"results/{study}-tiny")), arm)
    cell = search.trial("tiny", arm, remarks.CHOSEN[arm], 131, "test")
    assert chosen.trial.cells[0].settings == cell.settings


def test_the_arm_of_rise_is_the_same_until_its_test():
    def before_test(study):
        made = FakeLedger(study, lambda cell: record(cell, loss(cell)), "tiny")
        cells = made.cells(made.results())
        return [c for c in cells if c.arm == search.RISING and c.part != "test"]

    assert before_test(remarks.STUDY) == before_test(rise.STUDY)


def test_the_long_runs_keep_the_shares_of_warm_up_and_rise():
    cell = search.trial("tiny", search.RISING, remarks.CHOSEN[search.RISING], 0, "", horizon.LONG)
    assert (cell.config.run.steps, cell.config.optim.warmup, cell.config.optim.ramp) == (
        1800,
        630,
        900,
    )


def test_every_remark_can_be_shown():
    assert outcomes() == OUTCOMES


@pytest.mark.parametrize(
    ("changes", "claim", "outcome"),
    [
        ({"slow": 0.03}, "rate", "refuted"),
        ({"slow": 0.018}, "rate", "not shown"),
        ({"layernorm": -0.03}, "LayerNorm", "refuted"),
        ({"best_decay": 0.3}, "decay", "refuted"),
        ({"best_ratio": 1.25}, "target", "refuted"),
        ({"best_ratio": 0.99}, "target", "not shown"),
    ],
    ids=["slow rate", "between", "LayerNorm better", "same decay", "other target", "at the edge"],
)
def test_every_remark_can_fail(changes, claim, outcome):
    assert outcomes(**changes) == OUTCOMES | {claim: outcome}


@pytest.mark.parametrize(("status", "outcome"), [("diverged", "refuted"), ("failed", "not run")])
def test_a_rate_is_refuted_by_a_run_that_diverged_and_not_by_one_that_failed(status, outcome):
    """A run that failed, for want of memory for example, is run again."""

    def of(cell):
        made = record(cell, loss(cell))
        return replace(made, status=status) if cell.config.optim.rate == 0.01 else made

    findings = verdict.judge(FakeLedger(remarks.STUDY, of, "tiny")).findings
    assert {c.name: f.outcome for c, f in findings}["rate"] == outcome
