"""A study's folder: which study it contains, at which scale and on which data.

The file ``study.json`` says that, ``cells/`` and ``records.jsonl.xz`` contain a record for each
finished run, and ``work/`` the runs that are not finished. Data is identified by its digest, so
that a folder can be read on a machine without the data. This module does not know how cells are
run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from normcontrol.lab.data import batches
from normcontrol.lab.errors import LabError
from normcontrol.lab.files import claimed, digest_of, folder_name, read_json, write_json
from normcontrol.lab.study.cells import Cell, Data, Study
from normcontrol.lab.study.records import Results
from normcontrol.lab.training.config import Config, differences
from normcontrol.lab.training.optimizer_names import file_of, located

STUDY, WORK, RUNS = "study.json", "work", "arms"


@dataclass
class Ledger:
    """A study's folder."""

    out: Path
    study: Study
    name: str
    """The study as the user gave it: its name, or path/to/file.py:function."""
    scale: str
    data: str | None = None
    """Train on this instead of the data that the cells name."""
    also: tuple[str, ...] = ()
    """Validate on these too, instead of what the cells name."""
    settings: Mapping[str, Any] | None = None
    """What the study was made from, for a study that is not known by its name alone."""
    digests: dict[str, Data] = field(default_factory=dict)
    stored: Mapping[str, Data] = field(default_factory=dict)
    """The digests with which the folder was begun; other data is refused."""

    def cells(self, done: Results) -> list[Cell]:
        """The cells that the study wants, on the data of this folder."""
        found = self.study.cells(self.scale, done)
        cells = list(found) if isinstance(found, Iterable) else [None]
        if not cells or not all(isinstance(cell, Cell) for cell in cells):
            raise LabError(
                f"The function of the study {self.name} returned {str(found)[:60]}, where a list "
                "of cells is needed. Return what grid() makes."
            )
        named: dict[str, Config] = {}
        for cell in cells:
            one = named.setdefault(cell.label, cell.config)
            for key, (old, new) in differences(one, cell.config).items():
                raise LabError(
                    f"The study {self.name} has two runs named {cell.label!r}, with {key}={old!r} "
                    f"and {key}={new!r}: a verdict would take them for one. Give them different "
                    f"arms, or make {key} an axis of one grid."
                )
        return [replace(cell, config=self.placed(cell.config)) for cell in cells]

    def placed(self, config: Config) -> Config:
        """A config with the data of this folder, where it differs from the study's own."""
        changes: dict[str, Any] = {"data": self.data} if self.data is not None else {}
        changes |= {"also_validate": self.also} if self.also else {}
        changes["optimizer"] = located(config.optim.optimizer, self.out)
        return config.with_(**changes)

    def data_of(self, config: Config) -> Data:
        """The digests of what a run trains and validates on. They are computed once and stored in
        the folder."""
        whole = self.placed(config)
        placed, optimizer = whole.data, file_of(whole)
        key = json.dumps(
            [
                "given" if self.data is not None else placed.data,
                placed.tokenizer,
                len(placed.also_validate),
            ]
        )
        if key not in self.digests:
            dataset = batches.load(placed.data, placed.tokenizer, self.cache)
            others = [batches.load_validation(given, dataset) for given in placed.also_validate]
            found = Data(dataset.digest, {name: digest for name, _, digest in others})
            if self.stored.get(key, found) != found:
                raise LabError(
                    f"{self.out} contains the same study on other data: the digest of "
                    f"{placed.data} (or of the other validation data) has changed. Give another "
                    "--out, or restore the old data."
                )
            self.digests[key] = found
        found = self.digests[key]
        return found if optimizer is None else replace(found, optimizer=optimizer.sha256)

    @property
    def cache(self) -> Path:
        return self.out.parent / "data"

    def run_folder(self, id: str, cell: Cell) -> Path:
        """Where a cell is trained."""
        if not self.study.keeps_runs:
            return self.out / WORK / id
        name = f"{cell.arm} {cell.trial}".strip()
        return self.out / RUNS / folder_name(name).lower() / f"seed-{cell.seed}"

    def results(self) -> Results:
        return Results.load(self.out, self.data_of)

    def alone(self, *, shared: bool = False) -> contextlib.AbstractContextManager[None]:
        """Lock the folder against a second command. Commands that run only some of the cells may
        share it; each cell has a lock of its own."""
        return claimed(
            self.out,
            f"Another command is running the study in {self.out}. Wait until it ends, or stop it, "
            "and then give this command again. To share a study among several commands, give each "
            "its own cells with --only.",
            (STUDY,),
            shared=shared,
        )

    def save(self) -> None:
        """Write ``study.json``, unless it is as it should be."""
        digests = {
            key: {"digest": value.digest, "also": dict(value.also)}
            for key, value in {**self.stored, **self.digests}.items()
        }
        settings = {} if self.settings is None else {"settings": self.settings}
        content = {
            "study": self.name,
            "scale": self.scale,
            "data": self.data,
            "also_validate": list(self.also),
            **settings,
            "digests": digests,
        }
        path = self.out / STUDY
        if not path.exists() or digest_of(read_json(path)) != digest_of(content):
            write_json(path, content)
