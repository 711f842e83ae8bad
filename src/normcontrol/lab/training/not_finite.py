"""Counts consecutive steps whose loss or gradient is not finite, and ends a run that has too many.

A checkpoint stores the count, so that a resumed run ends where an uninterrupted one would. This
file may not know how a step is made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from normcontrol.lab.data.batches import Batches
from normcontrol.lab.errors import LabError
from normcontrol.lab.files import replacing
from normcontrol.lab.training.parallel import World
from normcontrol.lab.training.run_folder import NOT_FINITE

PATIENCE = 5
"""A run stops after this number of consecutive steps with a loss or gradient that is not finite."""


class BadSteps:
    """The steps with a loss or gradient that was not finite, since the last good one."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, Any]] = deque(maxlen=PATIENCE)

    def __len__(self) -> int:
        return len(self._steps)

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint stores."""
        return list(self._steps)

    def load(self, state: Iterable[dict[str, Any]]) -> None:
        self._steps.extend(state)

    def add(self, step: int, loss: float, grad_norm: float) -> None:
        self._steps.append({"step": step, "loss": loss, "grad_norm": grad_norm})

    def clear(self) -> None:
        """A step was good."""
        self._steps.clear()

    def check(self, out: Path, batches: Batches, world: World) -> None:
        """If there are too many, save their losses and batches, and raise the error that ends the
        run."""
        if len(self) < PATIENCE:
            return
        path = out / NOT_FINITE
        if world.first:
            record = [
                {
                    **entry,
                    "tokens": batches(entry["step"] - 1, slice(0, batches.rows))[0].to(torch.int32),
                }
                for entry in self._steps
            ]
            with replacing(path) as file:
                torch.save(record, file)  # type: ignore[arg-type]
        raise LabError(
            f"The loss or gradient was not finite in {len(self)} steps in a row, "
            f"{self._steps[0]['step']} to {self._steps[-1]['step']}. None of them was applied. "
            f"Their losses and batches are in {path}. Try a lower --lr or a longer --warmup."
        )
