"""From when on a norm is held: at once, from a step on, or from the moment at which its growth
slows down.

Until then the rate is zero. When the moment comes, the norm of that step becomes the reference, in
place of the initial one. Everything is decided by tensor operations, so that nothing waits for a
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SAMPLED_EVERY, DECAY, FIRST = 200, 0.9, 3
"""How CPR looks for the inflection point: at every 200th value of a running mean, not before the
third."""

ROWS = 4
"""Numbers that :class:`AtInflection` remembers for every norm."""


@dataclass(frozen=True)
class AtStep:
    """Hold the norm that there is at step ``at``, from the next one on."""

    at: int

    def is_held(self, step: Tensor) -> Tensor:
        return step > self.at

    def is_now(self, norm: Tensor, step: Tensor) -> Tensor:
        return step == self.at


@dataclass(frozen=True)
class AtInflection:
    """Hold the norm from the first sample on at which the second difference of its square is
    negative."""

    # running mean of the square, its last sample, the last difference of samples, whether it is
    # held
    memory: Tensor

    def is_held(self, step: Tensor) -> Tensor:
        return self.memory[3] > 0

    def is_now(self, norm: Tensor, step: Tensor) -> Tensor:
        mean, sample, difference, held = self.memory.reshape(ROWS, *norm.shape).unbind()
        square = norm.square()
        mean.copy_(torch.where(step == 1, square, DECAY * mean + (1 - DECAY) * square))
        sampled = step % SAMPLED_EVERY == 0
        bends = mean - sample < difference
        now = sampled & (step >= FIRST * SAMPLED_EVERY) & bends & (held == 0)
        difference.copy_(torch.where(sampled, mean - sample, difference))
        sample.copy_(torch.where(sampled, mean, sample))
        held.copy_(torch.where(now, 1.0, held))
        return now


def check_start(given: Any) -> None:
    if given == "inflection" or (
        isinstance(given, int) and not isinstance(given, bool) and given >= 0
    ):
        return
    raise ValueError(
        f"start={given!r} is not known: give the step from which on the norm is held (0: from the "
        "first), or 'inflection'."
    )
