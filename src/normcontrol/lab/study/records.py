"""Records: the stored results of cells, which are meant to be committed.

A record is a few lines of JSON. The first says what was run, where, and how it ended, and contains
the checksum of the rest; each further line is a curve. A cell that was run has a file of its own;
``packing`` puts all of them into one. A record that cannot be read, or that contradicts itself, is
named and left out. This module does not know how cells are run.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normcontrol.lab.errors import LabError
from normcontrol.lab.files import DIGEST, digest_of, read_bytes, read_text, write_text
from normcontrol.lab.own_files import without_folder
from normcontrol.lab.study.cells import Cell, Data, identity
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.run_folder import BY_DIGEST, FREE
from normcontrol.lab.training.telemetry import PREFIX

CELLS, PACKED = "cells", "records.jsonl.xz"
STATUSES = ("finished", "diverged", "failed")
CURVES = ("loss", "val_loss", "ratio", "grad_norm", "angle", "decay")
Curve = tuple[list[int], list[float]]
Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Record:
    """The result of a cell. ``status`` is finished, diverged or failed."""

    id: str
    config: dict[str, Any]
    environment: dict[str, Any]
    status: str
    final: dict[str, float] = field(default_factory=dict)
    skipped: int = 0
    seconds: float = 0.0
    error: str = ""
    curves: dict[str, Curve] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return self.status == "finished"

    @property
    def initial_gain(self) -> float | None:
        """The gain of the initial weights, to which ratios refer; None if it was not recorded."""
        return self.final["gain"] / self.final["ratio"] if "gain" in self.final else None

    def value(self, key: str = "val_loss") -> float:
        """A final value. It is infinite for a run that diverged or failed, so that such a run is
        never the best."""
        return self.final.get(key, math.inf) if self.good else math.inf


def summarise(
    id: str,
    config: Config,
    environment: dict[str, Any],
    lines: list[dict[str, Any]],
    seconds: float,
    error: str = "",
) -> Record:
    """Make the record of a run from its metrics."""
    curves: dict[str, Curve] = {}
    by_class = sorted({key for line in lines for key in line if key.startswith(PREFIX)})
    for key in (*CURVES, *by_class):
        points = [
            (line["step"], line[key]) for line in lines if key in line and "skipped" not in line
        ]
        curves[key] = ([step for step, _ in points], [value for _, value in points])
    final = {
        key: line[key]
        for line in lines
        for key in line
        if key in ("loss", "ratio", "gain") or key.startswith("val_loss")
    }
    status = "finished"
    if error:
        status = "diverged" if has_diverged(error) else "failed"
    elif not final.get("val_loss", math.inf) < curves["val_loss"][1][0]:
        status, error = (
            "diverged",
            "The validation loss after the last step is not below that of the untrained model.",
        )
    skipped = max((line["skipped"] for line in lines if "skipped" in line), default=0)
    about = _settings(config), _public(environment)
    return Record(id, *about, status, final, skipped, round(seconds, 2), error, curves)


def has_diverged(error: str) -> bool:
    """True if a run ended with this error because its loss or gradient was not finite."""
    return "not finite" in error


def _settings(config: Config) -> dict[str, Any]:
    """The settings as a record has them: as JSON returns them, without folders."""
    read = json.loads(json.dumps(config.flat()))
    return {key: _without_folders(value) for key, value in read.items()}


def config_of(settings: Mapping[str, Any]) -> Config:
    """The config with these settings, read from JSON. Settings that no longer exist are ignored."""
    known = Config().flat()
    return Config().with_(**{key: value for key, value in settings.items() if key in known})


def _without_folders(value: Any) -> Any:
    """A path reduced to its last part: folders differ from machine to machine, and the data is
    identified by its digest."""
    if isinstance(value, list):
        return [_without_folders(one) for one in value]
    if isinstance(value, str):
        value = without_folder(value)
        return Path(value).name if value.startswith("/") else value
    return value


def _public(environment: dict[str, Any]) -> dict[str, Any]:
    """The environment of a run without the folders of the machine it ran on."""
    if not environment:
        return {}
    changed = {
        "command": ["normcontrol", *_without_folders(environment["command"][1:])],
        "platform": environment["platform"].split("-")[0],
        "data": {**environment["data"], "folder": Path(environment["data"]["folder"]).name},
    }
    if earlier := environment.get("earlier"):
        changed["earlier"] = [_public(one) for one in earlier]
    return {**environment, **changed}


def write(folder: Path, record: Record, arm: str = "") -> Path:
    """Write a record into a study's folder. An interrupted write leaves no partial file."""
    path = folder / CELLS / f"{record.id}.jsonl"
    head = {key: value for key, value in vars(record).items() if key != "curves"}
    lines: Lines = [{"cell": arm, **head}]
    lines += [
        {"curve": key, "steps": steps, "values": values}
        for key, (steps, values) in record.curves.items()
    ]
    lines[0] = {**lines[0], DIGEST: digest_of(lines)}
    write_text(path, as_text(lines))
    return path


def as_text(lines: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def read(path: Path) -> Record:
    """Read a record from its file."""
    with _named(path):
        record = parse(read_lines(path))
        if record.id != path.stem:
            raise ValueError(f"it is the record of {record.id}")
        return record


def read_lines(path: Path) -> Lines:
    return [json.loads(line) for line in read_text(path).splitlines()]


def read_packed(folder: Path) -> Iterator[Lines]:
    """The lines of each record in a study's packed file; nothing if there is no such file."""
    path = folder / PACKED
    if not path.exists():
        return
    try:
        text = lzma.decompress(read_bytes(path)).decode()
        lines: Lines = [json.loads(line) for line in text.splitlines()]
    except (lzma.LZMAError, ValueError) as error:
        raise LabError(
            f"{path} cannot be read ({error}). It contains the finished runs of the study: restore "
            "it from a copy, or delete it to make them again."
        ) from None
    starts = [i for i, line in enumerate(lines) if "cell" in line]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[start:end]


def read_all(folder: Path) -> tuple[list[Record], list[str]]:
    """The records of a study's folder in the order of their identities, and in words what cannot be
    read. A file of its own counts more than the packed one: it is newer."""
    found: dict[str, Record] = {}
    problems = []
    for lines in read_packed(folder):
        try:
            with _named(f"The record of {lines[0].get('cell')} in {folder / PACKED}"):
                record = parse(lines)
                found[record.id] = record
        except LabError as error:
            problems.append(str(error))
    for path in sorted((folder / CELLS).glob("*.jsonl")):
        try:
            found[path.stem] = read(path)
        except LabError as error:
            problems.append(str(error))
    return [found[id] for id in sorted(found)], problems


def parse(lines: Lines) -> Record:
    """The record in these lines. One that contradicts itself is refused."""
    head, *rest = lines
    head = dict(head)
    if head.pop(DIGEST, None) not in (None, digest_of([head, *rest])):
        raise ValueError(f"its content does not match the {DIGEST} in it")
    del head["cell"]
    curves = {line["curve"]: (line["steps"], line["values"]) for line in rest}
    record = Record(**head, curves=curves)
    _check(record)
    return record


@contextlib.contextmanager
def _named(what: object) -> Iterator[None]:
    """Say which record cannot be read."""
    try:
        yield
    except (LabError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LabError(
            f"{what} cannot be read ({error}): it is left out. The study runs that cell again, or "
            "restore the file from a copy."
        ) from None


def _check(record: Record) -> None:
    """Raise an error if a record contradicts itself."""
    if record.status not in STATUSES:
        raise ValueError(f"its status is {record.status!r}")
    whole = all(len(steps) == len(values) for steps, values in record.curves.values())
    if not whole or not set(CURVES) <= set(record.curves):
        raise ValueError("its curves are not whole")
    numbers = [*record.final.values(), *(v for curve in record.curves.values() for v in curve[1])]
    if not all(isinstance(number, int | float) for number in numbers):
        raise ValueError("some of its values are not numbers")
    for key, final in record.final.items():
        curve = record.curves.get(key, ([], []))[1]
        if key == "loss" and record.skipped:
            continue  # the loss of a skipped step is a final one, and no point of the curve
        if curve and curve[-1] != final and not (math.isnan(curve[-1]) and math.isnan(final)):
            raise ValueError(f"its final {key} is {final}, and its curve ends with {curve[-1]}")
    if record.good and not record.curves["val_loss"][1]:
        raise ValueError("it is finished, but has no validation loss")


class Results(Mapping[str, Record]):
    """The records of a study's folder by identity; ``problems`` names the files that cannot be
    read."""

    def __init__(
        self,
        data: Callable[[Config], Data],
        records: Iterable[Record] = (),
        problems: Iterable[str] = (),
    ) -> None:
        self.data, self.problems = data, list(problems)
        self._records = {record.id: record for record in records}
        self._found: dict[Config, Record] = {}  # a study asks for the same cells many times

    @classmethod
    def load(cls, folder: Path, data: Callable[[Config], Data]) -> Results:
        return cls(data, *read_all(folder))

    def add(self, record: Record) -> None:
        if record.id in self._records:
            self._found.clear()
        self._records[record.id] = record

    def of(self, cell: Cell) -> Record | None:
        """The record of a cell, if it was run with exactly these settings on exactly this data."""
        found = self._found.get(cell.config)
        if found is not None:
            return found
        record = self._records.get(identity(cell.config, self.data(cell.config)))
        if record is None:
            return None
        mine = _settings(cell.config)
        checked = mine.keys() & record.config.keys() - FREE - BY_DIGEST
        if any(record.config[key] != mine[key] for key in checked):
            return None
        self._found[cell.config] = record
        return record

    def done(self, cells: Iterable[Cell]) -> bool:
        """True if all of these cells were run, including those that diverged or failed."""
        return all(self.of(cell) is not None for cell in cells)

    def trials(self, cells: Iterable[Cell]) -> dict[str, list[tuple[Cell, Record]]]:
        """The cells that were run, by arm and trial, with the seeds of a trial in order."""
        found: dict[str, list[tuple[Cell, Record]]] = {}
        for cell in sorted(cells, key=lambda c: c.seed):
            record = self.of(cell)
            if record is not None:
                found.setdefault(f"{cell.arm} {cell.trial}".strip(), []).append((cell, record))
        return found

    def best(self, cells: Iterable[Cell], key: str = "val_loss") -> Cell | None:
        """The first cell of the trial with the lowest mean loss, among the cells that were run. If
        all of them diverged or failed it is one of these: its record is not ``good``."""
        trials = self.trials(cells)
        if not trials:
            return None
        means = {
            name: statistics.fmean(record.value(key) for _, record in runs)
            for name, runs in trials.items()
        }
        return trials[min(means, key=lambda name: means[name])][0][0]

    def __getitem__(self, id: str) -> Record:
        return self._records[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)
