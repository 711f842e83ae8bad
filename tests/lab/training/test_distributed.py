"""Tests of training under torchrun, on CPUs: two processes compute what one does, and a run can be
resumed with another number of processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import python
from processes import as_torchrun

from normcontrol.lab.cli.main import main
from normcontrol.lab.training import checkpoint, metrics
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.run_folder import CONFIG


def torchrun(*command: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "-m", "normcontrol.lab", *command], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def resume_on_two(out: Path) -> None:
    for ended in as_torchrun(2, "-m", "normcontrol.lab", "train", "--resume", str(out)):
        assert ended.status == 0, ended


def losses(out):
    return [line.get("loss", line.get("val_loss")) for line in metrics.read(out)]


def begin(config, out):
    out.mkdir()
    config.save(out / CONFIG)
    return out


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_processes_compute_what_one_does_and_one_resumes_their_run(config, tmp_path, parallel):
    config = config.with_(optimizer="AdamWN", micro_batch=2)
    assert train(config, tmp_path / "one")
    two = begin(config.with_(parallel=parallel), tmp_path / "two")
    resume_on_two(two)
    assert losses(two) == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    # The norms of classes, the angle and the effective decay are computed over both processes.
    of_two, of_one = (
        next(line for line in metrics.read(out) if "angle" in line)
        for out in (two, tmp_path / "one")
    )
    assert of_two == pytest.approx(of_one, rel=1e-3)

    # Delete the last checkpoint, and resume with a single process.
    checkpoint.latest(two / "checkpoints").unlink()
    assert train(config, two, resume=True)
    assert losses(two) == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


def test_two_processes_resume_the_run_of_one(config, tmp_path):
    config = config.with_(optimizer="AdamWN")
    assert train(config, tmp_path / "one")
    before = losses(tmp_path / "one")
    checkpoint.latest(tmp_path / "one" / "checkpoints").unlink()
    resume_on_two(tmp_path / "one")
    assert losses(tmp_path / "one") == pytest.approx(before, abs=1e-5)


def test_processes_without_a_common_folder_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert main(["train"]) == 1
    assert (
        "each would choose a folder of its own. Give a common one as --out"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_challenge_on_two_processes_has_the_losses_of_one_process(config, tmp_path):
    sizes = {
        "layers": 1,
        "heads": 2,
        "width": 32,
        "context": 32,
        "tokens_per_step": 256,
        "micro_batch": 4,
        "steps": 8,
        "warmup": 2,
    }
    flags = {
        **sizes,
        "data": config.data.data,
        "ramp": 3,
        "eval_every": 4,
        "log_every": 1,
        "device": "cpu",
    }
    command = [
        "challenge",
        "--arms",
        "adamwn",
        *(f"--{key.replace('_', '-')}={value}" for key, value in flags.items()),
    ]
    assert main([*command, "--out", str(tmp_path / "one")]) == 0
    printed = torchrun(*command, "--out", str(tmp_path / "two"))
    assert printed.count("The page with the four panels is") == 1
    for arm in (tmp_path / "one").glob("**/metrics.jsonl"):
        twin = tmp_path / "two" / arm.parent.relative_to(tmp_path / "one")
        assert losses(twin) == pytest.approx(losses(arm.parent), abs=1e-5)


def test_exit_now_runs_exit_handlers_and_does_not_wait_for_threads():
    code = """
import atexit, threading
from normcontrol.lab.training.parallel import exit_now
atexit.register(print, "closed")
threading.Thread(target=threading.Event().wait).start()  # would keep the interpreter alive
print("done")
exit_now(3)
"""
    done = python("-c", code)
    assert (done.status, done.out) == (3, "done\nclosed\n"), done.err
