"""Checkpoint files: written atomically, with a checksum in the name, and verified when loaded.

A checkpoint is one file of torch.save, ``step-00000500-3f9a....pt``. It is written to a temporary
file in the same folder, fsynced, and renamed. The name contains the step and the SHA-256 of the
bytes, so that a half-written file never has such a name, and a changed bit is detected. Loading
runs no code from the file (``weights_only=True``). This file may not know what a checkpoint
contains.
"""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from normcontrol.lab.errors import LabError
from normcontrol.lab.files import replacing, sha256
from normcontrol.lab.text import in_shell

NAME = re.compile(r"step-(\d+)-([0-9a-f]{16})\.pt")
KEPT = 2
"""How many checkpoints are kept: the newest, and the one before it in case the newest is damaged
later."""


def save(folder: Path, step: int, content: dict[str, Any]) -> Path:
    """Write a checkpoint, then delete all but the newest two. If it cannot be written, the earlier
    ones are kept."""
    # The same temporary name at every attempt: what a killed process left is overwritten.
    temporary = folder / f"step-{step:08d}.tmp"
    try:
        with replacing(folder / f"step-{step:08d}.pt", temporary) as file:
            torch.save(content, file)  # type: ignore[arg-type]
            file.path = folder / f"step-{step:08d}-{file.sha256[:16]}.pt"
    except LabError as error:
        raise LabError(_cannot_write(folder, step, error.__cause__ or error)) from error
    for old in found(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
    return file.path


def _cannot_write(folder: Path, step: int, error: BaseException) -> str:
    try:
        free = f"{shutil.disk_usage(folder).free / 1e9:.1f} GB"
    except OSError:  # the folder is not there
        free = "an unknown number of GB"
    earlier = found(folder)
    intact = (
        f"The earlier checkpoint {earlier[-1].name} is intact: free some space and continue from "
        "it with"
        if earlier
        else "Free some space, then run"
    )
    return (
        f"The checkpoint of step {step} could not be written to {folder} ({error}). The disk has "
        f"{free} free. {intact} `normcontrol train --resume {in_shell(folder.parent)}`."
    )


def found(folder: Path) -> list[Path]:
    """The finished checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint, after its bytes have been compared with the checksum in its name."""
    if NAME.fullmatch(path.name) is None:
        raise LabError(
            f"{path} is not a checkpoint of normcontrol.lab: its name should be like "
            "step-00000500-0123456789abcdef.pt."
        )
    if not _intact(path):
        others = [other for other in found(path.parent) if other != path and _intact(other)]
        offer = (
            f"The last good one is {others[-1].name}: delete or move the damaged file to resume "
            "from it."
            if others
            else "There is no other checkpoint in the folder: restore this one from a copy, or "
            "start a new run."
        )
        raise LabError(
            f"The checkpoint {path} is damaged: its bytes do not match the checksum in its name. "
            f"{offer}"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise LabError(
            f"The checkpoint {path} contains Python objects other than tensors and plain data, "
            "which could run code. It is not loaded."
        ) from None


def _intact(path: Path) -> bool:
    """True if the bytes of a checkpoint match the checksum in its name."""
    name = NAME.fullmatch(path.name)
    return name is not None and sha256(path)[:16] == name[2]


def latest(folder: Path) -> Path | None:
    """The newest finished checkpoint."""
    paths = found(folder)
    return paths[-1] if paths else None


def step_of(path: Path) -> int:
    """The step after which a checkpoint was written, by its name."""
    return int(path.name.split("-")[1])
