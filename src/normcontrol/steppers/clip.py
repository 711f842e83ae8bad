"""Clipping of the gradients within a step, as ``torch.nn.utils.clip_grad_norm_`` computes it.

It computes the factor. A stepper measures the gradients and multiplies them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from normcontrol.numbers import is_number, plain


@dataclass
class Clip:
    """The largest joint norm of the gradients, and their norm at the last step before clipping."""

    max_norm: float | None
    norm: Tensor | None = None

    def __post_init__(self) -> None:
        self.set_limit(self.max_norm)

    def set_limit(self, given: Any) -> None:
        """Take this number as the largest norm; None for no clipping."""
        number = plain(given)
        if given is not None and not (is_number(number) and number > 0):
            raise ValueError(
                f"max_grad_norm={given!r}: gradients cannot be clipped to that norm. Give a "
                "positive one, or None."
            )
        self.max_norm = None if given is None else float(number)
        if given is None:
            self.norm = None

    def factor(self, norm: Tensor, grad_scale: Tensor | None) -> Tensor:
        """Return the factor that clips gradients of this norm; store their norm without GradScaler.

        >>> import torch
        >>> Clip(max_norm=1.0).factor(torch.tensor(4.0), grad_scale=None)
        tensor(0.2500)
        """
        assert self.max_norm is not None
        self.norm = norm if grad_scale is None else norm / grad_scale
        return (self.max_norm / (self.norm + 1e-6)).clamp(max=1.0)
