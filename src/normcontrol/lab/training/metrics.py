"""The logs of a run: append-only JSONL files and, on request, TensorBoard or Weights & Biases.

``metrics.jsonl`` contains only values that the computation determines, so that a resumed run ends
with the same bytes as an uninterrupted one. Speeds are in ``timing.jsonl``. On resume
``metrics.jsonl`` is truncated to its size at the checkpoint, after it has been compared with the
checksum that the checkpoint contains. This file may not know which values are logged.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normcontrol.lab.errors import LabError, explain
from normcontrol.lab.files import read_text, sha256, truncate, write_text
from normcontrol.lab.text import in_shell
from normcontrol.lab.training.config import Config
from normcontrol.watch.trackers import JSONL, TensorBoard, Tracker, WandB

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"


@dataclass(frozen=True)
class Mark:
    """The state of ``metrics.jsonl`` at a checkpoint: its size in bytes, and their checksum."""

    logged: int = 0
    logged_sha256: str | None = None
    """None in checkpoints of earlier versions."""


NOTHING = Mark()


class Log(contextlib.AbstractContextManager["Log"]):
    """The open logs of a run. A context: they are closed when it ends.

    Args:
        folder: the run folder.
        config: the config of the run.
        writes: False in all processes but the first: they log nothing.
        keep: the part of ``metrics.jsonl`` to keep. The rest is deleted.
        first: the first step that will be logged.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        writes: bool = True,
        keep: Mark = NOTHING,
        first: int = 0,
    ) -> None:
        self.others: list[Tracker] = []
        self.metrics: JSONL | None = None
        self.folder = folder
        if not writes:
            return
        path, timing = folder / METRICS, folder / TIMING
        _check(path, keep)
        for file, size in ((path, keep.logged), (timing, None if keep.logged else 0)):
            if file.exists() and size is not None:
                truncate(file, size)
        with self._sentences():
            self.metrics, self.timing = JSONL(path), JSONL(timing)
            try:
                self._open_others(config, first)
            except (ModuleNotFoundError, RuntimeError) as error:
                raise LabError(str(error)) from None

    def _open_others(self, config: Config, first: int) -> None:
        if config.run.tensorboard:
            self.others.append(TensorBoard(self.folder / "tensorboard", start=first))
        if config.run.wandb:
            about = {
                "name": self.folder.name,
                "id": _wandb_id(self.folder),
                "dir": str(self.folder),
                "config": config.flat(),
            }
            self.others.append(WandB(config.run.wandb, resume="allow", **about))

    def write(self, step: int, **values: float) -> None:
        """Append a line to ``metrics.jsonl``: values that the computation determines."""
        if self.metrics is not None:
            self._line(self.metrics, step, values)

    def time(self, step: int, **values: Any) -> None:
        """Append a line to ``timing.jsonl``: values that depend on the machine."""
        if self.metrics is not None:
            self._line(self.timing, step, values)

    def _line(self, file: JSONL, step: int, values: dict[str, Any]) -> None:
        with self._sentences():
            for tracker in (file, *self.others):
                tracker.log(step, values)

    def mark(self) -> Mark:
        """The state of ``metrics.jsonl``, all of it flushed to the disk. A checkpoint stores it,
        and a resume truncates the file to it."""
        if self.metrics is None:
            return NOTHING
        with self._sentences():
            size = self.metrics.size()
        return Mark(size, sha256(self.metrics.path, size))

    def __exit__(self, *error: object) -> None:
        if self.metrics is not None:
            with self._sentences():
                for file in (self.metrics, self.timing):
                    file.size()  # flushes it to the disk
                for tracker in (self.metrics, self.timing, *self.others):
                    tracker.close()

    @contextlib.contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LabError(
                f"The logs could not be written. {explain(error, self.folder)} A run goes on from "
                f"its last checkpoint with `normcontrol train --resume "
                f"{in_shell(self.folder)}`."
            ) from error


def _check(path: Path, keep: Mark) -> None:
    """Raise :class:`LabError` if the part of a log that is to be kept is not there any more."""
    size = path.stat().st_size if path.exists() else None
    had = f"had {keep.logged} bytes when the checkpoint was written"
    restore = (
        "Restore it from a copy, or delete the checkpoints too: the run then starts from its first "
        "step, and ends in the same bits."
    )
    if size is None and keep.logged:
        raise LabError(f"{path} is gone, but {had}. {restore}")
    if size is not None and size < keep.logged:
        raise LabError(f"{path} has {size} bytes, but {had}: it was truncated. {restore}")
    if keep.logged_sha256 is not None and size and sha256(path, keep.logged) != keep.logged_sha256:
        raise LabError(
            f"{path} was changed: its first {keep.logged} bytes do not match the checksum in the "
            f"checkpoint. {restore}"
        )


def read(folder: Path, name: str = METRICS) -> list[dict[str, Any]]:
    """All lines of a log of a run. An incomplete last line is skipped."""
    path = folder / name
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in read_text(path).split("\n")[:-1]]
    except ValueError as error:
        raise LabError(f"{path} is damaged ({error}): restore it from a copy.") from None


def _wandb_id(folder: Path) -> str:
    """The id of the run at Weights & Biases: random, so that folders of the same name do not
    collide, and stored in the folder, so that a resumed run keeps it."""
    path = folder / "wandb-id"
    if not path.exists():
        write_text(path, secrets.token_hex(8))
    found = read_text(path)
    if not re.fullmatch("[0-9a-f]{16}", found):
        raise LabError(
            f"{path} is damaged: it should contain 16 hexadecimal digits. Restore it from a copy, "
            "or delete it: the run then gets another id."
        )
    return found
