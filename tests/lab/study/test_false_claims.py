"""How often noise alone is called a result: studies without any true difference, judged by the
functions that judge real ones.

A study's result is drawn as often as in ``STUDIES``. The share of false results must be below 5 %
by three standard errors of that many draws, ``TOLERANCE``: 0.015 for 2,000. So a rate of 5 % or
more passes with a probability of about one in a thousand.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from normcontrol.lab.study.cells import grid
from normcontrol.lab.study.claims import NOT_SHOWN, SUPPORTED, corrected, is_lower
from normcontrol.lab.study.comparison import Comparison, choose
from normcontrol.lab.study.evidence import Trial
from normcontrol.lab.study.records import Record
from normcontrol.lab.training.config import Config

STUDIES, SEEDS = 2000, 5
LEVEL = 0.05
TOLERANCE = 3 * math.sqrt(LEVEL * (1 - LEVEL) / STUDIES)


def arm(name, losses):
    """An arm with a trial for each row of losses, which has a column for each seed."""
    return [
        Trial(
            name,
            CELLS[name, i],
            tuple(Record("", {}, {}, "finished", {"val_loss": x}) for x in row),
        )
        for i, row in enumerate(losses.tolist())
    ]


CELLS = {
    (name, i): tuple(grid(name, Config(), ratio=[1.0 + i], seeds=range(SEEDS)))
    for name in "ABCDE"
    for i in range(10)
}


def studies(*trials, shape="flat"):
    """The losses of each arm in every study: the same seeds for all arms, and noise of each run.

    By its shape: no setting matters, or the middle of each grid is best in all arms alike, by less
    or more than the noise.
    """
    draw = np.random.default_rng(1).standard_normal
    shared = draw((STUDIES, 1, SEEDS))
    found = []
    for count in trials:
        place = np.arange(count) - (count - 1) // 2
        away = {"flat": 0.0, "bowl": 0.3, "steep": 10.0}[shape] * place**2
        found.append(shared + away[None, :, None] + draw((STUDIES, count, SEEDS)))
    return zip(*found, strict=True)


def judged(one, other):
    """The finding of "A is lower than B", and whether A is."""
    both = Comparison(choose(arm("A", one)), choose(arm("B", other)))
    return is_lower(both), both.difference().mean < 0


@pytest.mark.parametrize(
    ("trials", "shape"),
    [((10, 1), "flat"), ((10, 1), "bowl"), ((1, 10), "bowl"), ((10, 10), "bowl")],
)
def test_noise_is_called_a_result_in_at_most_one_study_of_twenty(trials, shape):
    """By its p-value alone, as if edges and unequal numbers of trials were no obstacle."""
    found = [judged(*losses) for losses in studies(*trials, shape=shape)]
    decided = [(finding.chance <= LEVEL, lower) for finding, lower in found]
    assert np.mean([shown for shown, _ in decided]) < LEVEL + TOLERANCE
    assert np.mean([shown and lower for shown, lower in decided]) < LEVEL - TOLERANCE
    supported = np.mean([finding.outcome == SUPPORTED for finding, _ in found])
    assert supported < LEVEL - TOLERANCE
    if trials != (10, 10):
        assert supported == 0  # and they are an obstacle


@pytest.mark.parametrize("trials", [(10, 1), (10, 10)])
@pytest.mark.parametrize("seeds", [2, 3])
def test_nor_where_only_the_best_of_the_first_seeds_is_given_more(trials, seeds):
    """All trials have the first seeds, the best of them in all of these has the others too."""

    def staged(name, losses):
        whole, best = arm(name, losses), losses[:, :seeds].mean(axis=1).argmin()
        first = [Trial(t.arm, t.cells[:seeds], t.records[:seeds]) for t in whole]
        return [whole[i] if i == best else t for i, t in enumerate(first)]

    compared = [
        Comparison(choose(staged("A", one)), choose(staged("B", other)))
        for one, other in studies(*trials)
    ]
    findings = [(is_lower(each).chance <= LEVEL, each.difference().mean < 0) for each in compared]
    assert np.mean([shown for shown, _ in findings]) < LEVEL + TOLERANCE
    assert np.mean([shown and lower for shown, lower in findings]) < LEVEL - TOLERANCE


def test_the_simulation_sees_a_rule_that_chooses_and_tests_by_the_same_seeds():
    """The best of ten against one, in all seeds: about one false result in nine."""
    wrong = 0
    for one, other in studies(10, 1):
        difference = one[one.mean(axis=1).argmin()] - other[0]
        wrong += difference.mean() < -2.776 * difference.std(ddof=1) / math.sqrt(SEEDS)
    assert wrong / STUDIES > LEVEL + TOLERANCE


def test_of_several_false_claims_any_is_shown_in_at_most_one_study_of_twenty():
    wrong = alone = 0
    for one, *others in studies(1, 1, 1, 1, 1):
        first = choose(arm("A", one))
        rivals = [choose(arm(name, losses)) for name, losses in zip("BCDE", others, strict=True)]
        findings = [is_lower(Comparison(first, rival)) for rival in rivals]
        alone += any(f.outcome != NOT_SHOWN for f in findings)
        wrong += any(f.outcome != NOT_SHOWN for f in corrected(findings))
    assert wrong / STUDIES < LEVEL + TOLERANCE
    assert alone / STUDIES > 2 * LEVEL


def test_a_true_difference_is_still_found():
    found = [judged(one - 10, other)[0] for one, other in studies(3, 3, shape="steep")]
    assert np.mean([finding.outcome == SUPPORTED for finding in found]) > 0.9
