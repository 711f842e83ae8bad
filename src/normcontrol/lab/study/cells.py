"""A study: a function that names the runs of an experiment, and what tells one run from all others.

The function is called with the scale and with what is finished so far, and returns the cells (a
config and a seed each) that it wants. It is called again after they are run, until it wants no
more, so that later cells may depend on the results of earlier ones. It knows nothing of where and
how cells are run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normcontrol.lab.errors import LabError, nearest
from normcontrol.lab.training.config import Config, differences
from normcontrol.lab.training.run_folder import FREE

if TYPE_CHECKING:
    from normcontrol.lab.study.claims import Claim
    from normcontrol.lab.study.records import Results

SCALES = ("tiny", "small", "full")
BY_DIGEST = {"data", "tokenizer", "also_validate"}
"""Settings that say where the data is. What it is, its digest says."""


@dataclass(frozen=True)
class Cell:
    """One run of a study: an arm at some settings, with one seed."""

    arm: str
    config: Config
    seed: int = 0
    settings: tuple[tuple[str, Any], ...] = ()
    """What was tried at several values in this arm: the trial that it is."""
    part: str = ""
    """The part of the study it belongs to: "grid", "seeds", ..."""

    @property
    def trial(self) -> str:
        """The settings in words, the same for all seeds."""
        return " ".join(
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in self.settings
        )

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.arm, self.trial, f"seed={self.seed}")))


@dataclass(frozen=True)
class Data:
    """The digests of what a study trains and validates on."""

    digest: str
    also: Mapping[str, str] = field(default_factory=dict)


def grid(
    arm: str, base: Config, *, seeds: Iterable[int] = (0,), part: str = "", **axes: Sequence[Any]
) -> list[Cell]:
    """Every combination of the axes' values with every seed. Runs that share a seed share initial
    weights and batches.

    >>> [cell.label for cell in grid("AdamW", Config(), lr=[1e-3, 2e-3], seeds=[0, 1])]
    ['AdamW lr=0.001 seed=0', 'AdamW lr=0.001 seed=1', 'AdamW lr=0.002 seed=0', 'AdamW lr=0.002 seed=1']
    """
    cells = []
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        for seed in seeds:
            config = base.with_(**settings, init_seed=seed, data_seed=seed, dropout_seed=seed)
            cells.append(Cell(arm, config, seed, tuple(settings.items()), part))
    return cells


def identity(config: Config, data: Data) -> str:
    """The name of a run, the same wherever it is run: a hash of all that its result depends on.

    Settings at their default do not take part, so that a setting added later does not orphan
    earlier results.
    """
    kept = {
        key: new
        for key, (_, new) in differences(Config(), config).items()
        if key not in FREE | BY_DIGEST
    }
    content = json.dumps([kept, data.digest, dict(sorted(data.also.items()))], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


Cells = Callable[[str, "Results"], Iterable[Cell]]


@dataclass(frozen=True)
class Published:
    """A number that was published, and where ours is found: the final value of ``key`` in an
    arm."""

    what: str
    arm: str
    key: str
    value: float


@dataclass(frozen=True)
class Study:
    """A named experiment: its cells, the arm that others are compared with, and the claims it puts
    to the test."""

    name: str
    cells: Cells
    about: str = ""
    baseline: str = ""
    claims: tuple[Claim, ...] = ()
    published: tuple[Published, ...] = ()
    differs: Mapping[str, str] = field(default_factory=dict)
    """By scale, what differs from where the published numbers come from."""


def load(name: str) -> Study:
    """A study by its name, or from a file of one's own: ``path/to/file.py:function``."""
    if ".py" in name:
        return _from_file(name)
    from normcontrol.lab.studies import STUDIES

    if name not in STUDIES:
        raise LabError(
            f"There is no study {name!r}. {nearest(name, STUDIES)} One of your own is "
            "path/to/file.py:function."
        )
    return STUDIES[name]


def _from_file(name: str) -> Study:
    path, _, function = name.rpartition(":")
    if not path.endswith(".py"):
        path, function = name, ""
    if not Path(path).exists():
        raise LabError(
            f"There is no file {path!r} with a study. Give it as path/to/file.py:function."
        )
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, function or "study", None)
    if isinstance(found, Study):
        return found
    if not callable(found):
        known = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        raise LabError(
            f"{path} has no function {function or 'study'!r}. "
            f"{nearest(function, known) if known else 'It has none at all.'}"
        )
    return Study(f"{Path(path).stem}-{found.__name__}", found, (found.__doc__ or "").strip())


def unique(cells: Iterable[Cell], data: Callable[[Config], Data]) -> dict[str, Cell]:
    """Cells by their identity; of two that are the same run, the first one's place is taken."""
    named: dict[str, Cell] = {}
    for cell in cells:
        named.setdefault(identity(cell.config, data(cell.config)), cell)
    return named
