"""Sizes: what the controller measures in place of the norm (the setting ``size=``).

A size is a function ``(tensors, scope) -> one number for every part``, as ``measure`` is. It
must be homogeneous: when the weights are multiplied by a factor, their size must be multiplied by
the same factor. Otherwise the size does not move as the law says. A size knows nothing about
targets, laws or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normcontrol.scope import Scope
from normcontrol.weights.passes import measure

Size = Callable[[Sequence[Tensor], Scope], Tensor]


def spectral(params: Sequence[Tensor], scope: Scope) -> Tensor:
    """Return the largest singular value of every tensor.

    A tensor of more than two dimensions, such as a convolution, is flattened to a matrix with one
    row for each output.

    >>> from normcontrol.scope import parse_scope
    >>> spectral([torch.tensor([[3.0, 0.0], [0.0, 4.0]])], parse_scope("tensor"))
    tensor([4.], dtype=torch.float64)
    """
    return torch.stack([torch.linalg.matrix_norm(p.flatten(1).float(), 2).double() for p in params])


@dataclass(frozen=True)
class Statistic:
    """A size computed by a user's function of one tensor.

    The function returns one number for each part of the tensor, or one number for all of them.
    """

    function: Callable[[Tensor], Tensor]

    def __call__(self, params: Sequence[Tensor], scope: Scope) -> Tensor:
        counts = scope.sizes(params)
        values = [self._numbers(p) for p in params]
        for p, value, n in zip(params, values, counts, strict=True):
            if value.numel() not in (1, n):
                raise ValueError(
                    f"{self!r} gave {value.numel()} numbers for a tensor of shape "
                    f"{tuple(p.shape)}, which has {n} parts in scope={scope.name!r}: return one "
                    "number for each part, or one for all of them."
                )
        return torch.cat([value.expand(n) for value, n in zip(values, counts, strict=True)])

    def _numbers(self, p: Tensor) -> Tensor:
        found = self.function(p)
        try:
            value = torch.as_tensor(found, device=p.device)
        except (TypeError, ValueError, RuntimeError):
            value = None
        if value is None or value.is_complex():
            raise ValueError(
                f"{self!r} gave {found!r} for a tensor of shape {tuple(p.shape)}: return a real "
                "number for each of its parts, or one for all of them."
            )
        return value.double().flatten()

    def __repr__(self) -> str:
        return f"statistic({getattr(self.function, '__name__', type(self.function).__name__)!r})"


SPECTRAL = ("spectral", "spectral-exact")
"""The largest singular value. Steps follow the first by power iteration, see
``power_iteration.py``; the second is decomposed at every step."""

SIZES: dict[str, Size] = {"norm": measure, **dict.fromkeys(SPECTRAL, spectral)}


def as_size(given: Any) -> Any:
    """Check the setting ``size=``. A name is returned as it is; a function is wrapped in a
    :class:`Statistic`."""
    if isinstance(given, Statistic) or (isinstance(given, str) and given in SIZES):
        return given
    if callable(given):
        return Statistic(given)
    raise ValueError(
        f"size={given!r} is not known: give 'norm', 'spectral', 'spectral-exact', or a function "
        "of a tensor."
    )


def size_of(given: Any) -> Size:
    """Return the function that measures this size. ``given`` is what :func:`as_size` returned."""
    return SIZES[given] if isinstance(given, str) else given
