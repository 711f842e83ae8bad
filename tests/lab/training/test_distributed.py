"""Two processes compute what one does, and each number of processes can go on with another's
run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from normcontrol.lab.cli.main import main
from normcontrol.lab.training import checkpoint, metrics
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.run_folder import CONFIG


def torchrun(out, *command: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = command or ("train", "--resume", str(out))
    done = subprocess.run(
        [*launcher, "-m", "normcontrol.lab", *command], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(out):
    return [line.get("loss", line.get("val_loss")) for line in metrics.read(out)]


def begun(config, out):
    out.mkdir()
    config.save(out / CONFIG)
    return out


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_reproduce_one_and_one_goes_on_with_two(config, tmp_path, parallel):
    config = config.with_(optimizer="AdamWN", micro_batch=2)
    assert train(config, tmp_path / "one")
    two = begun(config.with_(parallel=parallel), tmp_path / "two")
    torchrun(two)
    assert losses(two) == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    ours, theirs = (
        next(line for line in metrics.read(out) if "angle" in line)
        for out in (two, tmp_path / "one")
    )
    assert ours == pytest.approx(
        theirs, rel=1e-3
    )  # norms of classes, angle and effective decay are those of all the processes

    # Take the last checkpoint away, and let a single process finish what two began.
    checkpoint.latest(two / "checkpoints").unlink()
    assert train(config, two, resume=True)
    assert losses(two) == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


def test_two_processes_go_on_with_what_one_began(config, tmp_path):
    config = config.with_(optimizer="AdamWN")
    assert train(config, tmp_path / "one")
    before = losses(tmp_path / "one")
    checkpoint.latest(tmp_path / "one" / "checkpoints").unlink()
    torchrun(tmp_path / "one")
    assert losses(tmp_path / "one") == pytest.approx(before, abs=1e-5)


def test_processes_without_a_common_folder_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert main(["train"]) == 1
    assert "each would choose a folder of its own: give one as --out" in capsys.readouterr().err


def test_a_challenge_on_two_processes_is_that_of_one(config, tmp_path):
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
    said = torchrun(tmp_path / "two", *command, "--out", str(tmp_path / "two"))
    assert said.count("The page with the four panels is") == 1
    for arm in (tmp_path / "one").glob("**/metrics.jsonl"):
        twin = tmp_path / "two" / arm.parent.relative_to(tmp_path / "one")
        assert losses(twin) == pytest.approx(losses(arm.parent), abs=1e-5)


def test_a_process_that_is_done_does_not_wait_for_threads_of_others():
    code = """
import atexit, threading
from normcontrol.lab.training.parallel import exit_now
atexit.register(print, "closed")
threading.Thread(target=threading.Event().wait).start()  # keeps an interpreter from winding down
print("done")
exit_now(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "done\nclosed\n"), done.stderr
