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


@pytest.mark.parametrize(
    ("name", "rate"),
    [("AdamW-13a", 5e-5), ("AdamW-13b", 0.05), ("AdamW-lr2", 2.5e-8), ("Muon", 5e-5)],
)
def test_each_rule_of_decay_has_its_own_rate(name, rate):
    half = preset("gpt2").with_(optimizer=name, weight_decay=0.1)
    assert values(half, 1000) == (5e-4, 0.0, pytest.approx(rate))


@pytest.mark.parametrize("name", ["LAWN", "CPR-WS", "AdamW-replay", "Adam-L2"])
def test_no_schedule_of_decay_is_shown_for_a_method_that_has_none(name):
    assert values(preset("gpt2").with_(optimizer=name), 1000) == (5e-4, None, None)
