"""What a run writes down: an append-only JSONL file, and TensorBoard or Weights & Biases on
request.

``metrics.jsonl`` holds only what the computation decides, so that an interrupted and resumed run
ends with the same bytes as an undisturbed one; speeds and times are in ``timing.jsonl``. On resume
the first is cut back to the checkpoint.
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
    """The open logs of a run that is about to make step ``first``. Other processes than the first
    write nothing."""

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
                    f"{path} has {size} bytes, but its checkpoint was written after {keep}: it was "
                    "cut short. Restore it from a copy."
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
        """One line of what was computed."""
        if self.metrics is not None:
            self._line(self.metrics, step, values)

    def time(self, step: int, **values: Any) -> None:
        """One line of how fast it was."""
        if self.metrics is not None:
            self._line(self.timing, step, values)

    def _line(self, file: JSONL, step: int, values: dict[str, Any]) -> None:
        for tracker in (file, *self.others):
            tracker.log(step, values)

    def size(self) -> int:
        """Bytes of metrics that are on disk for good: a checkpoint stores this, and a resume cuts
        back to it."""
        return self.metrics.size() if self.metrics is not None else 0

    def close(self) -> None:
        if self.metrics is not None:
            for tracker in (self.metrics, self.timing, *self.others):
                tracker.close()


def read(folder: Path, name: str = METRICS) -> list[dict[str, Any]]:
    """All lines of a run's metrics; a last line that was cut off in the middle is left out."""
    path = folder / name
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def _wandb_id(folder: Path) -> str:
    """Of this run alone, whatever other folders are called, and the same when it is resumed."""
    path = folder / "wandb-id"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text()
