"""Delayed starts: when control of a norm begins (the setting ``start=``).

Until then the rate is zero. The norm at the start becomes the reference, in place of the initial
norm; with ``start="every step"`` the norm after each step is that of the next one. The decisions
are tensor operations, so that no step waits for a device. A start knows norms and steps, and
nothing about weights or targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SAMPLED_EVERY, DECAY, FIRST = 200, 0.9, 3
"""How CPR finds the inflection point: it samples a running mean with this decay at every 200th
step, and compares samples from the third one on."""

EVERY_STEP = "every step"
"""The value of ``start=`` with which the reference is the norm before each step."""

ROWS = 4
"""How many numbers :class:`AtInflection` stores for every norm."""


@dataclass(frozen=True)
class AtStep:
    """Take the norm at step ``at`` as the reference, and control from the next step on."""

    at: int

    def is_active(self, step: Tensor) -> Tensor:
        """True if the norm is controlled at this step."""
        return step > self.at

    def starts_now(self, norm: Tensor, step: Tensor, valid: Tensor) -> Tensor:
        """True where the norm of this step becomes the reference, if it is valid."""
        return (step == self.at) & valid


@dataclass(frozen=True)
class AtEveryStep:
    """Take the norm after every step as the reference of the next one."""

    def is_active(self, step: Tensor) -> Tensor:
        """True: the initial norm is the reference of the first step."""
        return step > 0

    def starts_now(self, norm: Tensor, step: Tensor, valid: Tensor) -> Tensor:
        """True where the norm of this step becomes the reference, if it is valid."""
        return valid


@dataclass(frozen=True)
class AtInflection:
    """Start at the first sample at which the second difference of the squared norm is negative.

    ``memory`` has four rows, with a number for each norm: the running mean of the square, its last
    sample, the last difference between samples, and 1 if the start has happened. It is updated in
    place. ``shape`` is that of the norms.
    """

    memory: Tensor
    shape: torch.Size

    def is_active(self, step: Tensor) -> Tensor:
        """True where the start has happened."""
        return (self.memory[3] > 0).reshape(self.shape)

    def starts_now(self, norm: Tensor, step: Tensor, valid: Tensor) -> Tensor:
        """Update the memory with this step's norm. True where the start happens at this step.

        Norms that are not valid, because they are not finite or the step was skipped, leave the
        memory as it is.
        """
        mean, sample, difference, started = self.memory.unbind()
        square, valid = norm.square().reshape(-1), valid.reshape(-1)
        average = torch.where(step == 1, square, DECAY * mean + (1 - DECAY) * square)
        mean.copy_(torch.where(valid, average, mean))
        sampled = (step % SAMPLED_EVERY == 0) & valid
        is_concave = mean - sample < difference
        now = sampled & (step >= FIRST * SAMPLED_EVERY) & is_concave & (started == 0)
        difference.copy_(torch.where(sampled, mean - sample, difference))
        sample.copy_(torch.where(sampled, mean, sample))
        started.copy_(torch.where(now, 1.0, started))
        return now.reshape(self.shape)


def check_start(given: Any) -> None:
    """Raise an error if ``start=`` is neither a step, ``"inflection"`` nor ``"every step"``."""
    if given in ("inflection", EVERY_STEP) or (
        isinstance(given, int) and not isinstance(given, bool) and given >= 0
    ):
        return
    raise ValueError(
        f"start={given!r} is not known: give the step after which the norm is controlled (0: from "
        "the first step on), 'inflection', or 'every step'."
    )
