"""Records on the move: runs that were made elsewhere are taken over, and all records of a study are
put into one compressed file.

While a study runs, every finished cell gets a file of its own. Hundreds of them are slow to copy
and to read, so a study is committed as one file. What a record contains is in ``records``.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from normcontrol.lab.errors import LabError
from normcontrol.lab.files import write_bytes, write_text
from normcontrol.lab.study.cells import unique
from normcontrol.lab.study.ledger import Ledger
from normcontrol.lab.study.records import (
    CELLS,
    PACKED,
    Lines,
    as_text,
    read_all,
    read_lines,
    read_packed,
)


@dataclass(frozen=True)
class Merged:
    """What became of the records of another folder."""

    taken: int
    """Cells that were not run here."""
    known: int
    """Cells that were run here too, and keep their own record."""
    unwanted: int
    """Runs that the study has no cell for."""


def merge(ledger: Ledger, source: Path) -> Merged:
    """Take over the runs in another folder, of this study or of another one: those with the
    settings and the data of cells that this study wants and that were not run here."""
    _, problems = read_all(source)
    if problems:
        raise LabError(f"{problems[0]} Nothing was taken over from {source}.")
    there = lines_by_identity(source)
    if not there:
        raise LabError(
            f"{source} contains no records: there is neither {PACKED} nor a file in {CELLS}/. Give "
            "the folder of a study."
        )
    before = set(ledger.results())
    taken = 0
    while True:  # later cells depend on the results of earlier ones
        done = ledger.results()
        wanted = unique(ledger.cells(done), ledger.data_of)
        new = [id for id in wanted if id in there and id not in done]
        if not new:
            break
        for id in new:
            write_text(ledger.out / CELLS / f"{id}.jsonl", as_text(there[id]))
        taken += len(new)
    known = len(before & there.keys())
    return Merged(taken, known, len(there) - taken - known)


def pack(out: Path) -> Path:
    """Put all records of a study's folder into one file, and delete those of single cells."""
    found, problems = read_all(out)
    if problems:
        raise LabError(f"{problems[0]} Nothing was packed.")
    if not found:
        raise LabError(f"{out} contains no records to pack.")
    lines = lines_by_identity(out)
    text = as_text(line for id in sorted(lines) for line in lines[id])
    write_bytes(out / PACKED, lzma.compress(text.encode(), preset=9))
    remove(out, lines)
    return out / PACKED


def remove(out: Path, packed: Iterable[str]) -> None:
    """Delete the files of single cells that are packed."""
    for id in packed:
        (out / CELLS / f"{id}.jsonl").unlink(missing_ok=True)
    if (out / CELLS).exists() and not any((out / CELLS).iterdir()):
        (out / CELLS).rmdir()


def lines_by_identity(folder: Path) -> dict[str, Lines]:
    """The lines of every record in a folder, in which all records can be read."""
    found = {lines[0]["id"]: lines for lines in read_packed(folder)}
    for path in (folder / CELLS).glob("*.jsonl"):
        found[path.stem] = read_lines(path)
    return found
