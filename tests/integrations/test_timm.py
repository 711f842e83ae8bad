"""timm with AdamWN: runs the checks of with_timm.py, which says why they need a separate process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parent / "with_timm.py"


@pytest.mark.skipif(
    not (Path(sys.prefix) / "timm").exists() and importlib.util.find_spec("timm") is None,
    reason="timm is not installed (make installs it)",
)
def test_timm():
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(CHECKS)], env=env, capture_output=True, text=True, timeout=240
    )
    passed = [line for line in done.stdout.splitlines() if line.startswith("passed ")]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(passed) == CHECKS.read_text().count("\ndef check_")
