"""The study `muon`: what `optimizers` chose at tiny, with seeds that were never run."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import FakeLedger, evidence_of, nothing_run, record

from normcontrol.lab.studies import budget, confirm, muon, settle
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.studies.optimizers import MUON, MUON_CONTROLLED
from normcontrol.lab.study import verdict

RECORDS = Path(__file__).parents[3] / "results" / "optimizers-tiny"


def test_the_settings_are_those_that_optimizers_chose_and_the_seeds_are_new():
    evidence = evidence_of(open_folder(RECORDS))
    used = {*settle.SEEDS, *settle.MORE, *confirm.SEEDS, *budget.SEEDS}
    every = muon.cells("tiny", nothing_run())
    for cell in [cell for cell in every if cell.part == "seeds"]:
        best = min(evidence.trials(cell.arm, "tuning"), key=lambda t: t.mean())
        assert cell.settings == best.cells[0].settings
        assert cell.config.with_(init_seed=0, data_seed=0, dropout_seed=0) == best.cells[0].config
        assert cell.seed not in used | {c.seed for c in evidence.cells}


def test_seeds_are_run_pair_by_pair():
    cells = muon.cells("tiny", nothing_run())
    assert [(c.arm, c.seed) for c in cells[:3]] == [
        (MUON, 41),
        (MUON_CONTROLLED, 41),
        (MUON, 42),
    ]


def test_the_control_differs_from_muon_in_learning_rate_and_decay_alone():
    every = muon.cells("tiny", nothing_run())
    first = {cell.arm: cell.config for cell in every if cell.seed == 41}
    for cell in (cell for cell in every if cell.part == "control"):
        same = {"init_seed": 41, "data_seed": 41, "dropout_seed": 41}
        as_muon = cell.config.with_(**same, lr=first[MUON].optim.lr, weight_decay=0.56)
        assert cell.config.optim.lr == first[MUON_CONTROLLED].optim.lr
        assert as_muon == first[MUON]


@pytest.mark.parametrize(
    ("better", "outcome"), [(0.01, "supported"), (0.0, "not shown"), (-0.01, "refuted")]
)
def test_the_claim_is_decided_by_the_paired_difference(better, outcome):
    noise = {seed: 0.003 * (-1) ** seed for seed in muon.SEEDS}

    def of(cell):
        gained = better + noise[cell.seed] if cell.arm == MUON_CONTROLLED else 0.0
        return record(cell, 4.3 - gained)

    judged = verdict.judge(FakeLedger(muon.STUDY, of, "tiny"))
    assert [finding.outcome for _, finding in judged.findings] == [outcome]
