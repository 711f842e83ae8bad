"""Readings: norm, target, ratio and scale of the last update, taken from an optimizer state.

It reads the state that :func:`control_norm` stored. It computes no norms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from normcontrol.optax.control import NormControlState


class Reading(NamedTuple):
    """The numbers of one controller at its last update."""

    norm: jax.Array
    target: jax.Array
    ratio: jax.Array  # norm divided by the initial norm
    scale: jax.Array


def norms(opt_state: Any) -> list[Reading]:
    """Return the norm, target, ratio and scale of every controller in an optimizer state.

    There is one reading for each ``control_norm`` of the chain. Its fields are numbers for a joint
    norm, else vectors in the order of ``jax.tree.leaves`` of the controlled arrays. All of them
    were computed in the last update. Works inside ``jit``.

    >>> import jax.numpy as jnp
    >>> from normcontrol.optax import control_norm
    >>> state = control_norm(ratio=2.0).init(jnp.ones((3, 3)))
    >>> [(float(reading.norm), float(reading.target)) for reading in norms(state)]
    [(3.0, 6.0)]
    """
    found = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, NormControlState))
    states = [state for state in found if isinstance(state, NormControlState)]
    if not states:
        raise ValueError(
            "No norm is controlled in this optimizer state: give the state that init or update of "
            "a chain with control_norm returned."
        )
    # In the state of flax's nnx.Optimizer they are variables, which cannot be formatted.
    arrays = [NormControlState(*map(jnp.asarray, s)) for s in states]
    return [Reading(s.norm, s.target, s.norm / s.norm0, s.scale) for s in arrays]
