"""Statistics against values computed by hand."""

from __future__ import annotations

import math

import pytest

from normcontrol.lab.study import statistics as stats


def test_statistics_by_hand():
    d = stats.paired([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert d.half == pytest.approx(4.303 / 3**0.5)
    assert d.detectable == pytest.approx((4.303 + 1.061) / 3**0.5)
    assert len(stats.T975) == len(stats.T80) == 30
    assert stats.steps_to([0, 10], [5.0, 4.0], 3.0) is None
    assert stats.best_of([1.0, math.inf])[1] == 1.0
    assert stats.best_of([1.0, math.inf])[0] == math.inf
    assert stats.paired([1.0], [0.5]).half is None
