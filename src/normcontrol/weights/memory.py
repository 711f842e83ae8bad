"""Finds tensors that share memory: the same weights under two names, or views that overlap.

It reads addresses, shapes and strides, never elements. What shared memory means for a norm or a
step is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class View(NamedTuple):
    """The memory of a tensor. Tensors with equal views are the same weights."""

    device: torch.device
    address: int
    size: int
    """Bytes of an element."""
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        pairs = zip(self.shape, self.stride, strict=True)
        return self.address + (1 + sum((n - 1) * step for n, step in pairs)) * self.size


def view_of(tensor: Any) -> View | None:
    """Return the memory of a tensor; None if it has none that could be compared."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.numel() == 0:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a subclass that has no memory of its own
        return None
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    stride = tuple(step if n > 1 else 0 for n, step in pairs)  # of one element, any stride is right
    view = View(tensor.device, address, tensor.element_size(), tensor.shape, stride)
    return view if address else None


def overlaps(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the pairs of tensors that have elements in common, by their positions.

    >>> memory = torch.zeros(4, 6)
    >>> overlaps([memory[:, :3], memory[:, 3:], memory[2:]])
    [(0, 2), (1, 2)]
    """
    views = [(view, i) for i, t in enumerate(tensors) if (view := view_of(t)) is not None]
    views.sort(key=lambda pair: (str(pair[0].device), pair[0].address, pair[1]))
    found: list[tuple[int, int]] = []
    current: list[tuple[View, int]] = []  # those that may reach beyond the next address
    for view, i in views:
        device, address = view.device, view.address
        current = [(v, j) for v, j in current if v.device == device and v.end > address]
        found += [(min(i, j), max(i, j)) for v, j in current if _meet(v, view)]
        current.append((view, i))
    return sorted(found)


def _meet(first: View, second: View) -> bool:
    """Return whether two views whose ranges overlap have elements in common.

    Columns of a matrix have none in common, though their ranges overlap.
    """
    shift = second.address - first.address
    if first == second or first.size != second.size or shift % first.size:
        return True
    last = max(first.end, second.end)
    taken = torch.zeros((last - first.address) // first.size, dtype=torch.bool, device="cpu")
    taken.as_strided(first.shape, first.stride).fill_(True)
    return bool(taken.as_strided(second.shape, second.stride, shift // first.size).any())
