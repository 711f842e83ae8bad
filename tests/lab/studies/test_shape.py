"""The study `shape`: three paths to the norm at which AdamW ends."""

from __future__ import annotations

import itertools

import pytest
from fakes import FakeLedger, nothing_run, record

from normcontrol.lab.studies import causes, follow, growth, kept, longest, remarks, search, shape
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.study import verdict
from normcontrol.lab.training.config import check, differences
from normcontrol.lab.training.optimizers import lr_at
from normcontrol.lab.training.options import check_used


def cells():
    return shape.cells("tiny", nothing_run())


def test_no_seed_was_run_before():
    before = {*search.SEEDS, *growth.SEEDS, *kept.SEEDS, *causes.SEEDS, *remarks.SEEDS}
    assert not set(shape.SEEDS) & {*before, *longest.LONGEST.seeds, *follow.SEEDS}


def test_only_the_path_differs():
    first, *others = cells()[:4]
    assert first.arm == ADAMW
    assert [cell.arm for cell in others] == list(shape.PATHS)
    for cell in others:
        check(cell.config)
        check_used(cell.config)
        assert set(differences(first.config, cell.config)) == {"optimizer", "path"}
    assert len({cell.seed for cell in cells()}) == 20


def test_all_paths_end_at_the_same_ratio():
    _, walk, straight, at_once = (cell.config.optim.path for cell in cells()[:4])
    assert {walk[-1], straight[-1], *at_once} == {shape.END}
    assert list(walk) == sorted(walk)
    assert straight[149] == pytest.approx((1 + shape.END) / 2, abs=1e-5)
    assert set(straight[299:]) == {shape.END}


def test_a_random_walk_grows_with_the_squared_learning_rate():
    cell = cells()[1]
    path = (1.0, *cell.config.optim.path)
    grown = [after**2 - before**2 for before, after in itertools.pairwise(path)]
    for step in (100, 300, 500):
        squares = (lr_at(cell.config, step) / lr_at(cell.config, 120)) ** 2
        assert grown[step - 1] / grown[119] == pytest.approx(squares, abs=2e-3)


@pytest.mark.parametrize(
    ("above", "outcomes"),
    [
        ({shape.STRAIGHT: 0.01, shape.AT_ONCE: 0.02}, ["supported"] * 3),
        ({shape.WALK: 0.02, shape.STRAIGHT: 0.01}, ["refuted", "refuted", "refuted"]),
    ],
)
def test_the_claims(above, outcomes):
    def outcome(cell):
        noise = 1e-3 * (cell.seed % 5) + 2e-4 * (len(cell.arm) * cell.seed % 7)
        return record(cell, 4.2 + noise + above.get(cell.arm, 0.0))

    findings = verdict.judge(FakeLedger(shape.STUDY, outcome, "tiny")).findings
    assert [finding.outcome for _, finding in findings] == outcomes
