"""The study `growth`: the short runs tuned with longer warm-ups, the long ones as `horizon` chose."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fakes import FakeLedger, evidence_of, record

from normcontrol.lab.studies import growth, horizon, search
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.study import verdict

ROOT = Path(__file__).parents[3]


def loss(cell):
    steps = cell.config.run.steps
    tuned = 0.1 * abs(cell.config.optim.lr - 8.5e-3) + 1e-6 * abs(cell.config.optim.warmup - 100)
    lead = {200: -0.02, 1800: 0.0}[steps] if search.RISING in cell.arm else 0.0
    return 4.3 + tuned + 0.003 * (-1) ** cell.seed - lead * (1 + 0.01 * (cell.seed % 3))


def ledger():
    return FakeLedger(growth.STUDY, lambda cell: record(cell, loss(cell)), "tiny")


def test_the_long_runs_are_tested_only_and_the_short_ones_are_tuned_too():
    made = ledger()
    cells = made.cells(made.results())
    for arm in (ADAMW, search.RISING):
        parts = Counter(c.part for c in cells if c.arm == growth.LONG.name(arm))
        assert parts == {"test": 40}
        parts = Counter(c.part for c in cells if c.arm == growth.SHORT.name(arm))
        assert parts == {"search": 48, "choice": 20, "test": 40}
    longest = max(c.config.optim.warmup for c in cells if c.config.run.steps == 200)
    assert longest == 160


def test_no_seed_of_the_test_was_run_before():
    assert not set(growth.SEEDS) & {*search.SEEDS, *search.CHOSEN_BY}


def test_the_long_runs_have_the_settings_that_horizon_chose():
    evidence = evidence_of(open_folder(ROOT / "results/horizon-tiny"))
    for arm, point in growth.CHOSEN.items():
        chosen = search.choice(evidence, horizon.LONG.name(arm))
        cell = search.trial("tiny", arm, point, 91, "test", growth.LONG)
        assert chosen.trial.cells[0].settings == cell.settings


def test_the_claims():
    outcomes = {c.name: f.outcome for c, f in verdict.judge(ledger()).findings}
    assert outcomes == {"better with more steps": "supported", "level in long runs": "supported"}
