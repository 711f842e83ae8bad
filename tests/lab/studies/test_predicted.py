"""The study `predicted`: AdamW's norm in long runs, predicted or recorded, and followed."""

from __future__ import annotations

import pytest
from fakes import nothing_run, recorded_often

from normcontrol.lab.studies import catchup, larger, matched, predicted, tuned_walk, walk
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.study import verdict
from normcontrol.lab.training.config import check, differences
from normcontrol.lab.training.options import check_used


@pytest.fixture(scope="module")
def cells():
    of = recorded_often(predicted.STUDY, {}, "ratio", lambda seed: 1 + 1e-3 * seed)
    found = of.cells(of.results())
    return {arm: [c for c in found if c.arm == arm] for arm in predicted.ARMS}


def test_no_seed_was_run_before():
    latest = max(*tuned_walk.PROTOCOL.seeds, *matched.SEEDS, *larger.SEEDS, *walk.SEEDS)
    assert min(predicted.SEEDS) > latest


def test_only_the_norm_differs_from_adamw(cells):
    assert [len(some) for some in cells.values()] == [20, 20, 20]
    for arm in predicted.ARMS[1:]:
        for own, cell in zip(cells[ADAMW], cells[arm], strict=True):
            check(cell.config)
            check_used(cell.config)
            assert set(differences(own.config, cell.config)) == {"optimizer", "path"}
            assert cell.seed == own.seed


def test_adamw_is_that_of_catchup_and_recorded_at_200_steps(cells):
    of_catchup = catchup.cells("tiny", nothing_run())[0].config
    for cell in cells[ADAMW]:
        changed = set(differences(of_catchup, cell.config))
        assert changed == {"init_seed", "data_seed", "dropout_seed", "log_every"}
        assert cell.config.run.steps / cell.config.run.log_every == 200


def test_the_recorded_norm_is_that_of_another_seed(cells):
    for own, cell in zip(cells[ADAMW], cells[predicted.FOLLOWING], strict=True):
        other = own.seed + 1 if own.seed < 420 else 401
        assert set(cell.config.optim.path) == {round(1 + 1e-3 * other, 6)}


def test_the_prediction_rises_above_its_end_and_falls_as_decay_acts(cells):
    for cell in cells[predicted.PREDICTED]:
        path = cell.config.optim.path
        assert len(path) == 200
        top = path.index(max(path))
        assert 90 < top < 110
        assert path[-1] == pytest.approx(2.74, abs=0.02)
        assert path[top] == pytest.approx(2.95, abs=0.03)


@pytest.mark.parametrize(
    ("above", "outcomes"),
    [
        ({predicted.PREDICTED: 0.02}, ["refuted", "supported"]),
        ({predicted.FOLLOWING: -0.02}, ["supported", "refuted"]),
        ({predicted.FOLLOWING: 0.01}, ["supported", "not shown"]),
    ],
)
def test_the_claims(above, outcomes):
    made = recorded_often(predicted.STUDY, above, "ratio", lambda seed: 1 + 1e-3 * seed)
    findings = verdict.judge(made).findings
    assert [finding.outcome for _, finding in findings] == outcomes
