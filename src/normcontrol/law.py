"""The law: how far a norm moves towards its target in one step.

A law turns (norm, target, rate) into the factor that the weights are multiplied by. It is element-wise and knows
nothing of optimizers, schedules or which weights share a norm. Add a law by adding a function to :data:`LAWS`; one
that needs memory (an integral term, say) keeps it in a tensor of the norm's shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Law = Callable[[Tensor, Tensor, "Tensor | float"], Tensor]


def proportional(norm: Tensor, target: Tensor, rate: Tensor | float) -> Tensor:
    r"""Equation 3 of the paper: ``theta <- theta - k_t (1 - r_t ||theta_0|| / ||theta_t||) theta``.

    The norm then obeys ``norm' = (1 - rate) * norm + rate * target``, exactly.

    >>> norm, target = torch.tensor(10.0), torch.tensor(20.0)
    >>> proportional(norm, target, 0.1) * norm     # a tenth of the way from 10 to 20
    tensor(11.)
    """
    return 1 - rate * (1 - target / norm)


def upper_bound(norm: Tensor, target: Tensor, rate: Tensor | float) -> Tensor:
    """Pull down a norm above its target; leave one below it alone.

    >>> upper_bound(torch.tensor([1.0, 4.0]), torch.tensor(2.0), 0.5)
    tensor([1.0000, 0.7500])
    """
    return proportional(norm, torch.minimum(norm, target), rate)


def lower_bound(norm: Tensor, target: Tensor, rate: Tensor | float) -> Tensor:
    """Push up a norm below its target; leave one above it alone.

    >>> lower_bound(torch.tensor([1.0, 4.0]), torch.tensor(2.0), 0.5)
    tensor([1.5000, 1.0000])
    """
    return proportional(norm, torch.maximum(norm, target), rate)


def projection(norm: Tensor, target: Tensor, rate: Tensor | float = 1.0) -> Tensor:
    """Put the norm on its target at once, whatever the rate: ``k_t = 1``.

    >>> projection(torch.tensor(4.0), torch.tensor(2.0))
    tensor(0.5000)
    """
    return target / norm


LAWS: dict[str, Law] = {
    "proportional": proportional,
    "upper": upper_bound,
    "lower": lower_bound,
    "projection": projection,
}
