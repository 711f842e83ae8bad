"""Files that are written completely or not at all, and checksums that show whether they changed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import IO, Any

import numpy as np

from normcontrol.lab.errors import LabError


def sync(file: IO[Any]) -> None:
    """Write the file's buffers to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk. Without this a rename may be lost in a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file in one operation. A reader sees the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        sync(file)
    temporary.replace(path)
    sync_folder(path.parent)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise LabError(
            f"{path} is not readable as JSON ({error}): restore it from a copy, or delete it."
        ) from None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else _digest(file)
        )


def _digest(file: IO[bytes]) -> str:
    """For Python 3.10, which has no hashlib.file_digest."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def largest(path: Path, dtype: Any) -> int:
    """The largest number in a file of numbers, which is read a block at a time."""
    highest = 0
    with path.open("rb") as file:
        while len(block := np.fromfile(file, dtype, count=1 << 22)):
            highest = max(highest, int(block.max()))
    return highest
