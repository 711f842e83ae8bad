"""A step stays easy to follow: how many of our files, changes of file and calls it goes through."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import python

TOOL = Path(__file__).parents[2] / "tools" / "step_path.py"
LIMITS = {"PlainStepper": (6, 12, 35), "FoldedStepper": (7, 14, 40), "FusedStepper": (7, 14, 40)}


def paths(interpreted: bool) -> dict[str, tuple[int, ...]]:
    if interpreted:
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        command = [sys.executable, str(TOOL)]
        printed = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    else:
        printed = python(TOOL).out
    lines = dict(line.split(": ") for line in printed.splitlines())
    return {name: tuple(map(int, re.findall(r"\d+", text))) for name, text in lines.items()}


@pytest.mark.parametrize(
    "interpreted",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["on a CPU", "in Triton kernels"],
)
def test_a_step_goes_through_few_files_and_calls(interpreted):
    if interpreted:
        pytest.importorskip("triton")
    found = paths(interpreted)
    assert set(found) == ({"FusedStepper"} if interpreted else {"PlainStepper", "FoldedStepper"})
    for name, counts in found.items():
        assert all(a <= b for a, b in zip(counts, LIMITS[name], strict=True)), (name, counts)
