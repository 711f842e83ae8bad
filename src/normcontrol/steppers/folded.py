"""Order "after" without a pass of its own for the multiplication, where torch's fused AdamW runs
the step on a CPU.

``s (p - lr u)`` is ``s p - (s lr) u``: AdamW with the learning rate ``s lr`` and the decay that
multiplies by ``s``. The factor is only known when the step is over, so the step is made with a
guess, as in ``fused.py``, which also says what becomes of the difference. What remains beside
Adam's own pass is the one that measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from normcontrol.groups.sets import WeightSet
from normcontrol.scope import Scope, Weights

TOLERANCE = 2.0**-23


class FoldedWeights(Weights):
    """Weights that the optimizer's own step multiplies by ``factor``, and that are still owed the
    factor ``debt``."""

    def __init__(self, params: list[Tensor], scope: Scope, pending: Any) -> None:
        super().__init__(params, scope)
        kept: list[float] = (
            pending.tolist()
            if isinstance(pending, Tensor) and pending.shape == (3,)
            else [1.0, 1.0, 1.0]
        )
        self.debt, self.last, self.guess = kept
        self.factor = 1.0  # what this step was made with
        self.skipped = False  # whether it was an overflow, and not made at all

    def measure(self) -> Tensor:
        """The norms before the multiplication."""
        return super().measure() * (self.debt / self.factor)

    def apply_(self, scale: Tensor, step: Tensor) -> None:
        """Owe what the guess missed to the next step, or multiply by it now if it is more than a
        rounding error."""
        if self.skipped:
            return
        asked = scale.item()
        owed = asked * self.debt / self.factor
        if abs(owed - 1) > TOLERANCE:
            correction = torch.tensor(owed, dtype=torch.float32)
            super().apply_(correction, step)
            owed = owed / correction.item() if correction else 1.0
        guess = 2 * asked - self.last
        self.debt, self.last = owed, asked
        self.guess = torch.tensor(
            (guess if 0.5 < guess < 2 else 1.0) * owed, dtype=torch.float32
        ).item()

    def owes(self) -> bool:
        """Whether the next step differs from a first one."""
        return (self.debt, self.last, self.guess) != (1.0, 1.0, 1.0)

    def pending(self) -> Tensor:
        """What the next step needs, for a checkpoint."""
        return torch.tensor([self.debt, self.last, self.guess], dtype=torch.float64)


def fold(s: WeightSet) -> None:
    """Let the optimizer's step multiply this set's weights, if it can."""
    if (
        isinstance(s.weights, FoldedWeights)
        or s.shards is not None
        or not s.is_plain
        or not s.scope.joint
        or s.settings["order"] != "after"
    ):
        return
    if all(p.is_cpu and p.dtype == torch.float32 for p in s.params):
        s.weights = FoldedWeights(s.params, s.scope, s.settings.get("pending"))


@contextmanager
def folding(optimizer: Any, sets: list[WeightSet], found_inf: Tensor | None) -> Iterator[None]:
    """The optimizer's groups, split for one step into the weights that are multiplied and the
    others."""
    groups = optimizer.param_groups
    factors: dict[Tensor, float] = {}
    for s in sets:
        if isinstance(s.weights, FoldedWeights):
            s.weights.skipped = found_inf is not None and bool(found_inf.item())
            moves = not s.weights.skipped and all(float(g["lr"]) > 0 for g in s.groups)
            s.weights.factor = (
                s.weights.guess if moves and all(p.grad is not None for p in s.params) else 1.0
            )
            factors.update(dict.fromkeys(s.params, s.weights.factor))
    if all(f == 1.0 for f in factors.values()):
        yield
        return
    split = []
    for group in groups:
        chosen = [p for p in group["params"] if p in factors]
        if chosen:
            lr = float(group["lr"]) * factors[chosen[0]]
            split.append(
                {**group, "params": chosen, "lr": lr, "weight_decay": (1 - factors[chosen[0]]) / lr}
            )
        split.append({**group, "params": [p for p in group["params"] if p not in factors]})
    optimizer.param_groups = split
    try:
        yield
    finally:
        optimizer.param_groups = groups
