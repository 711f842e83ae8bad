"""Published methods written from their formulas alone, to compare the library with.

``by_definition`` applies a rule to tensors; ``trained`` runs an optimizer on the same weights and
gradients. This file does not import normcontrol.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

STEPS = 50
LR, BETAS, EPS = 0.02, (0.9, 0.95), 1e-8
ADAM = {"lr": LR, "betas": BETAS, "eps": EPS}
SHAPES = ((6, 4), (3, 7))


def weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """The initial weights, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype) * 0.5) for shape in SHAPES
    ]


INITIAL = [w.detach().clone() for w in weights()]


def gradients(step: int, like: list[Tensor]) -> list[Tensor]:
    """The gradients of a step: random, and a function of the step alone."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in like]


def lr_at(step: int) -> float:
    """The learning rate of a step."""
    return LR * (0.2 + 0.8 * math.cos(step / 40))


class AdamDirection:
    """Adam's direction u, from Kingma and Ba."""

    def __init__(self, like: list[Tensor]) -> None:
        self.m = [torch.zeros_like(w) for w in like]
        self.v = [torch.zeros_like(w) for w in like]
        self.t = 0

    def __call__(self, grads: list[Tensor]) -> list[Tensor]:
        self.t += 1
        found = []
        for i, g in enumerate(grads):
            self.m[i] = BETAS[0] * self.m[i] + (1 - BETAS[0]) * g
            self.v[i] = BETAS[1] * self.v[i] + (1 - BETAS[1]) * g * g
            found.append(
                self.m[i]
                / (1 - BETAS[0] ** self.t)
                / ((self.v[i] / (1 - BETAS[1] ** self.t)).sqrt() + EPS)
            )
        return found


class GradientDirection:
    """SGD's direction: the gradient."""

    def __init__(self, like: list[Tensor]) -> None:
        pass

    def __call__(self, grads: list[Tensor]) -> list[Tensor]:
        return grads


def by_definition(rule, direction=AdamDirection, steps: int = STEPS) -> list[Tensor]:
    """The weights after these steps of ``rule(w, u, lr, i, step)``, which returns the new value of
    tensor i."""
    ws = [w.clone() for w in INITIAL]
    direct = direction(ws)
    for step in range(1, steps + 1):
        us = direct(gradients(step, ws))
        ws = [rule(w, u, lr_at(step), i, step) for i, (w, u) in enumerate(zip(ws, us, strict=True))]
    return ws


def trained(opt, params: list[nn.Parameter], steps: int = STEPS) -> list[Tensor]:
    """The weights after these steps of an optimizer, on the same gradients and learning rates."""
    for step in range(1, steps + 1):
        for group in opt.param_groups:
            group["lr"] = lr_at(step)
        for p, g in zip(params, gradients(step, params), strict=True):
            p.grad = g
        opt.step()
    return [p.detach() for p in params]


def assert_close(found: list[Tensor], expected: list[Tensor], within: float = 1e-6) -> None:
    """Equal up to this relative error of each tensor's norm."""
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= within * b.norm(), ((a - b).norm() / b.norm()).item()


def rows(w: Tensor) -> Tensor:
    """The norm of every row, shaped to divide the tensor."""
    return w.norm(dim=1, keepdim=True)
