"""The law: how far a norm moves towards its target in one step.

A law turns (norm, target, rate) into the factor that the weights are multiplied by. It is
element-wise and knows nothing of optimizers, schedules or which weights share a norm. Add a law by
adding a function to :data:`LAWS`; one that needs memory is a class, as :class:`Integral` is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Band:
    """Leave a norm within ``[low * target, target]`` alone; pull one that is outside to the nearer
    end.

    >>> Band(0.5)(torch.tensor([1.0, 3.0, 8.0]), torch.tensor(4.0), 1.0)
    tensor([2.0000, 1.0000, 0.5000])
    """

    low: float

    def __call__(self, norm: Tensor, target: Tensor, rate: Tensor | float) -> Tensor:
        return proportional(norm, torch.clamp(norm, self.low * target, target), rate)


@dataclass
class Integral:
    """Constrained parameter regularisation (Franke et al., 2023): a multiplier that grows while the
    mean square of the weights is above its bound, and shrinks to zero while it is below::

        lambda <- max(0, lambda + rate * (norm^2 - target^2) / count)
        theta  <- theta - 2 lambda theta

    >>> law = Integral(torch.zeros(1), count=torch.tensor([4.0]))
    >>> [round(law(torch.tensor([n]), torch.tensor([1.0]), 1.0).item(), 4) for n in (1.0, 1.2, 1.2, 0.5)]
    [1.0, 0.78, 0.56, 0.935]
    """

    multiplier: Tensor
    count: Tensor

    def __call__(self, norm: Tensor, target: Tensor, rate: Tensor | float) -> Tensor:
        self.multiplier.add_(rate * (norm.square() - target.square()) / self.count).clamp_(min=0)
        return 1 - 2 * self.multiplier


LAWS: dict[str, Law] = {
    "proportional": proportional,
    "upper": upper_bound,
    "lower": lower_bound,
    "projection": projection,
}
NAMES = (*LAWS, "band(LOW)", "integral")


def law_of(name: str) -> Law | None:
    """The law by its name, "band(0.5)" included; None for "integral", which needs to be told what
    it works on.

    >>> law_of("band(0.5)")
    Band(low=0.5)
    """
    band = re.fullmatch(r"band\(([\d.e+-]+)\)", name)
    if band and 0 <= float(band[1]) <= 1:
        return Band(float(band[1]))
    if name in LAWS or name == "integral":
        return LAWS.get(name)
    raise ValueError(
        f"law={name!r} is not known: give one of {', '.join(map(repr, NAMES))}, LOW being a part "
        "of the target within [0, 1]."
    )
