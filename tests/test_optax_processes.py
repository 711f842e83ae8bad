"""The JAX side on sharded arrays and after a restart: processes with several host devices each."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def run(folder, part, devices=1, dtype="float32"):
    """Run ``optax_process.py`` and return the arrays that it wrote."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",  # as in use, unlike in conftest.py
        "PYTHONPATH": str(ROOT / "src"),
    }
    command = [sys.executable, str(ROOT / "tests/optax_process.py"), part, str(folder), dtype]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return None if part == "save" else dict(np.load(folder / f"{part}{devices}.npz"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_devices_have_the_norms_of_one(tmp_path, dtype):
    one, four = run(tmp_path, "straight", 1, dtype), run(tmp_path, "straight", 4, dtype)
    assert [run.pop("exchange") for run in (one, four)] == [False, True]
    within = 1e-5 if dtype == "float32" else 2**-6
    for name, value in one.items():
        np.testing.assert_allclose(four[name], value, rtol=within, atol=within, err_msg=name)
    joint = [np.square(one[name]).sum() for name in ("up", "down")]
    # With one norm for each array, "down" comes first, because JAX sorts names.
    expected = np.sqrt(sum(joint)) if dtype == "float32" else np.sqrt(joint)[::-1]
    np.testing.assert_allclose(one["norm"], expected, rtol=1e-5 if dtype == "float32" else 2e-3)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_run_resumed_from_orbax_is_the_same_run(tmp_path, devices):
    straight = run(tmp_path, "straight", devices)
    run(tmp_path, "save", devices)
    resumed = run(tmp_path, "resume", devices)
    for name, value in straight.items():
        assert np.array_equal(resumed[name], value), name


def test_the_example_reaches_its_target(tmp_path):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "examples/jax_nnx.py"), "--steps", "60"]
    printed = subprocess.run(
        command, env=env, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=300
    ).stdout
    last = printed.strip().splitlines()[-1].split()
    assert last[0] == "60"
    assert abs(float(last[2]) - float(last[3])) < 0.02, printed
