"""The logs of a run: append-only JSONL files and, on request, TensorBoard or Weights & Biases.

``metrics.jsonl`` contains only values that the computation determines, so that a resumed run ends
with the same bytes as an uninterrupted one. Speeds are in ``timing.jsonl``. On resume
``metrics.jsonl`` is truncated to its size at the checkpoint. This file may not know which values
are logged.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from normcontrol.lab.errors import LabError
from normcontrol.lab.training.config import Config
from normcontrol.watch.trackers import JSONL, TensorBoard, Tracker, WandB

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"


class Log:
    """The open logs of a run.

    Args:
        folder: the run folder.
        config: the config of the run.
        writes: False in all processes but the first: they log nothing.
        keep: bytes of ``metrics.jsonl`` to keep. The rest is deleted.
        first: the first step that will be logged.
    """

    def __init__(
        self, folder: Path, config: Config, writes: bool = True, keep: int = 0, first: int = 0
    ) -> None:
        self.others: list[Tracker] = []
        self.metrics: JSONL | None = None
        if not writes:
            return
        path = folder / METRICS
        if path.exists():
            size = path.stat().st_size
            if size < keep:
                raise LabError(
                    f"{path} has {size} bytes, but had {keep} when the checkpoint was written: it "
                    "was truncated. Restore it from a copy."
                )
            os.truncate(path, keep)
        self.metrics, self.timing = JSONL(path), JSONL(folder / TIMING)
        try:
            if config.run.tensorboard:
                self.others.append(TensorBoard(folder / "tensorboard", start=first))
            if config.run.wandb:
                about = {
                    "name": folder.name,
                    "id": _wandb_id(folder),
                    "dir": str(folder),
                    "config": config.flat(),
                }
                self.others.append(WandB(config.run.wandb, resume="allow", **about))
        except (ModuleNotFoundError, RuntimeError) as error:
            raise LabError(str(error)) from None

    def write(self, step: int, **values: float) -> None:
        """Append a line to ``metrics.jsonl``: values that the computation determines."""
        if self.metrics is not None:
            self._line(self.metrics, step, values)

    def time(self, step: int, **values: Any) -> None:
        """Append a line to ``timing.jsonl``: values that depend on the machine."""
        if self.metrics is not None:
            self._line(self.timing, step, values)

    def _line(self, file: JSONL, step: int, values: dict[str, Any]) -> None:
        for tracker in (file, *self.others):
            tracker.log(step, values)

    def size(self) -> int:
        """The size of ``metrics.jsonl`` in bytes, all of them flushed to the disk. A checkpoint
        stores it, and a resume truncates the file to it."""
        return self.metrics.size() if self.metrics is not None else 0

    def close(self) -> None:
        if self.metrics is not None:
            for tracker in (self.metrics, self.timing, *self.others):
                tracker.close()


def read(folder: Path, name: str = METRICS) -> list[dict[str, Any]]:
    """All lines of a log of a run. An incomplete last line is skipped."""
    path = folder / name
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def _wandb_id(folder: Path) -> str:
    """The id of the run at Weights & Biases: random, so that folders of the same name do not
    collide, and stored in the folder, so that a resumed run keeps it."""
    path = folder / "wandb-id"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text()
