"""Parts: the norms of a scope, and how one number for every part is applied to the arrays.

The scopes are those of ``normcontrol.scope``: one joint norm, one for each array, or one for each
index of some axes. This file knows arrays, and nothing about targets, laws or schedules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from normcontrol.scope import Scope
from normcontrol.target import HELD_GAIN


def widened(array: Any) -> jax.Array:
    """Return the array in float32, or in its own dtype if that is wider."""
    return jnp.asarray(array).astype(jnp.promote_types(jnp.result_type(array), jnp.float32))


def measure(weights: Sequence[Any], scope: Scope) -> jax.Array:
    """Return the controlled norms: one number for a joint scope, else a vector with one for every
    part. Under ``jit`` the compiler sums sharded arrays over their devices.

    >>> from normcontrol.scope import parse_scope
    >>> print(measure([jnp.asarray([[3.0, 4.0], [6.0, 8.0]])], parse_scope("row")))
    [ 5. 10.]
    """
    squares = [
        jnp.sum(jnp.square(jnp.abs(widened(w))), axis=_summed(w, scope)).ravel() for w in weights
    ]
    together = jnp.concatenate(squares) if squares else jnp.zeros(0)
    return jnp.sqrt(jnp.sum(together) if scope.joint else together)


def spread(scale: jax.Array, scope: Scope, weights: Sequence[Any]) -> list[jax.Array]:
    """Return the factors of every array, in a shape that broadcasts over the array."""
    if scope.joint:
        return [scale] * len(weights)
    factors, start = [], 0
    for size, weight in zip(scope.sizes(weights), weights, strict=True):
        shape = [1 if axis in _summed(weight, scope) else n for axis, n in enumerate(weight.shape)]
        factors.append(scale[start : start + size].reshape(shape))
        start += size
    return factors


def reference(
    kind: str, norm0: jax.Array, scope: Scope, weights: Sequence[Any], outputs: Sequence[int]
) -> jax.Array:
    """Return the norm that the scheduled number multiplies.

    For a ratio it is the initial norm, for a norm 1, for an rms or a gain the norm of weights of
    rms 1 or gain 1. For the default, hold, it is the initial norm, or the norm of gain 0.8 if that
    is larger.

    ``weights`` are the initial weights, and ``outputs`` the numbers of outputs of the arrays, for a
    gain and for hold; 0 if unknown. For hold, the outputs of arrays that start at zero do not count
    in a joint norm: an adapter's factor that starts at zero must not raise the norm of the other
    factor.
    """
    if kind == "ratio":
        return norm0
    if kind == "hold":
        if scope.joint and weights:
            counted = jnp.stack([jnp.any(w != 0) for w in weights])
            numbers = jnp.asarray(outputs, norm0.dtype)
            total = jnp.sum(jnp.where(counted, numbers, 0))
            gain = jnp.where(jnp.any(counted & (numbers == 0)), 0, jnp.sqrt(total))
        else:
            gain = reference("gain", norm0, scope, weights, outputs)
        return jnp.fmax(norm0, HELD_GAIN * gain)
    if kind == "norm":
        return jnp.ones_like(norm0)
    amounts = outputs if kind == "gain" else [w.size for w in weights]
    if scope.joint:
        return jnp.full_like(norm0, math.sqrt(sum(amounts)))
    return jnp.asarray(
        [
            math.sqrt(amount / n)
            for n, amount in zip(scope.sizes(weights), amounts, strict=True)
            for _ in range(n)
        ],
        norm0.dtype,
    )


def check_reference(
    norm0: jax.Array, scope: Scope, names: list[str], weights: Sequence[Any]
) -> None:
    """Raise an error if an initial norm is zero. Under ``jit`` the norms are not known, and nothing
    is checked."""
    if isinstance(norm0, jax.core.Tracer) or not names or bool(jnp.all(norm0 > 0)):
        return
    least = [float(jnp.min(factor)) for factor in spread(norm0, scope, weights)]
    name = next(name for name, value in zip(names, least, strict=True) if not value > 0)
    which = "The controlled weights have" if scope.joint else f"params{name} has"
    what = "NaN" if bool(jnp.any(jnp.isnan(norm0))) else "zero"
    raise ValueError(
        f"{which} an initial norm of {what} in scope={scope.name!r}, so a ratio to it is not "
        "defined. Give an absolute target (norm=, rms= or gain=), or leave it out with a mask."
    )


def _summed(weight: Any, scope: Scope) -> tuple[int, ...]:
    """Return the axes that a norm is taken over."""
    part_axes = {axis % weight.ndim for axis in scope.axes or ()}
    return tuple(axis for axis in range(weight.ndim) if axis not in part_axes)
