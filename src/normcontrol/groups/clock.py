"""Which step it is: on the device always, and on the host for as long as it can know without
waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Clock:
    """The host's count of the controller's steps. A step that may have been skipped for an
    overflow, captured in a graph or compiled is counted on the device alone, and from then on only
    the device knows.

    >>> clock, step = Clock(), torch.tensor(0)
    >>> clock.count(step)
    >>> clock.knows, clock.calls, step
    (True, 1, tensor(1))
    >>> clock.count(step, found_inf=torch.tensor(1.0))     # an overflow: not counted
    >>> clock.knows, step
    (False, tensor(1))
    """

    # An object of its own: what a compiled step assigns to the optimizer itself is lost.
    calls: int = 0
    counted: bool = True

    def count(self, step: Tensor, found_inf: Tensor | None = None) -> None:
        """Count a step, in ``step`` too, which is in place and on its device."""
        step.add_(1 if found_inf is None else (found_inf == 0).to(step))
        if torch.compiler.is_compiling():
            self.counted = False
        else:
            captured = step.is_cuda and torch.cuda.is_current_stream_capturing()
            self.counted = self.counted and found_inf is None and not captured
            self.calls += 1

    @property
    def knows(self) -> bool:
        return self.counted and not torch.compiler.is_compiling()

    def now(self, step: Tensor, dtype: torch.dtype) -> Tensor:
        """The number of the step to evaluate schedules at: on the host if it is known there."""
        return torch.tensor(self.calls, dtype=dtype) if self.knows else step.to(dtype)
