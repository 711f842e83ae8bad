"""The study `walk`: two arms of `shape`, with new seeds and one claim."""

from __future__ import annotations

import pytest
from fakes import FakeLedger, nothing_run, record

from normcontrol.lab.studies import follow, longest, shape, walk
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.study import verdict


def test_the_arms_are_those_of_shape_with_seeds_of_their_own():
    first, second = walk.cells("tiny", nothing_run())[:2]
    before = shape.cells("tiny", nothing_run())[:2]
    assert [cell.arm for cell in (first, second)] == [ADAMW, shape.WALK]
    assert second.config.optim == before[1].config.optim
    assert not set(walk.SEEDS) & {*shape.SEEDS, *follow.SEEDS, *longest.LONGEST.seeds}


@pytest.mark.parametrize(
    ("above", "outcome"), [(-0.003, "supported"), (0.003, "refuted"), (0.0, "not shown")]
)
def test_the_claim(above, outcome):
    def of(cell):
        noise = 1e-3 * (cell.seed % 5) + (cell.arm == shape.WALK) * 2e-3 * ((cell.seed % 2) - 0.5)
        return record(cell, 4.2 + noise + above * (cell.arm == shape.WALK))

    ((_, found),) = verdict.judge(FakeLedger(walk.STUDY, of, "tiny")).findings
    assert found.outcome == outcome
