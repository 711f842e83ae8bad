"""The study `confirm`: what `settle` chose, with seeds that were never run."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import FakeLedger, evidence_of, nothing_run, record

from normcontrol.lab.studies import confirm, settle
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.studies.settled import ADAMW, ADAMWN
from normcontrol.lab.study import verdict

RECORDS = Path(__file__).parents[3] / "results" / "settle-small"


def test_the_settings_are_those_that_settle_chose_and_the_seeds_are_new():
    evidence = evidence_of(open_folder(RECORDS))
    for cell in confirm.cells("small", nothing_run()):
        best = min(evidence.trials(cell.arm, "tuning"), key=lambda t: t.mean())
        assert cell.settings == best.cells[0].settings
        assert cell.seed not in {c.seed for c in evidence.cells}
        assert cell.seed not in (*settle.SEEDS, *settle.MORE)


def test_seeds_are_run_pair_by_pair():
    cells = confirm.cells("small", nothing_run())
    assert [(c.arm, c.seed) for c in cells[:4]] == [
        (ADAMW, 11),
        (ADAMWN, 11),
        (ADAMW, 12),
        (ADAMWN, 12),
    ]


@pytest.mark.parametrize(
    ("better", "outcome"), [(0.01, "supported"), (0.0, "not shown"), (-0.01, "refuted")]
)
def test_the_claim_is_decided_by_the_paired_difference(better, outcome):
    noise = {seed: 0.003 * (-1) ** seed for seed in confirm.SEEDS}

    def of(cell):
        gained = better + noise[cell.seed] if cell.arm == ADAMWN else 0.0
        return record(cell, 4.3 - gained)

    judged = verdict.judge(FakeLedger(confirm.STUDY, of, "small"))
    assert [finding.outcome for _, finding in judged.findings] == [outcome]
