"""Run the core tests with the oldest, the pinned and the newest torch, in separate environments.

``make test-versions``. Versions other than the pinned one are CUDA builds of several gigabytes,
which also run on a CPU. They are not installed in the project's own environment. The numbers of
passed tests are written to ``results/versions.json`` and to the table in ``docs/versions.md``;
``tests/project/test_versions.py`` compares the declared range of versions with them.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results/versions.json", ROOT / "docs/versions.md"
MATRIX = [("3.10", "2.6.0"), ("3.11", "2.13.0"), ("3.12", "2.11.0"), ("3.13", "2.15.0")]
"""Python and torch: the oldest, the pinned one, the one of the GPU measurements, the newest."""

CORE = [
    "tests/test_adamw_equality.py",
    "tests/test_amp_compile.py",
    "tests/test_contract.py",
    "tests/test_contract_numbers.py",
    "tests/test_default_device.py",
    "tests/test_failed_steps.py",
    "tests/test_law.py",
    "tests/test_law_functions.py",
    "tests/test_reference.py",
    "tests/test_schedule.py",
    "tests/test_schedule_text.py",
    "tests/test_set_norm.py",
    "tests/test_warn.py",
    "tests/test_wrapping.py",
    "tests/groups",
    "tests/mechanisms",
    "tests/methods",
    "tests/predict",
    "tests/steppers/test_folded.py",
    "tests/weights",
    "tests/watch/test_average.py",
    "tests/watch/test_report.py",
    "tests/watch/test_trace.py",
]
"""The tests that need nothing but torch and the packages below."""

NEEDS = [
    "numpy",
    "matplotlib",
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "expecttest",
    "pytorch_optimizer",
    "schedulefree",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only",
        nargs="*",
        metavar="PYTHON",
        help="run these versions only, such as 3.10; the others keep their results",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="create the environments in this folder and keep them; by default they are deleted",
    )
    args = parser.parse_args()
    unknown = set(args.only or ()) - {python for python, _ in MATRIX}
    if unknown:
        raise SystemExit(
            f"Python {', '.join(unknown)} is not in the matrix. Give one of "
            f"{', '.join(python for python, _ in MATRIX)}."
        )
    results = (
        {row["python"]: row for row in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    )
    failed = False
    for python, torch in MATRIX:
        if args.only and python not in args.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            counts = tested(python, torch, (args.keep or Path(folder)) / f"{python}-{torch}")
        results[python] = {"python": python, "torch": torch, **counts}
        failed |= bool(counts["failed"])
        print(f"Python {python}, torch {torch}: {counts}", flush=True)
    rows = [results[python] for python, _ in MATRIX if python in results]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(
        re.sub(
            r"(?s)(<!-- core -->\n).*?(<!-- end -->)",
            lambda m: m[1] + table(rows) + m[2],
            PAGE.read_text(),
        )
    )
    sys.exit(failed)


def tested(python: str, torch: str, environment: Path) -> dict[str, int]:
    """Create the environment if it does not exist, run the core tests, and count the results."""
    run = str(environment / "bin/python")
    if not environment.exists():
        subprocess.run([interpreter(python), "-m", "venv", str(environment)], check=True)
        subprocess.run(
            [run, "-m", "pip", "install", "--quiet", "--no-cache-dir", f"torch=={torch}", *NEEDS],
            check=True,
        )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [run, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow and not cuda", *CORE]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    found = {
        word: int(n)
        for n, word in re.findall(
            r"(\d+) (passed|skipped|failed|error)", done.stdout.strip().splitlines()[-1]
        )
    }
    if not found.get("passed") or done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
    return {
        "passed": found.get("passed", 0),
        "skipped": found.get("skipped", 0),
        "failed": found.get("failed", 0) + found.get("error", 0),
    }


def interpreter(version: str) -> str:
    """Find a Python interpreter of this version, on the path or among those of pyenv."""
    roots = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in (
        shutil.which(f"python{version}"),
        *sorted(map(str, roots.glob(f"{version}.*/bin/python"))),
    ):
        works = (
            candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0
        )
        if works:
            return str(candidate)
    raise SystemExit(
        f"Python {version} was not found: install it (pyenv install {version}), or select other "
        "versions with --only."
    )


def table(rows: list[dict[str, object]]) -> str:
    """The results as a Markdown table."""
    lines = ["| Python | torch | passed | skipped | failed |", "|---|---|---|---|---|"]
    for r in rows:
        lines.append(
            f"| {r['python']} | {r['torch']} | {r['passed']} | {r['skipped']} | {r['failed']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
