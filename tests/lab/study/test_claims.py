"""The rules of most claims: one arm has a lower loss than another, or they are level."""

from __future__ import annotations

import pytest
from fakes import FakeLedger, record

from normcontrol.lab.study.cells import Study, grid
from normcontrol.lab.study.claims import NOT_RUN, NOT_SHOWN, REFUTED, SUPPORTED, Claim, level, lower
from normcontrol.lab.study.verdict import judge
from normcontrol.lab.training.config import Config


def judged(cells, loss, *claims):
    """The findings of claims about invented losses, without the noise of seeds being equal."""

    def of(cell):
        return record(cell, loss(cell) + 1e-5 * cell.seed * len(cell.label))

    found = judge(FakeLedger(Study("s", cells, claims=claims), of)).findings
    return [finding for _, finding in found]


def claim(rule, name="a claim"):
    return Claim(name, "A is better than B", "it is not", rule)


def two_grids(a, b, seeds=range(4)):
    def cells(scale, done):
        tensor = Config().with_(scope="tensor")
        return grid("A", Config(), ratio=a, seeds=seeds) + grid("B", tensor, ratio=b, seeds=seeds)

    return cells


def bowl(cell, best=2.0, lead=0.1):
    """A loss that is lowest at a ratio; A is lower than B."""
    return 3 + (cell.config.optim.ratio - best) ** 2 - (lead if cell.arm == "A" else 0.0)


THREE = [1.0, 2.0, 3.0]


def test_arms_that_are_tuned_alike_can_be_compared():
    (found,) = judged(two_grids(THREE, THREE), bowl, claim(lower("A", "B")))
    assert found.outcome == SUPPORTED
    assert "n = 3, chosen by seed 0 and tested by others" in found.numbers
    (found,) = judged(two_grids(THREE, THREE), bowl, claim(lower("B", "A")))
    assert found.outcome == REFUTED


@pytest.mark.parametrize("rule", [lower("A", "B"), lower("B", "A"), level("A", "B", 0.3)])
@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        ([1.0, 2.0], THREE, "the best of A is at the edge of its grid (ratio=2)"),
        (THREE, [2.0, 3.0, 4.0], "the best of B is at the edge of its grid (ratio=2)"),
        ([1.0, 1.5, 2.0, 2.5, 3.0], THREE, "more than a factor of 1.5 apart"),
        (THREE, [2.0], "more than a factor of 1.5 apart"),
        ([2.0], THREE, "more than a factor of 1.5 apart"),
    ],
)
def test_nothing_is_shown_at_an_edge_or_with_unequal_trials(a, b, why, rule):
    (found,) = judged(two_grids(a, b), bowl, claim(rule))
    assert found.outcome == NOT_SHOWN
    assert found.chance < 0.05  # the losses alone would have decided it
    (reason,) = found.because
    assert why in reason


def test_an_arm_at_the_setting_found_for_another_had_one_trial_against_all_of_them():
    """``same`` leaves A one trial, but that was the best of three."""
    rule = lower("A", "B", same="ratio")
    (found,) = judged(two_grids(THREE, [2.0]), bowl, claim(rule))
    assert found.outcome == NOT_SHOWN
    assert "A had 3 trials and B 1" in found.text()
    assert "n = 3, chosen by seed 0 and tested by others" in found.numbers


def test_where_every_seed_was_used_for_the_choice_nothing_is_shown_and_it_is_said():
    (found,) = judged(two_grids(THREE, THREE, seeds=[0]), bowl, claim(lower("A", "B")))
    assert found.outcome == NOT_SHOWN
    assert "one seed has no interval" in found.text()
    assert "every seed was used both to choose the settings and to test them" in found.text()


def test_arms_are_level_by_two_one_sided_tests_and_not_by_an_interval_that_contains_zero():
    def noisy(cell):
        return bowl(cell, lead=0.0) + (0.02 * (-1) ** cell.seed if cell.arm == "A" else 0.0)

    cells = two_grids(THREE, THREE, seeds=range(5))
    same = claim(level("A", "B", 0.01))
    assert judged(cells, lambda cell: bowl(cell, lead=0.001), same)[0].outcome == SUPPORTED
    assert judged(cells, lambda cell: bowl(cell, lead=0.05), same)[0].outcome == REFUTED
    unclear, untested = judged(cells, noisy, same, claim(lower("A", "B")))
    assert unclear.outcome == untested.outcome == NOT_SHOWN


def test_claims_that_are_tested_together_are_corrected_for_their_number():
    """A lead with p = 0.03 is shown by itself, and not as one of several claims."""

    def loss(cell):
        return bowl(cell, lead=0.1) + (0.03 * (cell.seed - 2) if cell.arm == "A" else 0.0)

    cells = two_grids(THREE, THREE, seeds=range(5))
    (alone,) = judged(cells, loss, claim(lower("A", "B")))
    assert alone.outcome == SUPPORTED
    assert 0.02 < alone.chance < 0.05
    first, *others = judged(cells, loss, *[claim(lower("A", "B"))] * 3)
    assert first.outcome == NOT_SHOWN
    assert others == [first, first]
    assert "supported by itself, but not among 3 claims that are tested together" in first.text()
    assert "after Holm's correction for 3 claims" in first.numbers


def test_a_claim_that_cannot_be_tested_yet_counts_in_the_correction():
    """Else a study that stops early would have easier tests."""

    def loss(cell):
        return bowl(cell, lead=0.1) + (0.03 * (cell.seed - 2) if cell.arm == "A" else 0.0)

    cells = two_grids(THREE, THREE, seeds=range(5))
    rules = [lower("A", "B"), lower("A", "C"), lower("A", "D")]
    tested, *others = judged(cells, loss, *map(claim, rules))
    assert [found.outcome for found in others] == [NOT_RUN, NOT_RUN]
    assert tested.outcome == NOT_SHOWN
    assert "after Holm's correction for 3 claims" in tested.numbers


def test_a_claim_about_the_same_setting_compares_trials_that_share_it():
    """B tried other learning rates than A: A is chosen from those that B tried."""

    def cells(scale, done):
        tensor = Config().with_(scope="tensor")
        return grid("A", Config(), lr=[1e-3, 4e-3], ratio=THREE, seeds=range(4)) + grid(
            "B", tensor.with_(lr=1e-3), ratio=THREE, seeds=range(4)
        )

    def loss(cell):
        return bowl(cell) - cell.config.optim.lr * 1000

    same, any_rate = judged(cells, loss, claim(lower("A", "B", same="lr")), claim(lower("A", "B")))
    assert same.outcome == SUPPORTED
    assert same.numbers.startswith("A lr=0.001 ratio=2 minus B ratio=2: -0.09")
    assert any_rate.numbers.startswith("A lr=0.004 ratio=2 minus B ratio=2: -3.09")
    assert any_rate.outcome == NOT_SHOWN


@pytest.mark.parametrize(
    ("seeds", "lead", "outcome"),
    [([0], 0.05, NOT_SHOWN), ([0, 1, 2], 0.05, SUPPORTED), ([0, 1, 2], -0.05, NOT_SHOWN)],
)
def test_a_claim_is_not_supported_against_less_than_the_best_of_the_other_arm(seeds, lead, outcome):
    """B has four seeds at lr 2e-3, and fewer at 3e-3, where it is better. A leads by 0.2 over the
    first, by ``lead`` over the second."""

    def cells(scale, done):
        b = Config().with_(scope="tensor")
        return (
            grid("A", Config(), lr=[1e-3, 2e-3, 4e-3], seeds=range(4))
            + grid("B", b, lr=[1e-3, 2e-3, 4e-3], seeds=range(4))
            + grid("B", b, lr=[3e-3], seeds=seeds)
        )

    def of(cell):
        above = {2e-3: 0.0 if cell.arm == "A" else 0.2, 3e-3: lead}.get(cell.config.optim.lr, 1.0)
        return record(cell, 3 + above + 1e-5 * cell.seed * len(cell.label) * (above + 1))

    study = Study("s", cells, claims=(claim(lower("A", "B")),))
    ((_, found),) = judge(FakeLedger(study, of)).findings
    assert found.outcome == outcome
    assert f"minus lr=0.003, which did better there: {-lead:+.2f}" in found.numbers
