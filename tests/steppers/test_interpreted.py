"""Runs the tests of the Triton kernels under Triton's interpreter, in a process of their own: the
interpreter must be chosen before Triton is imported. With a GPU, they run without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import CUDA, INTERPRETED

TESTS = Path(__file__).parents[1]
FILES = [
    "steppers/test_fused.py",
    "steppers/test_fused_gpu.py",
    "steppers/test_fused_events.py",
    "steppers/test_passes.py",
    "steppers/test_spectral.py",
    "lab/training/test_loss.py",
    "lab/training/test_gelu.py",
    "test_properties.py::test_any_settings_and_events_give_algorithm_1_in_kernels",
]

pytest.importorskip("triton")


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the tests of these files run here")
@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_under_the_interpreter(marked):
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += ["-m", marked, *(str(TESTS / file) for file in FILES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
