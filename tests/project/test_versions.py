"""The versions that the package declares are those that were tested, and the page about versions
shows the results of the last run."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
TESTED = json.loads((ROOT / "results/versions.json").read_text())


def test_every_row_passed():
    assert [row for row in TESTED if row["failed"] or not row["passed"]] == []


def test_the_range_of_torch_begins_with_the_oldest_tested():
    oldest = min(tuple(map(int, row["torch"].split("."))) for row in TESTED)
    assert f'"torch>={oldest[0]}.{oldest[1]}"' in PROJECT


def test_every_declared_version_of_python_is_tested():
    """In a row of the table, or by the run that this test is part of."""
    declared = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    pinned = {"3.11"}  # the environment that the constraints pin
    assert set(declared) <= {row["python"] for row in TESTED} | pinned
    assert f'requires-python = ">={declared[0]}"' in PROJECT


def test_the_page_shows_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from versions import table

    assert table(TESTED) in (ROOT / "docs/versions.md").read_text()


def test_the_core_tests_exist(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from versions import CORE

    assert [path for path in CORE if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("package", ["jax", "optax", "flax", "orbax-checkpoint"])
def test_the_page_names_the_pinned_versions(package):
    pinned = re.search(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert f"{package} {pinned[1]}" in (ROOT / "docs/versions.md").read_text()
