"""What a run writes down: an append-only JSONL file, and TensorBoard or Weights & Biases on request.

``metrics.jsonl`` holds only what the computation decides, so that an interrupted and resumed run ends with the same
bytes as an undisturbed one; speeds and times are in ``timing.jsonl``. On resume the first is cut back to the checkpoint.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from normcontrol.lab.config import Config
from normcontrol.lab.errors import LabError
from normcontrol.lab.files import sync

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"


class Log:
    """The open logs of a run. Other processes than the first write nothing."""

    def __init__(self, folder: Path, config: Config, writes: bool = True, keep: int = 0) -> None:
        self.writes = writes
        self.tensorboard = self.wandb = None
        if not writes:
            return
        path = folder / METRICS
        if path.exists():
            size = path.stat().st_size
            if size < keep:
                raise LabError(
                    f"{path} has {size} bytes, but its checkpoint was written after {keep}: it was cut short. Restore it from a copy."
                )
            os.truncate(path, keep)
        self.metrics, self.timing = path.open("a"), (folder / TIMING).open("a")
        if config.run.tensorboard:
            self.tensorboard = _tensorboard(folder)
        if config.run.wandb:
            self.wandb = _wandb(folder, config)

    def write(self, step: int, **values: float) -> None:
        """One line of what was computed."""
        self._line("metrics", step, values)

    def time(self, step: int, **values: Any) -> None:
        """One line of how fast it was."""
        self._line("timing", step, values)

    def _line(self, name: str, step: int, values: dict[str, Any]) -> None:
        if not self.writes:
            return
        file = getattr(self, name)
        file.write(json.dumps({"step": step, **values}) + "\n")
        file.flush()
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        if self.tensorboard is not None:
            for key, value in numbers.items():
                self.tensorboard.add_scalar(key, value, step)
        if self.wandb is not None:
            self.wandb.log(numbers, step=step)

    def size(self) -> int:
        """Bytes of metrics that are on disk for good: a checkpoint stores this, and a resume cuts back to it."""
        if not self.writes:
            return 0
        sync(self.metrics)
        return self.metrics.tell()

    def close(self) -> None:
        if self.writes:
            self.metrics.close()
            self.timing.close()
        for other in (self.tensorboard, self.wandb):
            if other is not None:
                other.close() if hasattr(other, "close") else other.finish()


def read(folder: Path, name: str = METRICS) -> list[dict[str, Any]]:
    """All lines of a run's metrics; a last line that was cut off in the middle is left out."""
    path = folder / name
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise LabError("--tensorboard was asked for, but tensorboard is not installed: pip install tensorboard.") from None
    return SummaryWriter(str(folder / "tensorboard"))


def _wandb(folder: Path, config: Config) -> Any:
    try:
        import wandb
    except ImportError:
        raise LabError("--wandb was asked for, but wandb is not installed: pip install wandb.") from None
    return wandb.init(project=config.run.wandb, name=folder.name, config=config.flat(), dir=str(folder), resume="allow", id=folder.name)
