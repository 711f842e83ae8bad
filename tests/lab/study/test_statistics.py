"""Statistics against values computed by hand."""

from __future__ import annotations

import math

import pytest

from normcontrol.lab.study.statistics import T80, T975, best_of, paired, steps_to


def test_statistics_by_hand():
    d = paired([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert d.half == pytest.approx(4.303 / 3**0.5)
    assert d.detectable == pytest.approx((4.303 + 1.061) / 3**0.5)
    assert len(T975) == len(T80) == 30
    assert steps_to([0, 10], [5.0, 4.0], 3.0) is None
    assert best_of([1.0, math.inf])[1] == 1.0
    assert best_of([1.0, math.inf])[0] == math.inf
    assert paired([1.0], [0.5]).half is None
