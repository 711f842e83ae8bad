"""The study `follow`: what `search` and `rise` chose, with new seeds, and the path of another
seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import evidence_of, recorded_often

from normcontrol.lab.studies import causes, follow, growth, kept, longest, remarks, search
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.studies.search import RISING
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.study import verdict
from normcontrol.lab.training.config import check, differences
from normcontrol.lab.training.options import check_used

ROOT = Path(__file__).parents[3]


def ledger(above):
    return recorded_often(follow.STUDY, above, "ratio", lambda seed: 1 + 1e-3 * seed)


@pytest.mark.parametrize(("folder", "arm"), [("search-tiny", ADAMW), ("rise-tiny", RISING)])
def test_the_settings_are_those_that_were_tested(folder, arm):
    (tested,) = evidence_of(open_folder(ROOT / f"results/{folder}")).trials(arm, "test")
    (mine,) = {
        search.trial("tiny", arm, follow.CHOSEN[arm], seed, "test").trial for seed in follow.SEEDS
    }
    assert mine == tested.settings


def test_no_seed_was_run_before():
    before = {*search.SEEDS, *growth.SEEDS, *kept.SEEDS, *causes.SEEDS, *remarks.SEEDS}
    assert not set(follow.SEEDS) & {*before, *longest.LONGEST.seeds}


def test_the_path_is_that_of_another_seed_and_the_rest_is_as_in_adamw():
    of = ledger({})
    cells = of.cells(of.results())
    arms = {arm: [c for c in cells if c.arm == arm] for arm in (ADAMW, RISING, follow.FOLLOWING)}
    assert [len(some) for some in arms.values()] == [20, 20, 20]
    for own, following in zip(arms[ADAMW], arms[follow.FOLLOWING], strict=True):
        check(following.config)
        check_used(following.config)
        other = own.seed + 1 if own.seed < 260 else 241
        assert following.config.optim.path == (pytest.approx(1 + 1e-3 * other),) * 200
        same = {"lr": own.config.optim.lr, "warmup": 120, "min_lr": 0.03}
        assert {k: getattr(following.config.optim, k) for k in same} == same
        assert (own.config.run.log_every, own.seed) == (3, following.seed)
        changed = {"optimizer", "path", "log_every"}
        assert set(differences(own.config, following.config)) == changed


@pytest.mark.parametrize(
    ("above", "outcomes"),
    [
        ({RISING: 0.01}, {"level": "supported", "path": "supported"}),
        ({follow.FOLLOWING: 0.02}, {"level": "refuted", "path": "refuted"}),
        ({follow.FOLLOWING: 0.01}, {"level": "not shown", "path": "refuted"}),
    ],
)
def test_the_claims(above, outcomes):
    findings = verdict.judge(ledger(above)).findings
    assert {claim.name: finding.outcome for claim, finding in findings} == outcomes
