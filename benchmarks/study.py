"""Measures the overhead of a study: its wall time compared with the same runs without the runner,
and the throughput of two workers compared with one.

    python benchmarks/study.py [--runs 4] [--steps 1000]

It prints the two ratios. The time to start the workers counts. Every run has one thread and the
length of the runs of the studies at `tiny`. Half of the slower cases are measured before the
fastest one and half after it, so that a change of the machine's speed favours none. The machine
should be idle otherwise.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from normcontrol.lab.cores import cores
from normcontrol.lab.studies.bases import base
from normcontrol.lab.studies.opening import begin
from normcontrol.lab.study.cells import grid
from normcontrol.lab.study.runner import Runner
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.loop import train

STUDY = """
from pathlib import Path
from normcontrol.lab.training.config import Config
from normcontrol.lab.study.cells import grid

def study(scale, done):
    return grid("AdamWN", Config.load(Path({config!r})), seeds=range({runs}))
"""


@contextlib.contextmanager
def clock(name: str, into: dict[str, float]) -> Iterator[None]:
    """Add the time of the block to ``into[name]``."""
    start = time.perf_counter()
    yield
    into[name] = into.get(name, 0.0) + time.perf_counter() - start


def alone(config: Config, runs: int, folder: Path) -> None:
    """Train the runs one after the other, without a study."""
    for cell in grid("AdamWN", config, seeds=range(runs)):
        assert train(cell.config, folder / str(cell.seed), cache=folder.parent / "data")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = base("tiny").with_(steps=arguments.steps, device="cpu", eval_every=arguments.steps)
        config.save(folder / "config.json")
        alone(config.with_(steps=50), 1, folder / "warm-up")  # prepares the data, fills the caches

        def study(name: str, workers: int, runs: int) -> None:
            file = folder / f"{name.replace(' ', '_')}.py"
            file.write_text(STUDY.format(config=str(folder / "config.json"), runs=runs))
            assert (
                Runner(begin(folder / name, str(file), "tiny"), device="cpu", workers=workers)
                .run()
                .left
                == 0
            )

        def slow_cases(when: str) -> list[tuple[str, Any]]:
            half = arguments.runs // 2
            return [
                ("alone", lambda: alone(config, half, folder / f"alone {when}")),
                ("one worker", lambda: study(f"one {when}", 1, half)),
            ]

        for name, measured in [
            *slow_cases("before"),
            ("two workers", lambda: study("two", 2, arguments.runs // 2 * 2)),
            *reversed(slow_cases("after")),
        ]:
            with clock(name, times):
                measured()
    overhead, speedup = (
        times["one worker"] / times["alone"],
        times["one worker"] / times["two workers"],
    )
    print(
        f"{arguments.runs} runs of {arguments.steps} steps: "
        + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in times.items())
    )
    print(f"wall time, study / runs alone: {overhead:.3f} (at most 1.05)")
    print(f"throughput, two workers / one: {speedup:.2f} (at least 1.7)")
    if arguments.json:
        command = (
            f"python benchmarks/study.py --runs {arguments.runs} --steps {arguments.steps} --json "
            f"{arguments.json}"
        )
        machine = {"cores": cores(), "torch": torch.__version__}
        found = {
            "command": command,
            "machine": machine,
            "overhead": overhead,
            "speedup": speedup,
            "seconds": times,
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
