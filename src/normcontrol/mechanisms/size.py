"""How large a part of the weights is: its norm, unless a method asks for another measure.

A size takes tensors and their scope, and gives one number for every part, as ``scope.measure``
does. What multiplies the weights by a factor must multiply their size by it too, or the law of the
norm does not hold.
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
    """The largest singular value of every matrix; convolutions count as matrices with a row for
    each output.

    >>> from normcontrol.scope import parse_scope
    >>> spectral([torch.tensor([[3.0, 0.0], [0.0, 4.0]])], parse_scope("tensor"))
    tensor([4.], dtype=torch.float64)
    """
    return torch.stack([torch.linalg.matrix_norm(p.flatten(1).float(), 2).double() for p in params])


@dataclass(frozen=True)
class Statistic:
    """Any function of a tensor that gives a number for each of its parts, or one for all of
    them."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, params: Sequence[Tensor], scope: Scope) -> Tensor:
        counts = scope.sizes(params)
        values = [
            torch.as_tensor(self.function(p), device=p.device).double().flatten() for p in params
        ]
        for p, value, n in zip(params, values, counts, strict=True):
            if value.numel() not in (1, n):
                raise ValueError(
                    f"{self!r} gave {value.numel()} numbers for a tensor of shape "
                    f"{tuple(p.shape)}, which has {n} parts in "
                    f"scope={scope.name!r}: give one number for each part, or one for all."
                )
        return torch.cat([value.expand(n) for value, n in zip(values, counts, strict=True)])

    def __repr__(self) -> str:
        return f"statistic({getattr(self.function, '__name__', type(self.function).__name__)!r})"


SIZES: dict[str, Size] = {"norm": measure, "spectral": spectral}


def as_size(given: Any) -> Any:
    """A size by name stays a name; a function of a tensor becomes a :class:`Statistic`."""
    if isinstance(given, Statistic) or (isinstance(given, str) and given in SIZES):
        return given
    if callable(given):
        return Statistic(given)
    raise ValueError(
        f"size={given!r} is not known: give 'norm', 'spectral', or a function of a tensor."
    )


def size_of(given: Any) -> Size:
    return SIZES[given] if isinstance(given, str) else given
