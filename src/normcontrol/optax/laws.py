"""The laws of ``normcontrol.law`` for JAX arrays: by which factor the weights are multiplied.

A law is a function ``(norm, target, rate) -> scale``. It knows nothing about optax, schedules, or
which weights share a norm. To add a law, write a function and add one line to :data:`LAWS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Law = Callable[[jax.Array, jax.Array, Any], jax.Array]


def proportional(norm: jax.Array, target: jax.Array, rate: Any) -> jax.Array:
    """Equation 3 of the paper: ``theta <- theta - k_t (1 - r_t ||theta_0|| / ||theta_t||) theta``.

    >>> print(proportional(jnp.asarray(10.0), jnp.asarray(20.0), 0.5))
    1.5
    """
    return 1 - rate * (1 - target / norm)


def upper_bound(norm: jax.Array, target: jax.Array, rate: Any) -> jax.Array:
    """Reduce a norm that is above its target. A norm below its target does not change."""
    return proportional(norm, jnp.minimum(norm, target), rate)


def lower_bound(norm: jax.Array, target: jax.Array, rate: Any) -> jax.Array:
    """Increase a norm that is below its target. A norm above its target does not change."""
    return proportional(norm, jnp.maximum(norm, target), rate)


def projection(norm: jax.Array, target: jax.Array, rate: Any) -> jax.Array:
    """Set the norm to its target in one step, at any rate above zero. A rate of 0 does nothing."""
    return jnp.where(jnp.asarray(rate) > 0, target / norm, 1.0)


LAWS: dict[str, Law] = {
    "proportional": proportional,
    "upper": upper_bound,
    "lower": lower_bound,
    "projection": projection,
}
"""The laws by the name that ``law=`` takes. Add your own here."""
