"""Measures how long it takes to start: imports beside ``import torch``, the command's help beside
an empty Python.

    python benchmarks/startup.py [--repeats 11]

Each case is a process of its own. The cases run in turn, so that other programs slow all of them
down, and medians are compared. Beside the wall time stands the time of the processor, which other
programs change less. Bytecode is written by a first run of each case, as an installation does it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import text_table, write

from normcontrol.lab.cli.main import COMMANDS

EMPTY, TORCH = "python -c pass", "import torch"
MOST = {TORCH: 0.2, EMPTY: 0.4}
"""Seconds: an import at most so much longer than torch's, a help at most so long in all."""


def cases() -> dict[str, list[str]]:
    """The arguments of Python for each case."""
    imports = ("import torch", "import normcontrol", "from normcontrol import *")
    helps = ["--help", *(f"{command} --help" for command in COMMANDS)]
    return {
        EMPTY: ["-c", "pass"],
        **{line: ["-c", line] for line in imports},
        **{f"normcontrol {words}": ["-m", "normcontrol.lab", *words.split()] for words in helps},
    }


def start(arguments: list[str]) -> tuple[float, float]:
    """Run a process to its end; return its wall time and its time on the processor."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"python {' '.join(arguments)} failed.")
    return wall, usage.ru_utime + usage.ru_stime


def measure(repeats: int) -> list[dict[str, Any]]:
    """Start every case in turn, ``repeats`` times; return medians."""
    chosen = cases()
    times: dict[str, list[tuple[float, float]]] = {case: [] for case in chosen}
    for arguments in chosen.values():
        start(arguments)
    for repeat in range(repeats):
        for case in chosen if repeat % 2 == 0 else reversed(chosen):
            times[case].append(start(chosen[case]))
    wall, processor = (
        {case: statistics.median(pair[i] for pair in pairs) for case, pairs in times.items()}
        for i in (0, 1)
    )
    results = []
    for case in chosen:
        peer = TORCH if "import" in case else EMPTY
        results.append(
            {
                "case": case,
                "against": peer,
                "seconds": wall[case],
                "processor_seconds": processor[case],
                "ratio": wall[case] / wall[peer],
                "more_seconds": wall[case] - wall[peer],
                "more_processor_seconds": processor[case] - processor[peer],
                "most_seconds": None if case in MOST else MOST[peer],
                "repeats": repeats,
            }
        )
    return results


def table(results: list[dict[str, Any]]) -> str:
    head = ("case", "against", "s", "processor s", "ratio", "more s", "processor more s", "goal")
    rows = [head]
    for r in results:
        numbers = (r["seconds"], r["processor_seconds"], r["ratio"], r["more_seconds"])
        goal = "-"
        if r["most_seconds"] is not None:
            goal = f"{r['most_seconds']} {'more' if r['against'] == TORCH else 'in all'}"
        more = f"{r['more_processor_seconds']:.2f}"
        rows.append((r["case"], r["against"], *(f"{x:.2f}" for x in numbers), more, goal))
    return text_table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    results = measure(args.repeats)
    print(table(results))
    write(args.json, results)


if __name__ == "__main__":
    main()
