"""The study `catchup`: AdamW as `longest` tuned it, and AdamWN at its final norm."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import evidence_of, nothing_run

from normcontrol.lab.studies import catchup, longest, matched
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.training.config import check
from normcontrol.lab.training.options import check_used

RECORDS = Path(__file__).parents[3] / "results" / "longest-tiny"


def test_the_runs_of_adamw_are_those_of_longest_and_their_norm_is_the_target():
    (chosen,) = evidence_of(open_folder(RECORDS)).trials(longest.ARMS[0], "test")
    assert chosen.mean("ratio") == pytest.approx(catchup.END, abs=5e-4)
    owns = [cell for cell in catchup.cells("tiny", nothing_run()) if cell.arm == ADAMW]
    assert [cell.config for cell in owns] == [cell.config for cell in chosen.cells[:20]]
    assert [cell.seed for cell in owns] == [*range(201, 221)]


def test_all_arms_share_what_adamw_has_and_end_at_its_norm():
    adamw, papers, walk = catchup.cells("tiny", nothing_run())[:3]
    assert (adamw.arm, papers.arm, walk.arm) == matched.ARMS
    for cell in (adamw, papers, walk):
        check(cell.config)
        check_used(cell.config)
        assert (cell.seed, cell.config.optim.lr, cell.config.run.steps) == (201, 8.5e-3, 5400)
        assert (cell.config.optim.warmup, cell.config.optim.min_lr) == (540, 0.03)
    o = papers.config.optim
    assert (o.ratio_start, o.ratio, o.ramp, o.rate) == (1.0, 3.349, 270, 0.1)
    path = walk.config.optim.path
    assert (len(path), path[-1]) == (600, 3.349)
    assert list(path) == sorted(path)
