"""The schedules of a run are those of its optimizer."""

import pytest

from normcontrol.lab.report.schedules import values
from normcontrol.lab.training.config import preset


def test_the_schedules_are_what_the_optimizer_will_do():
    gpt2 = preset("gpt2")
    assert values(gpt2.with_(ratio=2.4), 1250) == (
        1e-3 * 1250 / 2000,
        pytest.approx(1.7),
        1e-2,
    )
    assert values(gpt2.with_(optimizer="AdamW", weight_decay=0.1), 2000) == (
        1e-3,
        0.0,
        pytest.approx(1e-4),
    )
    assert values(gpt2.with_(optimizer="AdamC", weight_decay=0.1), 1000) == (
        5e-4,
        0.0,
        pytest.approx(0.1 * 2.5e-7 / 1e-3),
    )
    assert values(gpt2.with_(optimizer="SGD"), 2000) == (1e-3, None, None)
