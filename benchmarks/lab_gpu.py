"""Measures the speed of the laboratory's training loop on a GPU: compared with nanoGPT, AdamWN with
AdamW, and shards with synthetic tokens. It prints the ratios.

    python benchmarks/lab_gpu.py [--nanogpt FOLDER] [--steps 60] [--micro-batch 64] [--json FILE]

FOLDER is a checkout of nanoGPT, whose bench.py is run with the same batch. Only torch and numpy
are needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from normcontrol.lab.data import batches
from normcontrol.lab.training import loop, metrics
from normcontrol.lab.training.config import Config, preset
from normcontrol.lab.training.loop import train


def tokens_per_second(config: Config, out: Path) -> float:
    """The median of the speeds that the training loop logs, without the first two: they include
    compiling."""
    train(config, out)
    speed = statistics.median(
        line["tokens_per_second"] for line in metrics.read(out, metrics.TIMING)[2:]
    )
    shutil.rmtree(out)
    return speed


def nanogpt(folder: Path, micro_batch: int) -> float:
    """Tokens per second of nanoGPT's bench.py: its model, compiled, with random tokens."""
    flags = [
        f"--batch_size={micro_batch}",
        "--block_size=1024",
        "--real_data=False",
        "--compile=True",
    ]
    done = subprocess.run(
        [sys.executable, "bench.py", *flags], cwd=folder, capture_output=True, text=True, check=True
    )
    milliseconds = float(re.findall(r"time per iteration: ([\d.]+)ms", done.stdout)[-1])
    return micro_batch * 1024 / milliseconds * 1000


class Synthetic:
    """Replaces :func:`feed`: yields the same batch at every step, already on the device."""

    def __init__(self, real):
        self.real = real

    def __call__(self, batches, mine, micro, device, steps):
        batch = next(self.real(batches, mine, micro, device, steps))
        while True:
            yield batch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, float] = {}

    def say(what: str, value: float, aim: str = "") -> None:
        found[what] = value
        print(f"{what}: {f'{value:,.0f}' if value > 100 else f'{value:.4f}'} {aim}", flush=True)

    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(machine, flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        random = np.random.default_rng(0)
        random.integers(0, 50257, 50_000_000).astype("<u2").tofile(folder / "train.bin")
        random.integers(0, 50257, 70_000).astype("<u2").tofile(folder / "val.bin")
        timed = {
            "data": str(folder),
            "steps": arguments.steps,
            "log_every": 5,
            "eval_every": arguments.steps,
            "checkpoint_every": arguments.steps,
            "warmup": 5,
        }
        gpt2 = preset("gpt2").with_(
            **timed, micro_batch=arguments.micro_batch, tokens_per_step=arguments.micro_batch * 1024
        )
        speeds = {}
        for name in ("AdamW", "AdamWN"):
            speeds[name] = tokens_per_second(gpt2.with_(optimizer=name), folder / name)
            say(f"tokens/s, gpt2, {name}", speeds[name])
        say("speed, AdamWN / AdamW", speeds["AdamWN"] / speeds["AdamW"], "(at least 0.99)")
        real, batches.feed = batches.feed, Synthetic(batches.feed)
        synthetic = tokens_per_second(gpt2.with_(optimizer="AdamW"), folder / "synthetic")
        batches.feed = real
        say("speed, real shards / synthetic tokens", speeds["AdamW"] / synthetic, "(at least 0.99)")
        cudnn, loop.fast_kernels = loop.fast_kernels, lambda device: contextlib.nullcontext()
        theirs = tokens_per_second(gpt2.with_(optimizer="AdamW"), folder / "attention")
        loop.fast_kernels = cudnn
        say("speed, attention by cuDNN / by torch's choice", speeds["AdamW"] / theirs)
        small = preset("small").with_(**timed)
        for name in ("AdamW", "AdamWN"):
            say(
                f"tokens/s, small, {name}",
                tokens_per_second(small.with_(optimizer=name), folder / f"small-{name}"),
                "(at least 1,300,000)",
            )
        if arguments.nanogpt:
            theirs = nanogpt(arguments.nanogpt, arguments.micro_batch)
            say("tokens/s, nanoGPT", theirs)
            say("speed, laboratory / nanoGPT", speeds["AdamW"] / theirs, "(at least 1.05)")
    if arguments.json:
        command = (
            f"python benchmarks/lab_gpu.py --nanogpt FOLDER --steps {arguments.steps} "
            f"--micro-batch {arguments.micro_batch} --json {arguments.json}"
        )
        arguments.json.write_text(
            json.dumps({"command": command, "machine": machine, "results": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
