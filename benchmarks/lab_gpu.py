"""Measures the speed of the laboratory's training loop on a GPU: compared with nanoGPT, AdamWN with
AdamW, and with and without each of the things that make it fast. It prints the ratios.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch._inductor.config
import torch.nn.functional as F

from normcontrol.lab.data import batches
from normcontrol.lab.training import loop, metrics, model
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


def torch_head(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight), targets)


WITHOUT: dict[str, tuple[Any, str, Any]] = {
    "the kernel of the head": (model, "linear_cross_entropy", torch_head),
    "the kernel of GELU": (model, "gelu", F.gelu),
    "cuDNN's attention": (loop, "fast_kernels", lambda device: contextlib.nullcontext()),
    "reading data": (batches, "feed", Synthetic(batches.feed)),
}
"""What can be taken away from the loop: the module, the name in it, and what takes its place."""

WITH: dict[str, dict[str, bool]] = {
    "tuning of the compiler's kernels (coordinate descent)": {"coordinate_descent_tuning": True},
    "tuning of the compiler's pointwise kernels": {"max_autotune_pointwise": True},
}
"""Options of torch's compiler that the loop does not use."""


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    real = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, real)


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

    def say(what: str, value: float, aim: str = "") -> float:
        found[what] = value
        print(f"{what}: {f'{value:,.0f}' if value > 100 else f'{value:.4f}'} {aim}", flush=True)
        if arguments.json:  # at once, so that a run that is stopped keeps what it has measured
            kept = {"command": command, "machine": machine, "results": found}
            arguments.json.write_text(json.dumps(kept, indent=1) + "\n")
        return value

    command = (
        f"python benchmarks/lab_gpu.py --nanogpt FOLDER --steps {arguments.steps} "
        f"--micro-batch {arguments.micro_batch} --json {arguments.json}"
    )
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
            "ramp": 5,
            "optimizer": "AdamW",
        }
        rows = {"micro_batch": arguments.micro_batch}
        gpt2 = preset("gpt2").with_(**timed, **rows, tokens_per_step=arguments.micro_batch * 1024)

        def speed_of(config: Config) -> float:
            torch._dynamo.reset()
            return tokens_per_second(config, folder / "run")

        theirs = nanogpt(arguments.nanogpt, arguments.micro_batch) if arguments.nanogpt else None
        adamw = say("tokens/s, gpt2, AdamW", speed_of(gpt2))
        adamwn = say("tokens/s, gpt2, AdamWN", speed_of(gpt2.with_(optimizer="AdamWN")))
        in_bf16 = gpt2.with_(bf16_stream=True)
        stream = say("tokens/s, gpt2, AdamW, stream in bf16", speed_of(in_bf16))
        ours = speed_of(in_bf16.with_(optimizer="AdamWN"))
        say("tokens/s, gpt2, AdamWN, stream in bf16", ours)
        if theirs is not None:
            say("tokens/s, nanoGPT", theirs)
            say("speed, laboratory / nanoGPT", adamw / theirs, "(at least 1.15)")
            say("speed, laboratory with the stream in bf16 / nanoGPT", stream / theirs)
            say("speed, AdamWN with the stream in bf16 / nanoGPT", ours / theirs)
        say("speed, AdamWN / AdamW", adamwn / adamw, "(at least 0.99)")
        for what, changed in WITHOUT.items():
            with replaced(*changed):
                say(f"speed, with / without {what}", adamw / speed_of(gpt2))
        for what, options in WITH.items():
            with torch._inductor.config.patch(options):
                say(f"speed, with / without {what}", speed_of(gpt2) / adamw)
        say("speed, the first run again / the first run", speed_of(gpt2) / adamw)
        small = preset("small").with_(**timed)
        for name in ("AdamW", "AdamWN"):
            say(f"tokens/s, small, {name}", speed_of(small.with_(optimizer=name)))


if __name__ == "__main__":
    main()
