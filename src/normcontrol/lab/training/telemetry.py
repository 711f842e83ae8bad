"""Measures the weights at each evaluation of a run: the norm of each class of tensors, the angle of
the step, and the effective decay. Predictions and comparisons use these numbers.

The joint norm is logged more often, by the loop itself. This file may not know how values are
logged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from normcontrol import NormControl
from normcontrol.distributed.ranks import local
from normcontrol.groups.classes import class_names
from normcontrol.lab.training import parallel
from normcontrol.lab.training.model import GPT
from normcontrol.lab.training.parallel import World
from normcontrol.scope import SCOPES
from normcontrol.watch.trace import angle
from normcontrol.weights.passes import measure

PREFIX = "norm/"
"""Prefix of the names of classes in the metrics."""


class Telemetry:
    """Measures the matrices of a model, over all processes."""

    def __init__(self, model: GPT, world: World) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.dim() >= 2]
        self.params = [p for _, p in named]
        self.labels = class_names([name for name, _ in named], self.params)
        self.world = world if parallel.is_sharded(model) else None

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """The norm of each class of tensors."""
        squares = self._squares([local(p) for p in self.params])
        sums: dict[str, float] = {}
        for label, square in zip(self.labels, squares.tolist(), strict=True):
            sums[PREFIX + label] = sums.get(PREFIX + label, 0.0) + square
        return {label: math.sqrt(square) for label, square in sums.items()}

    @torch.no_grad()
    def copy(self) -> list[Tensor]:
        """A copy of the weights, to be made before a step and given to :meth:`angle` after it."""
        return [local(p).detach().clone() for p in self.params]

    @torch.no_grad()
    def angle(self, before: list[Tensor]) -> float:
        """The angle between the weights before and after a step, in radians, all matrices taken as
        one vector."""
        now = [local(p).detach() for p in self.params]
        moved = [a - b for a, b in zip(now, before, strict=True)]
        return float(
            angle(*(self._squares(tensors).sum().sqrt() for tensors in (before, now, moved)))
        )

    def _squares(self, tensors: list[Tensor]) -> Tensor:
        """The squared norm of every tensor, over all processes."""
        squares = measure(tensors, SCOPES["global"]).square()
        return squares if self.world is None else self.world.total(squares)


def effective_decay(optimizers: list[Optimizer], lr: float) -> dict[str, float]:
    """The weight decay with which AdamW would have scaled the weights as the control of the joint
    norm did in the last step. Empty if no optimizer controls the joint norm."""
    for opt in optimizers:
        if isinstance(opt, NormControl) and lr > 0 and "global" in (readings := opt.norms()):
            return {"decay": float(readings["global"].decay(lr))}
    return {}
