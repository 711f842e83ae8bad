"""Break the controller on purpose, one line at a time: the tests must notice every change.

    python tools/mutations.py            # all of them; half an hour on one core
    python tools/mutations.py folded     # those whose names contain a word
    python tools/mutations.py --list

Each mutation is made in a copy of the project, and the tests near it run there until one fails. It
is then KILLED; a mutation that SURVIVED shows code that no test protects. Write a test that kills
it, or delete it from ``mutations.txt`` if the changed code does the same as before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TIMEOUT = 900


class Mutation(NamedTuple):
    """A change of one place of a file under ``src/normcontrol``."""

    name: str
    file: str
    old: str
    new: str


NEAR = {
    "groups/sets.py": [
        *("tests/steppers/test_stepper.py", "tests/test_overflow.py", "tests/mechanisms"),
        *("tests/groups/test_settings.py", "tests/groups/test_members.py"),
        *("tests/groups/test_changes.py", "tests/test_schedule.py", "tests/test_reference.py"),
    ],
    "control.py": [
        *("tests/test_failed_steps.py", "tests/steppers/test_stepper.py", "tests/test_overflow.py"),
        *("tests/mechanisms", "tests/groups/test_state.py", "tests/groups/test_changes.py"),
        *("tests/test_amp_compile.py", "tests/test_wrapping.py", "tests/test_contract.py"),
        "tests/distributed/test_sharded_norms.py",
    ],
    "law.py": [
        *("tests/test_law.py", "tests/groups/test_settings.py"),
        *("tests/methods/test_constrained.py", "tests/mechanisms"),
    ],
    "steppers/stepper.py": [
        *("tests/test_failed_steps.py", "tests/steppers/test_stepper.py", "tests/test_overflow.py"),
        *("tests/steppers/test_folded.py", "tests/mechanisms", "tests/weights"),
        *("tests/test_amp_compile.py", "tests/distributed/test_sharded_norms.py"),
    ],
    "steppers/folded.py": [
        *("tests/steppers/test_folded.py", "tests/test_overflow.py", "tests/groups/test_state.py"),
        "tests/test_amp_compile.py::test_an_overflow_step_leaves_weights_norms_and_schedules_alone",
        *("tests/groups/test_shared_memory.py", "tests/test_failed_steps.py"),
        *("tests/test_contract.py", "tests/test_contract_numbers.py"),
    ],
    "steppers/clip.py": ["tests/steppers/test_clip.py", "tests/test_amp_compile.py"],
    "steppers/kernels.py": ["tests/steppers/test_fused_events.py"],
    "steppers/fused.py": ["tests/steppers/test_fused_events.py"],
    "steppers/pass_kernels.py": [
        *("tests/steppers/test_fused_events.py", "tests/steppers/test_passes.py"),
    ],
    "steppers/spectral_kernels.py": ["tests/steppers/test_spectral.py"],
}
"""The tests that run for the mutations of a file. Those of kernels run in Triton's interpreter."""

MUTATIONS = ROOT / "tools/mutations.txt"
INTERPRETED = {
    *("steppers/kernels.py", "steppers/pass_kernels.py", "steppers/spectral_kernels.py"),
    "steppers/fused.py",
}


def read(table: str) -> list[Mutation]:
    """The mutations of the table, whose first lines explain its form."""
    found: list[Mutation] = []
    for part in table.split("\n== ")[1:]:
        file, *blocks = part.strip().split("\n\n")
        for block in blocks:
            name, *lines = block.split("\n")
            old, new = ([line[2:] for line in lines if line[0] == sign] for sign in "-+")
            found.append(Mutation(name, file, "\n".join(old), "\n".join(new)))
    return found


def mutated(mutation: Mutation) -> str:
    """The text of the file with the mutation, or an error if it is not at one place there."""
    text = (ROOT / "src/normcontrol" / mutation.file).read_text()
    if text.count(mutation.old) != 1:
        sys.exit(
            f"{mutation.name}: src/normcontrol/{mutation.file} contains {mutation.old!r} "
            f"{text.count(mutation.old)} times, not once. Correct the table of mutations."
        )
    return text.replace(mutation.old, mutation.new)


def tested(file: str, text: str | None) -> tuple[int, str]:
    """Run the tests near a file with another text of it, or with its own. Returns the status of
    pytest and the first failure."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, Path(folder, name))
        shutil.copy(ROOT / "pyproject.toml", folder)
        if text is not None:
            Path(folder, "src/normcontrol", file).write_text(text)
        environment = {**os.environ, "PYTHONPATH": str(Path(folder, "src"))}
        if file in INTERPRETED:
            environment["TRITON_INTERPRET"] = "1"
        options = ["-x", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow"]
        command = [sys.executable, "-m", "pytest", *options, *NEAR[file]]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            return -1, f"no result in {TIMEOUT} s"
    lines = done.stdout.splitlines()
    first = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")
    return done.returncode, first if done.returncode in (0, 1) else first or done.stdout[-500:]


def judge(mutation: Mutation) -> bool:
    """Print what became of a mutation, and return whether a test failed."""
    begun = time.monotonic()
    status, first = tested(mutation.file, mutated(mutation))
    # Other numbers are not verdicts: nothing was collected, a syntax error, or no time.
    word = {0: "SURVIVED", 1: "KILLED"}.get(status, "ERROR")
    print(f"{word:8} {mutation.name}  {time.monotonic() - begun:.0f} s  {first}", flush=True)
    return status == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="mutations whose names contain one of these")
    parser.add_argument("--list", action="store_true", help="print their names and do nothing")
    parser.add_argument("--jobs", type=int, default=1, help="how many to try at the same time")
    given = parser.parse_args()
    every = read(MUTATIONS.read_text())
    chosen = [m for m in every if not given.words or any(w in m.name for w in given.words)]
    for mutation in chosen:
        mutated(mutation)
    if given.list:
        print("\n".join(f"{m.file}: {m.name}" for m in chosen))
        return
    for file in {m.file: None for m in chosen}:
        status, first = tested(file, None)
        if status:
            sys.exit(f"The tests near {file} fail without a mutation: {first}")
    with ThreadPoolExecutor(given.jobs) as pool:
        killed = list(pool.map(judge, chosen))
    print(f"{sum(killed)} of {len(killed)} mutations were killed.")
    sys.exit(not all(killed))


if __name__ == "__main__":
    main()
