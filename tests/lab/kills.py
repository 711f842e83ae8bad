"""Kills a run with SIGKILL at random moments, resumes it each time, and compares it with an
uninterrupted run, bit by bit.

``PYTHONPATH=tests python tests/lab/kills.py 20`` does so twenty times over one run; the tests do it
a few times.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from fork_server import Python

from normcontrol.lab.training import checkpoint
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.run_folder import CONFIG


def start(config: Config, out: Path) -> Python:
    """Start or continue a run, in a process of its own."""
    if not (out / CONFIG).exists():
        out.mkdir(parents=True, exist_ok=True)
        config.save(out / CONFIG)
    return Python("-m", "normcontrol.lab", "train", "--resume", out)


def progress(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


def killed_and_resumed(config: Config, out: Path, kills: int, size: int, seed: int = 0) -> None:
    """Kill at random moments of the whole run. ``size`` is the number of bytes of metrics that an
    uninterrupted run writes."""
    chance = random.Random(seed)
    for number, moment in enumerate(sorted(chance.uniform(0, size) for _ in range(kills)), 1):
        process = start(config, out)
        process.wait_for(lambda moment=moment: progress(out) > moment)
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        print(f"kill {number}: at {progress(out) / size:.0%} of the metrics", flush=True)
    ended = start(config, out).end()
    if ended.status:
        raise RuntimeError(ended)


def differences(one: Path, two: Path) -> list[str]:
    """The names of the final weights, optimizer states and metrics that differ between two runs."""
    first, second = (checkpoint.load(checkpoint.latest(out / "checkpoints")) for out in (one, two))
    found = [
        name
        for name, weight in first["model"].items()
        if not torch.equal(weight, second["model"][name])
    ]
    for own, other in zip(first["optimizers"], second["optimizers"], strict=True):
        for index, state in own["state"].items():
            found += [
                f"state {index} {key}"
                for key, value in state.items()
                if not torch.equal(value, other["state"][index][key])
            ]
    if (one / "metrics.jsonl").read_bytes() != (two / "metrics.jsonl").read_bytes():
        found.append("metrics")
    return found


def main(kills: int) -> None:
    tiny = Config().with_(
        layers=2,
        heads=2,
        width=64,
        context=64,
        tokens_per_step=1024,
        optimizer="AdamWN",
        warmup=10,
        ramp=20,
    )
    config = tiny.with_(
        steps=50 * kills,
        log_every=1,
        eval_every=50,
        checkpoint_every=10,
        device="cpu",
        tokenizer="bytes",
    )
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "whole")
        killed_and_resumed(config, Path(folder) / "killed", kills, progress(Path(folder) / "whole"))
        found = differences(Path(folder) / "whole", Path(folder) / "killed")
    print(
        f"{kills} kills, {config.run.steps} steps: "
        f"{'bit-equal' if not found else 'DIFFERENT in ' + ', '.join(found)}"
    )
    sys.exit(bool(found))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
