"""The scripts of the page on sharded training run, and the example gives the same numbers on one
process and on four."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import run

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    code.split("\n")[0][2:].split(".py")[0]: code
    for code in re.findall(
        r"^```py\n(.*?)^```$", (ROOT / "docs/sharded.md").read_text(), re.M | re.S
    )
}


def execute(path: str) -> str:
    """Run a script as torchrun would, in the process group that exists already. Returns what it
    prints."""
    dist.init_process_group = lambda *_, **__: None
    dist.destroy_process_group = lambda *_, **__: None
    tempfile.tempdir = None  # the parent process may have chosen a folder before TMPDIR was set
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_of_the_page_runs(name, tmp_path):
    if name == "deepspeed_zero" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("no DeepSpeed")
    path = tmp_path / "script.py"
    path.write_text(SCRIPTS[name])

    def printed(ranks: int) -> set[str]:
        return {
            line.split(": ")[-1]
            for line in run(
                execute,
                ranks,
                str(path),
                TMPDIR=str(tmp_path),
                CUDA_VISIBLE_DEVICES="",
                DS_ACCELERATOR="cpu",
            )
        }

    (line,) = printed(4 if name == "tensor_parallel" else 2)  # every rank has the same norm
    numbers = re.findall(r"\d+\.\d{4}", line)
    assert numbers
    if name == "checkpoint":
        assert line.startswith("10 steps")
        assert [again.split(",")[0] for again in printed(4)] == ["20 steps"]
    if name == "fsdp2":  # hybrid sharding, to the same norm
        assert printed(4) == {line}
    if name == "zero_redundancy":
        assert numbers[0] == numbers[1]


@pytest.mark.slow
def test_the_example_gives_the_same_numbers_on_one_process_and_on_four_and_resumes(tmp_path):
    example = str(ROOT / "examples/sharded_gpt.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    four = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        example,
    ]

    def printed(command: list[str], *more: str) -> list[str]:
        done = subprocess.run([*command, *more], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return re.findall(r"^step .*$", done.stdout, re.M)

    alone = printed([sys.executable, example], "--steps", "20")
    assert len(alone) == 2
    assert printed(four, "--steps", "10", "--checkpoint", str(tmp_path)) == alone[:1]
    assert (
        printed([sys.executable, example], "--steps", "20", "--checkpoint", str(tmp_path))
        == alone[1:]
    )
