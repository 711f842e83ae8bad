"""Weights that an optimizer stores in its state, such as the second sequence of schedule-free.

An optimizer that computes the next weights from stored ones undoes the control, unless the stored
ones are multiplied by the same factor. This file knows which optimizers do so, by the names of
their classes, and which cannot be controlled. It knows nothing about targets, rates and laws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import compress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from normcontrol.distributed.ranks import local
from normcontrol.groups.sets import WeightSet
from normcontrol.groups.settings import USE_UPDATES
from normcontrol.warn import warn
from normcontrol.weights.passes import multiply_

T = TypeVar("T")

SCALED: dict[str, tuple[str, ...]] = {
    "*ScheduleFree*": ("z", "x", "y"),
    "Lookahead": ("slow_params", "lookahead_slow_buff"),
    "Ranger": ("slow_buffer",),
    "Ranger21": ("lookahead_params",),
    "AccSGD": ("momentum_buffer",),
    "A2Grad": ("x_k",),
    "SRMM": ("mov_avg_param",),
    "Emo*": ("shadow",),
}
"""The entries of an optimizer's state that are weights. The next weights are a linear combination
of the current ones, these, and gradients: multiplied by one factor, all stay in proportion."""

SUMS = "computes the weights anew at every step, from sums of gradients since the first step"
FIRST = "computes the weights anew at every step, from those of the first step"
OWN_NORM = "sets the norm of the weights itself at every step"
REFUSED = {
    "MADGRAD": SUMS,
    "DAdaptAdaGrad": SUMS,
    "DAdaptSGD": SUMS,
    "FTRL": SUMS,
    "TRAC": FIRST,
    "Nero": OWN_NORM,
}
"""Optimizers that undo the control, and how."""

UNUSED: dict[str, tuple[str, ...]] = {
    "ASGD": ("ax",),
    "AdaSmooth": ("prev_param",),
    "*Prodigy*": ("p0",),
}
"""Stored weights that no step moves the weights to: averages, distances."""

SAMPLE, SMALLEST, NEAR = 4, 16, 0.3
"""How many tensors are searched for in the state, of how many elements at least, and how far from
the weights a stored tensor may be, relative to their norm. At the first step a gradient of a
network is nearly orthogonal to its weights."""


def optimizers_in(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizer, and those that it wraps in its turn."""
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and value is not optimizer:
            yield from optimizers_in(value)


def entries(optimizer: Optimizer, table: Mapping[str, T]) -> list[T]:
    """Return the entries of a table of class names that are about this optimizer."""
    names = {c.__name__ for o in optimizers_in(optimizer) for c in type(o).__mro__}
    return [
        value for pattern, value in table.items() if any(fnmatchcase(n, pattern) for n in names)
    ]


class StoredWeights:
    """The weights in the state of an optimizer that are multiplied with the weights themselves."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.optimizers = optimizer, list(optimizers_in(optimizer))
        self.keys = [key for keys in entries(optimizer, SCALED) for key in keys]

    def check(self, sets: Sequence[WeightSet]) -> None:
        """Refuse an optimizer that undoes the control, and settings that do not fit."""
        if not sets:
            return
        name = type(self.optimizer).__name__
        for how in entries(self.optimizer, REFUSED):
            raise ValueError(
                f"{name} {how}, so that the control of a norm would be lost at the next step. Use "
                "another optimizer, or controlled=False to use it without control."
            )
        used = next((used for s in sets for used in s.mechanisms & USE_UPDATES), None)
        if self.keys and used is not None:
            raise ValueError(
                f"{used} changes the update of single weights, but {name} stores more weights in "
                f"its state ({', '.join(self.keys)}), which would not follow. Leave {used} out, or "
                "use another optimizer."
            )

    def multiply_(self, s: WeightSet, scale: Tensor, step: Tensor) -> None:
        """Multiply what is stored of a set, as its weights were multiplied."""
        params = [local(p) for p in s.params]
        positions = s.shards.positions if s.shards is not None else [None] * len(params)
        states: list[Any] = []
        for o in self.optimizers:
            if all(o.state is not other for other in states):  # two may share one
                states.append(o.state)
        for state in states:
            for key in self.keys:
                stored = [state[p].get(key) if p in state else None for p in s.params]
                there = [t is not None for t in stored]
                if not any(there):
                    continue
                factors = scale
                if not s.scope.joint and not all(there):
                    factors = torch.cat(list(compress(scale.split(s.scope.sizes(params)), there)))
                tensors = [local(t) for t in compress(stored, there)]
                multiply_(tensors, s.scope, factors, step, list(compress(positions, there)))

    def warn_of_others(self, sets: Sequence[WeightSet]) -> None:
        """Warn if the state of an optimizer that is not known here seems to contain weights."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        known = {*self.keys, *(key for keys in entries(self.optimizer, UNUSED) for key in keys)}
        params = [p for s in sets for p in s.params if p.numel() >= SMALLEST]
        for o in self.optimizers:
            if type(o).__module__.startswith("torch.optim."):
                continue
            found = [
                {key for key, value in o.state[p].items() if looks_like(value, p)} - known
                for p in [p for p in params if p in o.state][:SAMPLE]
            ]
            for key in set.intersection(*found) if found else ():
                warn(
                    f"{type(o).__name__} stores weights in its state, as {key!r}, and the control "
                    "does not scale them. If its steps move the weights to them, it undoes the "
                    "control: compare opt.norms() with the target."
                )


@torch.no_grad()
def looks_like(stored: Any, p: Tensor) -> bool:
    """Return whether a stored tensor is close to the weights, and not to their gradient."""
    if p.grad is None or p.grad.is_sparse or type(stored) not in (Tensor, type(p), type(p.data)):
        return False
    if (stored.shape, stored.dtype, stored.device) != (p.shape, p.dtype, p.device):
        return False
    weights, gradient, stored = local(p), local(p.grad), local(stored)
    near = [
        torch.linalg.vector_norm(stored - t) <= NEAR * torch.linalg.vector_norm(t)
        for t in (weights, gradient)
    ]
    return bool(near[0] & ~near[1])
