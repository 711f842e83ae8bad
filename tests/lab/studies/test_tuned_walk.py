"""The study `tuned-walk`: a random walk to a tuned ratio, searched like the arms of `search`."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fakes import FakeLedger, record

from normcontrol.lab.studies import (
    STUDIES,
    causes,
    follow,
    growth,
    kept,
    larger,
    longest,
    matched,
    muon,
    remarks,
    rise,
    search,
    shape,
    tuned_walk,
    walk,
)
from normcontrol.lab.studies.search import RISING, WALK
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.study import verdict
from normcontrol.lab.training.config import check, differences
from normcontrol.lab.training.options import check_used

SEEDS = tuned_walk.PROTOCOL.seeds


def ledger(study=tuned_walk.STUDY, lead=0.03):
    def loss(cell):
        noise = random.Random(f"{cell.arm} {cell.seed}").gauss(0, 1e-3)
        away = 0.1 * abs(cell.config.optim.lr - 8.5e-3)
        return record(cell, 4.3 + noise + away - lead * (cell.arm == WALK))

    return FakeLedger(study, loss, "tiny")


def named(study=tuned_walk.STUDY):
    made = ledger(study)
    return made.cells(made.results())


def test_it_is_known_by_its_name():
    assert STUDIES["tuned-walk"] is tuned_walk.STUDY


def test_no_seed_was_run_before():
    others = (causes, follow, growth, kept, larger, matched, muon, remarks, search, shape, walk)
    before = {seed for study in others for seed in study.SEEDS}
    assert not set(SEEDS) & (before | set(longest.LONGEST.seeds))


@pytest.mark.parametrize(("study", "arm"), [(search.STUDY, ADAMW), (rise.STUDY, RISING)])
def test_the_other_arms_are_tuned_by_the_same_cells(study, arm):
    ours, theirs = named(), named(study)
    assert [c for c in ours if c.arm == arm and c.part != "test"] == [
        c for c in theirs if c.arm == arm and c.part != "test"
    ]


def test_all_arms_have_as_many_trials_and_seeds():
    counts = Counter((cell.arm, cell.part == "test") for cell in named())
    assert {counts[arm, True] for arm in tuned_walk.ARMS} == {len(SEEDS)} == {40}
    assert {counts[arm, False] for arm in tuned_walk.ARMS} == {68}


def test_the_walk_ends_at_the_ratio_that_is_tuned():
    for cell in named():
        if cell.arm == WALK:
            check(cell.config)
            check_used(cell.config)
            assert cell.config.optim.path[-1] == dict(cell.settings)["ratio"]
            assert len(cell.config.optim.path) == cell.config.run.steps


def test_with_adamws_settings_it_is_the_arm_of_shape():
    of_shape = next(
        cell for cell in shape.beside("tiny", 261, {WALK: shape.walk}) if cell.arm == WALK
    )
    point = (*shape.CHOSEN[ADAMW][:1], 4, *shape.CHOSEN[ADAMW][2:])
    ours = search.trial("tiny", WALK, point, 261, "test")
    assert set(differences(of_shape.config, ours.config)) <= {"path", "ratio", "weight_decay"}


@pytest.mark.parametrize(
    ("lead", "outcomes"),
    [
        (0.03, ["supported", "refuted", "supported"]),
        (0.0, ["not shown", "supported", "not shown"]),
        (-0.03, ["refuted", "refuted", "refuted"]),
    ],
)
def test_the_claims(lead, outcomes):
    findings = verdict.judge(ledger(lead=lead)).findings
    assert [finding.outcome for _, finding in findings] == outcomes
