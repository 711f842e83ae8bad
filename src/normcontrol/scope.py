"""Scopes: which weights share a norm.

A scope divides a list of tensors into *parts*: whole tensors, or slices of them (rows, columns,
experts). All parts share one norm, or each part has its own. A scope knows nothing about targets,
rates or optimizers, and it does not measure anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scope:
    """How tensors are divided into parts, and whether the parts share a norm.

    Args:
        name: the name by which a user selects the scope, or a tuple of axes.
        joint: True if all parts share one norm.
        axes: a part is one index of these axes; None if a part is a whole tensor.
    """

    name: Any
    joint: bool = False
    axes: tuple[int, ...] | None = None

    def sizes(self, params: Sequence[Tensor]) -> list[int]:
        """Return the number of parts of every tensor."""
        if self.axes is None:
            return [1] * len(params)
        # A list, because torch 2.15 does not compile a generator here.
        return [math.prod([p.shape[a] for a in self.axes]) for p in params]

    def join(self, parts: Tensor) -> Tensor:
        """Return the controlled norms: one for all parts if they share it, else one for each."""
        return torch.linalg.vector_norm(parts) if self.joint else parts


SCOPES = {
    "global": Scope("global", joint=True),
    "group": Scope("group", joint=True),
    "tensor": Scope("tensor"),
    "row": Scope("row", axes=(0,)),
    "col": Scope("col", axes=(1,)),
}
"""The scopes by name. "global" shares a norm over all groups, "group" within a group."""


def parse_scope(given: Any) -> Scope:
    """Return a scope by its name, or for a tuple of axes: one norm for every index of those axes.

    >>> parse_scope("row") == Scope("row", axes=(0,))
    True
    >>> parse_scope((0, 1)).sizes([torch.ones(4, 3, 2)])  # experts: one norm per (expert, row)
    [12]
    """
    if isinstance(given, str) and given in SCOPES:
        return SCOPES[given]
    if isinstance(given, int) and not isinstance(given, bool):
        given = (given,)
    if isinstance(given, (tuple, list)) and given and all(type(a) is int for a in given):
        return Scope(tuple(given), axes=tuple(given))
    raise ValueError(
        f"scope={given!r} is not known: give one of {', '.join(map(repr, SCOPES))}, or a tuple of "
        "axes such as (0,) for one norm per index of axis 0."
    )


ADVICE = "Put it into a group with scope='tensor', or leave it out with controlled=False"


def check_axes(scope: Scope, name: str, param: Any, advice: str = ADVICE) -> None:
    """Refuse a tensor that lacks the scope's axes, has one of them under two numbers, or of which
    every element would be a part."""
    axes = scope.axes
    if axes is None:
        return
    wrong = any(not -param.ndim <= a < param.ndim for a in axes)
    distinct = set() if wrong else {a % param.ndim for a in axes}
    if distinct and len(distinct) < len(axes):
        raise ValueError(
            f"scope={scope.name!r} names an axis twice for {name}, which has shape "
            f"{tuple(param.shape)}. Give every axis once."
        )
    if wrong or len(distinct) == param.ndim:
        raise ValueError(
            f"scope={scope.name!r} needs a tensor with axes {axes} and at least one more to take a "
            f"norm over, but {name} has shape {tuple(param.shape)}. {advice}."
        )
