"""A study's folder: which study it is, at which scale, on which data, so that two never come to be
mixed in one.

``study.json`` says that, ``cells/`` holds a file for each finished run, ``work/`` what is being run
(nothing of it is needed afterwards). Data are known by their digests: a folder can be read where
its data is not at hand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from normcontrol.lab.data import batches as data
from normcontrol.lab.errors import LabError
from normcontrol.lab.files import read_json, write_json
from normcontrol.lab.study.cells import SCALES, Cell, Data, Study, load
from normcontrol.lab.study.records import Results
from normcontrol.lab.training.config import Config

STUDY, WORK = "study.json", "work"


@dataclass
class Ledger:
    """A study's folder."""

    out: Path
    name: str
    """As it was asked for: its name, or path/to/file.py:function."""
    scale: str
    data: str | None = None
    """Trains on this instead of what the cells say."""
    also: tuple[str, ...] = ()
    digests: dict[str, Data] = field(default_factory=dict)

    @property
    def study(self) -> Study:
        return load(self.name)

    def cells(self, done: Results) -> list[Cell]:
        """What the study wants, on the data that were asked for."""
        return [
            replace(cell, config=self.placed(cell.config))
            for cell in self.study.cells(self.scale, done)
        ]

    def placed(self, config: Config) -> Config:
        changes: dict[str, Any] = {"data": self.data} if self.data is not None else {}
        return config.with_(**changes, **({"also_validate": self.also} if self.also else {}))

    def data_of(self, config: Config) -> Data:
        """The digests of what a run trains and validates on; computed once, then remembered in the
        folder."""
        placed = self.placed(config).data
        key = json.dumps(
            [
                "given" if self.data is not None else placed.data,
                placed.tokenizer,
                len(placed.also_validate),
            ]
        )
        if key not in self.digests:
            dataset = data.load(placed.data, placed.tokenizer, self.cache)
            others = [data.load_validation(given, dataset) for given in placed.also_validate]
            self.digests[key] = Data(dataset.digest, {name: digest for name, _, digest in others})
        return self.digests[key]

    @property
    def cache(self) -> Path:
        return self.out.parent / "data"

    def results(self) -> Results:
        return Results.load(self.out, self.data_of)

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        digests = {
            key: {"digest": value.digest, "also": dict(value.also)}
            for key, value in self.digests.items()
        }
        write_json(
            self.out / STUDY,
            {
                "study": self.name,
                "scale": self.scale,
                "data": self.data,
                "also_validate": list(self.also),
                "digests": digests,
            },
        )


def open_folder(out: Path) -> Ledger:
    """The study in a folder, with the digests that it was run with: its data need not be there."""
    if not (out / STUDY).exists():
        raise LabError(
            f"{out} holds no study: there is no {STUDY} in it. Run one with `normcontrol study "
            f"NAME --out {out}`."
        )
    stored = read_json(out / STUDY)
    digests = {
        key: Data(value["digest"], value["also"]) for key, value in stored["digests"].items()
    }
    return Ledger(
        out,
        stored["study"],
        stored["scale"],
        stored["data"],
        tuple(stored["also_validate"]),
        digests,
    )


def begin(
    out: Path, name: str, scale: str, given: str | None = None, also: tuple[str, ...] = ()
) -> Ledger:
    """A new study's folder, or the folder of the same study to go on with; another study's is
    refused."""
    if scale not in SCALES:
        raise LabError(f"There is no scale {scale!r}. Known are {', '.join(SCALES)}.")
    ledger = Ledger(out, name, scale, given, also)
    load(name)
    if not (out / STUDY).exists():
        ledger.save()
        return ledger
    before = open_folder(out)
    for what, then, now in (("study", before.name, name), ("scale", before.scale, scale)):
        if then != now:
            raise LabError(
                f"{out} holds another study: its {what} was {then!r} and is {now!r} now. Give "
                "another --out, or delete it."
            )
    if given is None and not also:
        ledger = replace(ledger, data=before.data, also=before.also)
    for key in before.digests:  # the same data may lie elsewhere by now, but it must be the same
        place, tokenizer, _ = json.loads(key)
        there = Config().with_(data=ledger.data if place == "given" else place, tokenizer=tokenizer)
        if place == "given" and ledger.data is None:
            raise LabError(f"{out} was run with --data {before.data}; say again where that is.")
        if ledger.data_of(there) != before.digests[key]:
            raise LabError(
                f"{out} holds the same study on other data: the digest of {ledger.data or place} "
                "(or of what else is validated on) is not "
                "what it was. Give another --out, or bring the old data back."
            )
    return ledger
