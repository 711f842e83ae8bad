"""A study and its cells: what is to be run, and how a run is identified.

A study is a function. It is called with the scale and with the results so far, and returns the
cells (a config and a seed each) that it wants. It is called again after they are run, until it
wants no more, so that later cells may depend on the results of earlier ones. This module does not
know where or how cells are run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from normcontrol.lab.errors import LabError
from normcontrol.lab.own_files import without_folder
from normcontrol.lab.training.config import PART_OF, Config, differences, plain
from normcontrol.lab.training.optimizer_names import with_arguments
from normcontrol.lab.training.run_folder import BY_DIGEST, FREE

if TYPE_CHECKING:
    from normcontrol.lab.study.claims import Claim
    from normcontrol.lab.study.records import Results
    from normcontrol.lab.study.verdict import Verdict


SEEDS = ("init_seed", "data_seed", "dropout_seed")
"""The settings that the seed of a cell determines."""


@dataclass(frozen=True)
class Cell:
    """One run of a study: an arm at some settings, with one seed."""

    arm: str
    config: Config
    seed: int = 0
    settings: tuple[tuple[str, Any], ...] = ()
    """The settings of which this arm tries several values. Cells that differ only in the seed are
    one trial."""
    part: str = ""
    """The part of the study it belongs to: "grid", "seeds", ..."""

    @property
    def trial(self) -> str:
        """The settings in words, the same for all seeds."""
        return " ".join(
            f"{key}={value:g}"
            if isinstance(value, float)
            else f"{key}={without_folder(str(value))}"
            for key, value in self.settings
        )

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.arm, self.trial, f"seed={self.seed}")))

    def matches(self, texts: Iterable[str]) -> bool:
        """True if the part and label contain one of the texts, or if there are none to look for. A
        text that ends with the value of a setting ends with the whole value: seed=1 is not
        seed=10."""
        wanted = list(texts)
        name = f"{self.part} {self.label} "
        whole = (f"{text} " if re.search(r"=[^ =]+$", text) else text for text in wanted)
        return not wanted or any(text in name for text in whole)


@dataclass(frozen=True)
class Data:
    """The digests of what a study trains and validates on."""

    digest: str
    also: Mapping[str, str] = field(default_factory=dict)
    optimizer: str = ""
    """The digest of the user's file with the optimizer, if it is in one."""


def grid(
    arm: str, base: Config, *, seeds: Iterable[int] = (0,), part: str = "", **axes: Sequence[Any]
) -> list[Cell]:
    """Every combination of the axes' values with every seed. Runs that share a seed share initial
    weights and batches. An axis is a setting of a run, or an argument of the optimizer.

    >>> [cell.label for cell in grid("AdamW", Config(), lr=[1e-3, 2e-3], seeds=[0, 1])][:3]
    ['AdamW lr=0.001 seed=0', 'AdamW lr=0.001 seed=1', 'AdamW lr=0.002 seed=0']
    """
    lists = {}
    for name, given in {**axes, "seeds": seeds}.items():
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise LabError(
                f"{name}={given!r} is one value, and grid makes a cell for each value of a list. "
                "Give a list, also for a single value."
            )
        lists[name] = list(map(plain, given))
        if not lists[name]:
            raise LabError(f"{name} has no values, so that grid would make no cell. Give one.")
        if name in SEEDS:
            raise LabError(
                f"{name} cannot be an axis: a run has one seed for its weights, data and dropout, "
                "by which runs are paired. Give seeds=[...]."
            )
    cells = []
    for *values, seed in itertools.product(*lists.values()):
        settings = dict(zip(axes, values, strict=True))
        config = base.with_(
            **{key: value for key, value in settings.items() if key in PART_OF},
            **dict.fromkeys(SEEDS, seed),
        )
        arguments = {key: value for key, value in settings.items() if key not in PART_OF}
        if arguments:
            config = config.with_(optimizer=with_arguments(config.optim.optimizer, arguments))
        cells.append(Cell(arm, config, seed, tuple(settings.items()), part))
    return cells


def identity(config: Config, data: Data) -> str:
    """The name of a run, the same on every machine: a hash of everything its result depends on.

    Settings at their default do not enter the hash, so that a setting added later does not change
    the names of earlier results.
    """
    relevant = {
        key: new
        for key, (_, new) in differences(Config(), config).items()
        if key not in FREE | BY_DIGEST
    }
    parts = [relevant, data.digest, dict(sorted(data.also.items()))]
    parts += [data.optimizer] if data.optimizer else []
    content = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def unique(cells: Iterable[Cell], data: Callable[[Config], Data]) -> dict[str, Cell]:
    """Cells by their identity. Of two that are the same run, the first is kept."""
    named: dict[str, Cell] = {}
    for cell in cells:
        named.setdefault(identity(cell.config, data(cell.config)), cell)
    return named


Cells = Callable[[str, "Results"], Iterable[Cell]]


@dataclass(frozen=True)
class Published:
    """A published number, and where ours is found: the final value of ``key`` in an arm."""

    what: str
    arm: str
    key: str
    value: float


@dataclass(frozen=True)
class Story:
    """How a study is presented, where the usual presentation does not fit it."""

    title: str
    """The heading of its page."""
    sentences: Callable[[Verdict], list[str]]
    """What it showed."""
    columns: tuple[str, ...]
    """The columns of its table, by their headings."""
    note: str
    """The text under the table."""


@dataclass(frozen=True)
class Study:
    """A named experiment: its cells, the arm that others are compared with, and the claims that it
    tests."""

    name: str
    cells: Cells
    about: str = ""
    baseline: str = ""
    claims: tuple[Claim, ...] = ()
    published: tuple[Published, ...] = ()
    differs: Mapping[str, str] = field(default_factory=dict)
    """By scale, what differs from where the published numbers come from."""
    story: Story | None = None
    keeps_runs: bool = False
    """Keep the run folders of finished cells, with their checkpoints, beside the records."""
