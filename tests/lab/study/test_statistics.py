"""Statistics against values computed by hand, and against tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from normcontrol.lab.study.statistics import (
    Difference,
    average,
    best_of,
    holm,
    paired,
    power,
    steps_to,
    student,
    student_below,
)


def test_statistics_by_hand():
    d = paired([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert d.half == pytest.approx(4.302653 / 3**0.5)
    assert steps_to([0, 10], [5.0, 4.0], 3.0) is None
    assert best_of([1.0, math.inf])[1] == 1.0
    assert best_of([1.0, math.inf])[0] == math.inf
    assert paired([1.0], [0.5]).half is None


@pytest.mark.parametrize(
    ("freedom", "at_975", "at_80"),
    [
        (1, 12.706, 1.376),
        (2, 4.303, 1.061),
        (3, 3.182, 0.978),
        (4, 2.776, 0.941),
        (9, 2.262, 0.883),
        (30, 2.042, 0.854),
        (1000, 1.962, 0.842),
    ],
)
def test_the_quantiles_of_students_t_are_those_of_the_tables(freedom, at_975, at_80):
    assert student(0.975, freedom) == pytest.approx(at_975, abs=5e-4)
    assert student(0.8, freedom) == pytest.approx(at_80, abs=5e-4)
    assert student_below(-at_975, freedom) == pytest.approx(0.025, abs=1e-4)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 20])
def test_a_detectable_difference_is_shown_in_four_of_five_studies(n):
    """Studies whose spread is 1, and whose true difference is the one that is called detectable
    with that spread."""
    true = Difference(n, 0.0, 1 / n**0.5).detectable
    studies = np.random.default_rng(0).normal(true, 1.0, (100_000, n))
    means, errors = studies.mean(axis=1), studies.std(axis=1, ddof=1) / n**0.5
    shown = abs(means) > student(0.975, n - 1) * errors
    assert shown.mean() == pytest.approx(0.8, abs=0.005)  # four standard errors
    ordinary = average(list(studies[0]))
    assert ordinary.shown == shown[0]


def test_the_power_of_a_study_is_that_of_the_noncentral_t():
    assert power(0.0, 3) == pytest.approx(0.05)  # by chance
    assert power(1e3, 1) == pytest.approx(1.0)
    # Of many seeds the error is known: 1.960 for the test, and 0.842 for four of five.
    assert Difference(10_001, 0.0, 1.0).detectable == pytest.approx(2.8016, abs=1e-3)
    assert average([1.0]).detectable is None


def test_the_tests_agree_with_the_interval_and_a_single_pair_shows_nothing():
    d = average([-0.03, -0.02, -0.04, -0.01])
    edge = d.mean + d.half
    assert d.chance_below(edge) == pytest.approx(0.025)
    assert d.chance_above(d.mean - d.half) == pytest.approx(0.025)
    assert d.chance_below() + d.chance_above() == pytest.approx(1)
    assert average([-1.0]).chance_below() == average([-1.0]).chance_within(2.0) == 1.0
    same = average([0.0, 0.0])
    assert (same.chance_below(), same.chance_below(0.1), same.chance_within(0.1)) == (1.0, 0.0, 0.0)


def test_an_interval_that_contains_zero_is_not_yet_level():
    wide, narrow = average([-0.02, 0.03, 0.0]), average([-0.002, 0.003, 0.0])
    assert not wide.shown
    assert wide.chance_within(0.01) > 0.025
    assert narrow.chance_within(0.01) < 0.025
    assert average([0.051, 0.049, 0.05]).chance_beyond(0.01) < 0.025


def test_p_values_of_tests_made_together_are_corrected_by_holm():
    assert holm([0.02]) == [0.02]
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_probability_is_never_below_zero_or_above_one():
    """The sum of the closed form is rounded, and 1 minus that sum can end below zero."""
    for t in range(1, 160):
        assert student_below(-t / 4, 301) >= 0
        assert student_below(t / 4, 301) <= 1
