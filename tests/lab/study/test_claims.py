"""The rule of most claims: one arm has a lower loss than another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import FakeLedger, record

from normcontrol.lab.study.cells import Study, grid
from normcontrol.lab.study.claims import NOT_SHOWN, SUPPORTED, Claim, lower
from normcontrol.lab.study.verdict import judge
from normcontrol.lab.training.config import Config


def test_a_claim_about_the_same_setting_compares_trials_that_share_it():
    def cells(scale, done):
        return grid("A", Config(), ratio=[1.0, 2.0], seeds=[0, 1]) + grid(
            "B", Config().with_(scope="tensor"), ratio=[1.0], seeds=[0, 1]
        )

    def of(cell):
        return record(
            cell,
            3
            - 0.1 * cell.settings[-1][1]
            + (0.05 if cell.arm == "B" else 0.0)
            + 0.001 * cell.seed * len(cell.label),
        )

    claim = Claim("same", "A is better than B", "it is not", lower("A", "B", same="ratio"))
    (_, found), (_, other) = judge(
        FakeLedger(Study("s", cells, claims=(claim, replace(claim, rule=lower("A", "B")))), of)
    ).findings
    assert found.numbers.startswith("A ratio=1 minus B ratio=1: -0.05")
    assert other.numbers.startswith("A ratio=2 minus B ratio=1: -0.15")


@pytest.mark.parametrize(
    ("seeds", "lead", "outcome"),
    [([0], 0.05, NOT_SHOWN), ([0, 1], 0.05, SUPPORTED), ([0, 1], -0.05, NOT_SHOWN)],
)
def test_a_claim_is_not_supported_against_less_than_the_best_of_the_other_arm(seeds, lead, outcome):
    """B has three seeds at lr 1e-3, and fewer at 2e-3, where it is better. A leads by 0.2 over the
    first, by ``lead`` over the second."""

    def cells(scale, done):
        b = Config().with_(scope="tensor")
        return (
            grid("A", Config(), lr=[1e-3], seeds=range(3))
            + grid("B", b, lr=[1e-3], seeds=range(3))
            + grid("B", b, lr=[2e-3], seeds=seeds)
        )

    def of(cell):
        above = 0.0 if cell.arm == "A" else 0.2 if cell.config.optim.lr == 1e-3 else lead
        return record(cell, 3 + above + 0.001 * cell.seed * len(cell.label) * (above + 1))

    claim = Claim("best", "A is better than B", "it is not", lower("A", "B"))
    ((_, found),) = judge(FakeLedger(Study("s", cells, claims=(claim,)), of)).findings
    assert found.outcome == outcome
    assert f"but minus lr=0.002: {-lead:+.2f}" in found.numbers
