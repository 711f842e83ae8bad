"""What a run writes down about its weights at each evaluation: norms by class of tensors, effective
decay, angle of a step.

A few numbers, for predictions and comparisons; the joint norm is logged more often, by the loop
itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from normcontrol import NormControl
from normcontrol.groups.classes import class_names
from normcontrol.lab.training import parallel
from normcontrol.lab.training.model import GPT
from normcontrol.lab.training.parallel import World
from normcontrol.scope import SCOPES
from normcontrol.watch.trace import angle
from normcontrol.weights.passes import measure

PREFIX = "norm/"
"""What the names of classes begin with in the metrics."""


class Telemetry:
    """The matrices of a model, over all processes."""

    def __init__(self, model: GPT, world: World) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.dim() >= 2]
        self.params = [p for _, p in named]
        self.labels = class_names([name for name, _ in named], self.params)
        self.world = world if parallel.is_sharded(model) else None

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """The norm of each class of tensors."""
        squares = self._squares([parallel.local(p) for p in self.params])
        found: dict[str, float] = {}
        for label, square in zip(self.labels, squares.tolist(), strict=True):
            found[PREFIX + label] = found.get(PREFIX + label, 0.0) + square
        return {label: math.sqrt(square) for label, square in found.items()}

    @torch.no_grad()
    def copy(self) -> list[Tensor]:
        """The weights before a step, for :meth:`angle` after it."""
        return [parallel.local(p).detach().clone() for p in self.params]

    @torch.no_grad()
    def angle(self, before: list[Tensor]) -> float:
        """By how much the step has turned all matrices together, in radians."""
        now = [parallel.local(p).detach() for p in self.params]
        moved = [a - b for a, b in zip(now, before, strict=True)]
        return float(
            angle(*(self._squares(tensors).sum().sqrt() for tensors in (before, now, moved)))
        )

    def _squares(self, tensors: list[Tensor]) -> Tensor:
        squares = measure(tensors, SCOPES["global"]).square()
        return squares if self.world is None else self.world.total(squares)


def effective_decay(optimizers: list[Optimizer], lr: float) -> dict[str, float]:
    """The decay that AdamW would have needed to do what the controller of the joint norm did in the
    last step."""
    for opt in optimizers:
        if isinstance(opt, NormControl) and lr > 0 and "global" in (readings := opt.norms()):
            return {"decay": float(readings["global"].decay(lr))}
    return {}
