"""Arms that are tuned alike and tested with other seeds, as the example of the docs does it."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import pytest
from fakes import FakeLedger, record

from normcontrol.lab.studies.tuning import Arm, Tuned
from normcontrol.lab.study import verdict
from normcontrol.lab.training.config import Config

PAGE = Path(__file__).parents[3] / "docs/studies.md"


def duel():
    """The study of the docs."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict = {}
    exec(next(block for block in blocks if "Tuned(" in block), names)
    return names["study"]


def ledger(lead):
    """Both arms have their best inside what is tried; SignSGD ends lower by a number."""

    def loss(cell):
        o = cell.config.optim
        middle = 4e-4 if cell.arm == "SignSGD" else 4e-3
        away = 0.1 * abs(math.log2(o.lr / middle)) + 0.1 * abs(math.log2(o.weight_decay / 0.4))
        noise = 0.002 * (cell.seed % 3 - 1) * (cell.arm == "AdamW")
        return 4.0 + away + noise - lead * (cell.arm == "SignSGD")

    return FakeLedger(duel(), lambda cell: record(cell, loss(cell)))


@pytest.mark.parametrize(
    ("lead", "outcomes"),
    [
        (0.05, ["supported", "refuted"]),
        (0.0, ["not shown", "supported"]),
        (-0.05, ["refuted", "refuted"]),
    ],
)
def test_the_example_of_the_docs_tells_which_is_lower(lead, outcomes):
    findings = verdict.judge(ledger(lead)).findings
    assert [finding.outcome for _, finding in findings] == outcomes


def test_both_have_as_many_trials_and_are_tested_with_other_seeds():
    made = ledger(0.0)
    cells = made.cells(made.results())
    parts = Counter((cell.arm, cell.part) for cell in cells)
    assert parts["AdamW", "tuning"] == parts["SignSGD", "tuning"] == 6
    assert {cell.seed for cell in cells if cell.part == "tuning"} == {0}
    tests = [(cell.arm, cell.seed) for cell in cells if cell.part == "seeds"]
    assert tests == [(arm, seed) for seed in range(1, 11) for arm in ("AdamW", "SignSGD")]


def test_an_arm_may_have_learning_rates_of_its_own():
    arms = {"A": Arm({}, "weight_decay", (0.1,) * 7), "B": Arm({}, "gain", (0.8,) * 7, lr=0.08)}
    tuned = Tuned(Config().with_(lr=0.8), arms)
    assert tuned.learning_rates("A") == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4])
    assert tuned.learning_rates("B") == pytest.approx([0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64])
