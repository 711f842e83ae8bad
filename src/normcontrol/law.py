"""Laws: by which factor the weights are multiplied in one step.

A law is a function ``(norm, target, rate) -> scale``, element-wise on tensors. It knows nothing
about optimizers, schedules, or which weights share a norm. To add a law, write a function and add
one line to :data:`LAWS`; or give the function itself as ``law=``, which a checkpoint cannot store.
A law that keeps state between steps is a class, see :class:`Integral`. Only :func:`proportional` is
also called with floats, which is faster where the host may read the norm, and compiled by Triton:
hence the comment in place of annotations.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Law = Callable[[Tensor, Tensor, "Tensor | float"], Tensor]
Number = TypeVar("Number", Tensor, Any)
"""A tensor, or a float where the host may read the norm."""


def proportional(norm, target, rate):
    # type: (Number, Number, Tensor | float) -> Number
    r"""Equation 3 of the paper: ``theta <- theta - k_t (1 - r_t ||theta_0|| / ||theta_t||) theta``.

    The new norm is exactly ``norm' = (1 - rate) * norm + rate * target``.

    >>> norm, target = torch.tensor(10.0), torch.tensor(20.0)
    >>> proportional(norm, target, 0.1) * norm     # a tenth of the way from 10 to 20
    tensor(11.)
    """
    return 1 - rate * (1 - target / norm)


def upper_bound(norm: Tensor, target: Tensor, rate: Tensor | float) -> Tensor:
    """Reduce a norm that is above its target. A norm below its target does not change.

    >>> upper_bound(torch.tensor([1.0, 4.0]), torch.tensor(2.0), 0.5)
    tensor([1.0000, 0.7500])
    """
    return proportional(norm, torch.minimum(norm, target), rate)


def lower_bound(norm: Tensor, target: Tensor, rate: Tensor | float) -> Tensor:
    """Increase a norm that is below its target. A norm above its target does not change.

    >>> lower_bound(torch.tensor([1.0, 4.0]), torch.tensor(2.0), 0.5)
    tensor([1.5000, 1.0000])
    """
    return proportional(norm, torch.maximum(norm, target), rate)


def projection(norm: Tensor, target: Tensor, rate: Tensor | float = 1.0) -> Tensor:
    """Set the norm to its target in one step, at any rate above zero. A rate of 0 does nothing.

    >>> norm, target = torch.tensor(4.0), torch.tensor(2.0)
    >>> projection(norm, target), projection(norm, target, 0.0)
    (tensor(0.5000), tensor(1.))
    """
    if isinstance(rate, Tensor):
        return torch.where(rate > 0, target / norm, 1.0)
    return target / norm if rate > 0 else torch.ones_like(norm)


@dataclass(frozen=True)
class Band:
    """Move a norm outside ``[low * target, target]`` towards the nearer bound.

    A norm inside the band does not change. ``low`` is a fraction of the target.

    >>> Band(0.5)(torch.tensor([1.0, 3.0, 8.0]), torch.tensor(4.0), 1.0)
    tensor([2.0000, 1.0000, 0.5000])
    """

    low: float

    def __post_init__(self) -> None:
        """Convert a number of numpy or torch to Python's: its ``repr`` could not be read back."""
        if hasattr(self.low, "item"):
            object.__setattr__(self, "low", self.low.item())

    def __call__(self, norm: Tensor, target: Tensor, rate: Tensor | float) -> Tensor:
        return proportional(norm, torch.clamp(norm, self.low * target, target), rate)


@dataclass
class Integral:
    """Constrained parameter regularisation (CPR; Franke et al., 2023).

    A multiplier lambda grows while the mean square of the weights is above its bound, and shrinks
    to zero while it is below::

        lambda <- max(0, lambda + rate * (norm^2 - target^2) / count)
        theta  <- theta - 2 lambda theta

    Args:
        multiplier: lambda, a row with one value for each norm. It is updated in place at every
            call; torch.compile would lose that in a single 0-d float64 tensor.
        count: the number of weights behind each norm.

    >>> law = Integral(torch.zeros(1), count=torch.tensor([4.0]))
    >>> norms, target = torch.tensor([[1.0], [1.2], [1.2], [0.5]]), torch.tensor([1.0])
    >>> [round(law(norm, target, 1.0).item(), 4) for norm in norms]
    [1.0, 0.78, 0.56, 0.935]
    """

    multiplier: Tensor
    count: Tensor

    def __call__(self, norm: Tensor, target: Tensor, rate: Tensor | float) -> Tensor:
        change = rate * (norm.square() - target.square()) / self.count
        change = torch.where(torch.isfinite(change), change, 0.0)  # it must not learn from NaN
        self.multiplier.add_(change.reshape(-1)).clamp_(min=0)
        return (1 - 2 * self.multiplier).reshape(change.shape)


LAWS: dict[str, Law] = {
    "proportional": proportional,
    "upper": upper_bound,
    "lower": lower_bound,
    "projection": projection,
}
"""The laws without state, by the name that ``law=`` takes. Add your own here."""


@dataclass(frozen=True)
class OwnLaw:
    """A law that was given as a function, and is not in :data:`LAWS`.

    A function cannot be stored in a checkpoint: construct the optimizer with the same function when
    you resume, or add it to :data:`LAWS` and give its name.
    """

    function: Law

    def __call__(self, norm: Tensor, target: Tensor, rate: Tensor | float) -> Tensor:
        return self.function(norm, target, rate)

    def __repr__(self) -> str:
        return f"law({getattr(self.function, '__name__', type(self.function).__name__)!r})"


def as_law(given: Any) -> str | OwnLaw:
    """Return the setting ``law=`` as it is stored: a name, or an :class:`OwnLaw`.

    The laws of this file are stored by their names, also if they were given as functions.

    >>> as_law("upper"), as_law(projection), as_law(Band(0.5)), as_law(Integral)
    ('upper', 'projection', 'band(0.5)', 'integral')
    """
    if isinstance(given, (str, OwnLaw)):
        return given
    for name, law in LAWS.items():
        if law is given:
            return name
    if isinstance(given, Band):
        return f"band({given.low!r})"
    if given is Integral or isinstance(given, Integral):
        return "integral"  # the controller constructs it, with the memory that it saves
    if not callable(given):
        law_of(given)  # the error names the known laws
    for norms, shape in (("two norms", (2,)), ("a single norm", ())):
        norm = torch.ones(shape, device="cpu")
        scale = given(norm, 2 * norm, 0.5)
        if not isinstance(scale, Tensor) or scale.shape != norm.shape:
            found = f"shape {tuple(scale.shape)}" if isinstance(scale, Tensor) else repr(scale)
            raise ValueError(
                f"law={OwnLaw(given)!r} returned {found} for {norms}: a law is a function of "
                "(norm, target, rate) that returns a scale for every norm, as a tensor."
            )
    return OwnLaw(given)


def law_of(name: Any) -> Law | None:
    """Return the law with this name: a key of :data:`LAWS`, or ``"band(0.5)"``.

    A function is returned as an :class:`OwnLaw`. For ``"integral"`` the result is None, because
    :class:`Integral` is constructed with the state of the weights that it is applied to.

    >>> law_of("band(0.5)")
    Band(low=0.5)
    """
    name = as_law(name) if callable(name) else name
    if isinstance(name, OwnLaw):
        return name
    band = re.fullmatch(r"band\(((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\)", str(name))
    if band and float(band[1]) <= 1:
        return Band(float(band[1]))
    if name == "integral":
        return None
    if isinstance(name, str) and name in LAWS:
        return LAWS[name]
    known = ", ".join(map(repr, (*LAWS, "band(LOW)", "integral")))
    raise ValueError(
        f"law={name!r} is not known: give one of {known}, or a function of (norm, target, rate). "
        "LOW is a fraction of the target, within [0, 1]."
    )
