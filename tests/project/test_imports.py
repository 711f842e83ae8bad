"""The rule of imports: which folder may import which, and that private names stay private."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "normcontrol"

LAYERS = [
    {"warn", "numbers", "law", "scope", "target", "wrapper"}
    | {"schedule", "custom_schedule", "schedule_text"},
    {"weights"},
    {"mechanisms"},
    {"distributed"},
    {"groups"},
    {"steppers"},
    {"control"},
    {"adamwn", "set_norm"},
    {"watch"},
    {"predict"},
    {"methods"},
    {"integrations", "optax"},
    {"lab"},
]
"""From bottom to top. A module imports from its own folder and from the layers below it."""

LAB_LAYERS = [
    {"cores", "errors", "files", "own_files", "ranges", "seeds", "text"},
    {"data"},
    {"training"},
    {"study"},
    {"studies"},
    {"report"},
    {"cli"},
]

ALLOWED = {("control", "watch")}
"""``opt.report()`` makes its table in ``watch``, imported when it is called."""


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports, at its top or anywhere in it."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def level(name: str, layers: list[set[str]]) -> int | None:
    return next((i for i, layer in enumerate(layers) if name in layer), None)


def upward(root: Path, package: str, layers: list[set[str]]) -> list[str]:
    """Imports that point up, as sentences."""
    found = []
    for path in sorted(root.rglob("*.py")):
        mine = path.relative_to(root).with_suffix("").parts[0]
        here = level(mine, layers)
        if mine.startswith("__"):
            continue
        assert here is not None, f"{path} is in no layer: add it to the list"
        for module in imports(path):
            if not module.startswith(package + "."):
                continue
            theirs = module.removeprefix(package + ".").split(".")[0]
            there = level(theirs, layers)
            if there is not None and there > here and (mine, theirs) not in ALLOWED:
                found.append(f"{path.relative_to(root)} imports {module}")
    return found


def test_imports_of_the_library_point_down():
    assert upward(SOURCE, "normcontrol", LAYERS) == []


def test_imports_of_the_laboratory_point_down():
    assert upward(SOURCE / "lab", "normcontrol.lab", LAB_LAYERS) == []


def test_the_library_does_not_import_what_only_the_laboratory_needs():
    needed = {"tyro", "rich", "numpy", "matplotlib", "tiktoken", "tokenizers", "pyarrow", "ray"}
    for path in SOURCE.rglob("*.py"):
        inside = path.relative_to(SOURCE).parts[0]
        at_top = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import)]
        names = {alias.name.split(".")[0] for node in at_top for alias in node.names}
        assert inside in ("lab", "optax", "optax.py") or not names & needed, path


@functools.cache
def private_names() -> dict[str, set[Path]]:
    """The private names that the package defines, and the files that define them."""
    defined: dict[str, set[Path]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in nodes(path):
            name = None
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                name = node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.attr
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            if name and name.startswith("_") and not name.startswith("__") and len(name) > 1:
                defined.setdefault(name, set()).add(path)
    return defined


OF_TORCH = {"_step_supports_amp_scaling", "_version"}
"""Names that torch gives: what GradScaler asks an optimizer for, and the version of a tensor."""

FOLDERS = ["src", "tests", "benchmarks", "examples", "tools", "docs"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_uses_a_private_name_of_another(folder):
    defined = private_names()
    found = []
    for path in (ROOT / folder).rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("normcontrol"):
                found += [(path, a.name) for a in node.names if a.name.startswith("_")]
            if not isinstance(node, ast.Attribute) or path in defined.get(node.attr, {path}):
                continue
            of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not of_itself:
                found.append((path, node.attr))
    allowed = OF_TORCH | {"__version__"}
    names = [f"{path.relative_to(ROOT)}: {name}" for path, name in found if name not in allowed]
    assert names == []
