"""The folded stepper: AdamWN where torch's fused AdamW runs the step on a CPU.

``s (p - lr u)`` equals ``s p - (s lr) u``: AdamW with the learning rate ``s lr`` and the decay that
multiplies by ``s``. With ``order="after"`` the factor s is known only after the step, so the step
is made with a guess. Only the pass that measures remains beside Adam's own. This file knows nothing
about targets and laws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from normcontrol.distributed.sharing import Sharing
from normcontrol.groups.sets import WeightSet
from normcontrol.groups.settings import USE_UPDATES
from normcontrol.steppers.stepper import TOLERANCE, Closure, PlainStepper, Scaler, next_scale
from normcontrol.weights.memory import overlaps

SINGLE, GRADIENT = Struct("f"), attrgetter("grad")
FEWEST = 100_000
"""Sets of fewer weights are multiplied in a pass of their own: it takes less time than a second
call of torch's kernel, for the weights that have another factor."""


class Folded:
    """The factors of one set that the optimizer's own step multiplies."""

    def __init__(self, stored: Tensor | None) -> None:
        self.last, self.guess = 1.0, 1.0
        if stored is not None and stored.shape == (2,):
            self.last, self.guess = stored.tolist()
        self.factor = 1.0  # what the current step multiplies by
        self.skipped = False  # whether the current step is an overflow, and not made


class FoldedStepper(PlainStepper):
    """Steps of torch's fused AdamW on a CPU, which multiply by a guess of the scale."""

    folded: Mapping[WeightSet, Folded] = {}

    def prepare(self, sets: Sequence[WeightSet], sharing: Sharing) -> None:
        self.hand_over()
        super().prepare(sets, sharing)
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        tied = {params[i] for pair in overlaps(params) for i in pair}  # stepped more than once
        self.folded = {
            s: Folded(s.settings.get("scales"))
            for s in sets
            if can_be_folded(s) and tied.isdisjoint(s.params)
        }

    def step(self, closure: Closure | None, scaler: Scaler) -> float | None:
        loss = None
        if closure is not None:  # which tensors have gradients must be known
            with torch.enable_grad():
                loss = closure()
        groups = self.optimizer.param_groups
        factors = self._choose_factors(scaler.found_inf)
        if factors:
            self.optimizer.param_groups = split_by_factor(groups, factors)
        try:
            super().step(None, scaler)
        finally:
            self.optimizer.param_groups = groups
        return loss

    def measure(self, s: WeightSet) -> Any:
        if s not in self.folded:
            return super().measure(s)
        s.parts = s.size(s.params, s.scope) / self.folded[s].factor
        return s.join(s.parts)

    def multiply_(self, s: WeightSet, scale: Any) -> None:
        folded = self.folded.get(s)
        if folded is None or torch.compiler.is_compiling():
            super().multiply_(s, scale)
        elif not folded.skipped:
            wanted = float(scale)
            missed = wanted / folded.factor
            if abs(missed - 1) > TOLERANCE:
                self.multiply_local_(s, missed)
            guess = next_scale(wanted, folded.last, float(s.goal[1]))
            folded.last, folded.guess = wanted, in_float32(guess)

    def hand_over(self) -> None:
        for s, folded in self.folded.items():
            state = s.settings
            if (folded.last, folded.guess) != (1.0, 1.0) or "scales" in state:
                scales = [folded.last, folded.guess]
                state["scales"] = torch.tensor(scales, dtype=torch.float64, device="cpu")

    def _choose_factors(self, found_inf: Tensor | None) -> dict[Tensor, float]:
        """Decide what this step multiplies by: the guess, or 1 where Adam's pass cannot do it."""
        factors: dict[Tensor, float] = {}
        for s, folded in self.folded.items():
            folded.factor = 1.0
            if torch.compiler.is_compiling():
                continue
            folded.skipped = found_inf is not None and bool(found_inf.item())
            moves = not folded.skipped and min([float(g["lr"]) for g in s.groups]) > 0
            if moves and not any(map(is_, map(GRADIENT, s.params), repeat(None))):
                folded.factor = folded.guess
            if folded.factor != 1.0:
                factors.update(dict.fromkeys(s.params, folded.factor))
        return factors


def in_float32(x: float) -> float:
    """Return a number rounded to float32, the format that torch's kernel uses.

    >>> in_float32(0.1)
    0.10000000149011612
    """
    rounded: float = SINGLE.unpack(SINGLE.pack(x))[0]
    return rounded


def can_be_folded(s: WeightSet) -> bool:
    """Return whether Adam's own decay can multiply this set.

    It must be float32 on a CPU, with one factor for all weights, and not small.
    """
    default = s.scope.joint and s.shards is None and s.order == "after"
    default = default and sum(p.numel() for p in s.params) >= FEWEST
    default = default and not s.mechanisms & (USE_UPDATES | {"size"})
    return default and all(p.is_cpu and p.dtype == torch.float32 for p in s.params)


def split_by_factor(
    groups: list[dict[str, Any]], factors: dict[Tensor, float]
) -> list[dict[str, Any]]:
    """Return the groups split into the weights that are multiplied and the others, for one step."""
    split = []
    for group in groups:
        chosen = [p for p in group["params"] if p in factors]
        if chosen:
            factor = factors[chosen[0]]
            lr = float(group["lr"]) * factor
            decay = (1 - factor) / lr
            split.append({**group, "params": chosen, "lr": lr, "weight_decay": decay})
        split.append({**group, "params": [p for p in group["params"] if p not in factors]})
    return split
