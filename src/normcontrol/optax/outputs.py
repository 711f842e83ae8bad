"""How many outputs an array of weights has: what a gain is relative to.

In JAX's libraries the *last* axis of a kernel is its output, where torch has the first. An
embedding has one output for each token: its first axis, if it has the name that Flax gives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Outputs = Callable[[str, Any], "int | Sequence[int] | None"] | None
"""A function of name and array that returns the axes of its outputs, or None for the rule."""


def is_known(name: str, array: Any, told: Outputs = None) -> bool:
    """Return whether the number of outputs of an array is known."""
    return array.ndim >= 2 and (
        array.ndim != 3 or (told is not None and told(name, array) is not None)
    )


def outputs_of(name: str, array: Any, told: Outputs = None) -> int:
    """Return the number of outputs of an array.

    >>> import jax.numpy as jnp
    >>> outputs_of("['head']['kernel']", jnp.ones((8, 50)))
    50
    >>> outputs_of("['tokens']['embedding']", jnp.ones((100, 8)))
    100
    """
    if array.ndim < 2:
        raise ValueError(
            f"A gain is the norm of a matrix in units of sqrt(outputs), but params{name} has the "
            f"shape {array.shape}: it has no inputs. Leave it out with a mask, or give it a norm= "
            "or rms= with optax.partition."
        )
    axes = None if told is None else told(name, array)
    if axes is None and array.ndim == 3:
        raise ValueError(
            f"params{name} has the shape {array.shape}, of which the outputs cannot be known: give "
            "outputs=, a function of name and array that returns their axes, such as -1 for a "
            "convolution or (1, 2) for a kernel (input, head, output)."
        )
    if axes is None:
        axes = 0 if "embedding" in name.rpartition("[")[2] else -1
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    if any(not -array.ndim <= axis < array.ndim for axis in axes):
        raise ValueError(
            f"outputs gave the axes {axes} for params{name}, whose shape is {array.shape}."
        )
    return math.prod(array.shape[axis] for axis in axes)
