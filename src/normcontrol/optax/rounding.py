"""Stochastic rounding of weights in bf16 and fp16, for JAX.

Rounded to nearest, a factor close to one would not change a weight in low precision. Rounded up or
down at random, the factor is right on average. This file knows bits, and nothing about norms.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

DROPPED_BITS = {jnp.dtype(jnp.bfloat16): 16, jnp.dtype(jnp.float16): 13}
"""How many of the 23 mantissa bits of float32 each format does not have. Below 2^-14, fp16 has
fewer: its numbers are the multiples of 2^-24 there."""


def round_to(dtype: Any, theta: jax.Array, count: jax.Array, index: int) -> jax.Array:
    """Convert ``theta`` to ``dtype``, with stochastic rounding for bf16 and fp16.

    The random bits are a function of the update's count, the index of the array and the position
    in it. They are therefore the same after a resume, and for any sharding.
    """
    if dtype not in DROPPED_BITS:
        return theta.astype(dtype)
    theta = theta.astype(jnp.float32)  # float64, if it shares a norm with weights in float64
    dropped = (1 << DROPPED_BITS[dtype]) - 1
    key = jax.random.fold_in(
        jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), count), index
    )
    noise = jax.random.bits(key, theta.shape, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(theta, jnp.uint32) + (noise & dropped)
    rounded = jax.lax.bitcast_convert_type(bits & ~jnp.uint32(dropped), jnp.float32)
    if dtype == jnp.float16:
        small = jnp.abs(theta) < 2.0**-14
        fine = (jnp.where(small, jnp.abs(theta), 0.0) * 2.0**44).astype(jnp.uint32)  # of 2^-44
        multiple = ((fine + (noise & 0xFFFFF)) >> 20).astype(jnp.float32) * 2.0**-24
        rounded = jnp.where(small, jnp.copysign(multiple, theta), rounded)
    # A carry would make a NaN zero.
    return jnp.where(jnp.isnan(theta), theta, rounded).astype(dtype)
