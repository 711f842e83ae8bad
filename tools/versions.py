"""Run the core tests on the oldest, the pinned and the newest torch, each in an environment of its
own.

``make test-versions``. Other versions than the pinned one come as CUDA builds of several gigabytes,
which also run on a CPU; they never enter the project's own environment. What passed is written to
``results/versions.json`` and into the table of ``docs/versions.md``, and
``tests/project/test_versions.py`` holds the declared range to it.
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
"""Python and torch: the oldest, the pinned, the one of the GPU measurements, the newest."""

CORE = [
    "adamw_equality",
    "amp_compile",
    "bad_input",
    "contract",
    "folded",
    "law",
    "methods",
    "policy",
    "precision",
    "predict",
    "recipes",
    "reference",
    "resume",
    "schedule",
    "telemetry",
    "wrapping",
]
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
        help="these Pythons alone, such as 3.10; the others keep their results",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="make the environments here and leave them; by default they are deleted",
    )
    asked = parser.parse_args()
    unknown = set(asked.only or ()) - {python for python, _ in MATRIX}
    if unknown:
        raise SystemExit(
            f"No test is planned for Python {', '.join(unknown)}: there are "
            f"{', '.join(python for python, _ in MATRIX)}."
        )
    results = (
        {row["python"]: row for row in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    )
    failed = False
    for python, torch in MATRIX:
        if asked.only and python not in asked.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            counts = tested(python, torch, (asked.keep or Path(folder)) / f"{python}-{torch}")
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
    """How many of the core tests pass there."""
    run = str(environment / "bin/python")
    if not environment.exists():
        subprocess.run([interpreter(python), "-m", "venv", str(environment)], check=True)
        subprocess.run(
            [run, "-m", "pip", "install", "--quiet", "--no-cache-dir", f"torch=={torch}", *NEEDS],
            check=True,
        )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    tests = [f"tests/test_{name}.py" for name in CORE]
    command = [run, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow and not cuda", *tests]
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
    """An interpreter of this version: on the path, or one of pyenv's."""
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
        f"There is no Python {version} here: install it (pyenv install {version}), or leave it out "
        "with --only."
    )


def table(rows: list[dict[str, object]]) -> str:
    lines = ["| Python | torch | passed | skipped | failed |", "|---|---|---|---|---|"]
    return (
        "\n".join(
            lines
            + [
                f"| {r['python']} | {r['torch']} | {r['passed']} | {r['skipped']} | {r['failed']} |"
                for r in rows
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
