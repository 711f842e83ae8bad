"""How many outputs an array of weights has: what a gain is relative to.

In JAX's libraries the *last* axis of a kernel is its output, where torch has the first. An
embedding has one output for each token: its first axis, if it has the name that Flax gives it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

Outputs = Callable[[str, Any], "int | Sequence[int] | None"] | None
"""A function of name and array that returns the axes of its outputs, or None for the rule."""


def is_known(name: str, array: Any, told: Outputs = None) -> bool:
    """Return whether the number of outputs of an array is known."""
    axes = _axes(name, array, told)
    if axes is None:
        return array.ndim >= 2 and array.ndim != 3
    return array.ndim > len(axes)


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
    axes = _axes(name, array, told)
    if axes is None and array.ndim == 3:
        raise ValueError(
            f"params{name} has the shape {array.shape}, of which the outputs cannot be known: give "
            "outputs=, a function of name and array that returns their axes, such as -1 for a "
            "convolution or (1, 2) for a kernel (input, head, output)."
        )
    if axes is None:
        axes = (0 if "embedding" in _own_name(name) else -1,)
    gave = f"outputs gave the axes {axes} for params{name}, whose shape is {array.shape}"
    if any(not -array.ndim <= axis < array.ndim for axis in axes):
        raise ValueError(f"{gave}: it does not have them.")
    places = {axis % array.ndim for axis in axes}
    if len(places) < len(axes):
        raise ValueError(f"{gave}: one of them is named twice.")
    if len(places) == array.ndim:
        raise ValueError(f"{gave}: it would have no inputs. Leave out the axes of its inputs.")
    return math.prod(array.shape[axis] for axis in axes)


def _own_name(name: str) -> str:
    """Return the last key of a path such as ``['tokens']['embedding']`` or ``.tokens.embedding``.

    A box around the array, as of Flax, adds ``.value`` to the path.
    """
    return re.split(r"[\[./]", name.removesuffix(".value"))[-1]


def _axes(name: str, array: Any, told: Outputs) -> tuple[int, ...] | None:
    """Return the axes that the user's function gives, or None for the rule."""
    given = None if told is None else told(name, array)
    if given is None:
        return None
    axes = (given,) if isinstance(given, int) else given
    if isinstance(axes, Sequence) and axes and all(type(a) is int for a in axes):
        return tuple(axes)
    raise ValueError(
        f"outputs gave {given!r} for params{name}: it must return the axis that counts the outputs "
        "of an array, a tuple of axes, or None where the rule holds."
    )
