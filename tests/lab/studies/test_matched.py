"""The study `matched`: AdamW as `larger` tuned it, and AdamWN at its final norm."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import FakeLedger, evidence_of, nothing_run, record

from normcontrol.lab.errors import LabError
from normcontrol.lab.studies import larger, matched
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.studies.search import WALK
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.study import verdict
from normcontrol.lab.training.config import check
from normcontrol.lab.training.options import check_used

RECORDS = Path(__file__).parents[3] / "results" / "larger-tiny"


def test_the_setting_and_the_norm_are_those_of_adamw_in_larger():
    (chosen,) = evidence_of(open_folder(RECORDS)).trials(ADAMW, "seeds")
    assert dict(chosen.cells[0].settings) == {"lr": matched.LR, "weight_decay": matched.DECAY}
    assert chosen.mean("ratio") == pytest.approx(matched.END, abs=5e-4)
    assert not set(matched.SEEDS) & {*larger.SEEDS}


def test_all_arms_share_what_adamw_has_and_end_at_its_norm():
    adamw, papers, walk = matched.cells("tiny", nothing_run())[:3]
    assert (adamw.arm, papers.arm, walk.arm) == matched.ARMS
    for cell in (adamw, papers, walk):
        check(cell.config)
        check_used(cell.config)
        assert (cell.seed, cell.config.optim.lr, cell.config.run.steps) == (341, 6e-3, 600)
    o = papers.config.optim
    assert (o.ratio_start, o.ratio, o.ramp) == (1.0, 1.253, 30)
    path = walk.config.optim.path
    assert len(path) == 600
    assert path[-1] == 1.253
    assert list(path) == sorted(path)
    with pytest.raises(LabError, match="matched has no plan for the scale small"):
        matched.cells("small", nothing_run())


@pytest.mark.parametrize(
    ("above", "outcomes"),
    [
        ({matched.PAPERS: 0.02, WALK: 0.0}, ["refuted", "not shown", "supported"]),
        ({matched.PAPERS: -0.02, WALK: -0.03}, ["supported", "supported", "refuted"]),
    ],
)
def test_the_claims(above, outcomes):
    def of(cell):
        noise = 1e-3 * (cell.seed % 5) + (cell.arm != ADAMW) * 2e-3 * ((cell.seed % 2) - 0.5)
        return record(cell, 4.2 + noise + above.get(cell.arm, 0.0))

    findings = verdict.judge(FakeLedger(matched.STUDY, of, "tiny")).findings
    assert [finding.outcome for _, finding in findings] == outcomes
