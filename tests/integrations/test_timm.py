"""timm with AdamWN: runs the checks of with_timm.py, which says why they need a separate process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from fork_server import python

CHECKS = Path(__file__).parent / "with_timm.py"


@pytest.mark.skipif(
    not (Path(sys.prefix) / "timm").exists() and importlib.util.find_spec("timm") is None,
    reason="timm is not installed (make installs it)",
)
def test_timm():
    done = python(CHECKS)
    passed = [line for line in done.out.splitlines() if line.startswith("passed ")]
    assert done.status == 0, done.out + done.err
    assert len(passed) == CHECKS.read_text().count("\ndef check_")
