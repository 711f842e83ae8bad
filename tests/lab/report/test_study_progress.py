"""The table of a study that is updated while it runs."""

from __future__ import annotations

import io
import re

import fakes
import pytest

from normcontrol.lab.report.study_progress import LiveTable
from normcontrol.lab.study.cells import grid
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.loop import Status


def test_the_live_table_fills_in():
    rich = pytest.importorskip("rich.console")
    live = LiveTable()
    one, two = grid("AdamW", Config(), lr=[1e-3], seeds=[0, 1])
    live.show(two.label, Status(5, 10, 3.5, 1.2, None, None, 1e3, None))
    live.finished(one, fakes.record(one, 3.25), 1, 2)
    console = rich.Console(record=True, width=120, file=io.StringIO())
    console.print(live.table(120))
    text = console.export_text()
    assert "1 of 2 cells known so far" in text
    assert re.search(r"AdamW lr=0.001 +3.2500", text)
    assert "AdamW lr=0.001 seed=1: 5/10, loss 3.500" in text
