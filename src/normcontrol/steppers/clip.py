"""Clipping of the gradients within a step, as ``torch.nn.utils.clip_grad_norm_`` computes it.

It computes the factor. A stepper measures the gradients and multiplies them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class Clip:
    """The largest joint norm of the gradients, and their norm at the last step before clipping."""

    max_norm: float | None
    norm: Tensor | None = None

    def __post_init__(self) -> None:
        self.set_limit(self.max_norm)

    def set_limit(self, given: Any) -> None:
        """Take this as the largest norm; None for no clipping."""
        if given is not None and not (hasattr(given, "__float__") and is_positive(given)):
            raise ValueError(
                f"max_grad_norm={given!r}: gradients cannot be clipped to that norm. Give a "
                "positive one, or None."
            )
        self.max_norm = given
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


def is_positive(given: Any) -> bool:
    """Return whether this is one number above zero."""
    try:
        return float(given) > 0
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several numbers
        return False
