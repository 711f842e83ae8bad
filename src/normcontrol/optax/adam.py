"""AdamWN for JAX: ``optax.adamw`` with weight norm control in place of weight decay.

A chain of optax's Adam, the learning rate, and :func:`control_norm`, which contains the method.
"""

from __future__ import annotations

from typing import Any

import optax

from normcontrol.optax.control import control_norm
from normcontrol.optax.laws import Law
from normcontrol.optax.no_torch import refuse_torch, refuse_torch_weights
from normcontrol.optax.outputs import Outputs
from normcontrol.optax.selection import Mask
from normcontrol.optax.settings import Value
from normcontrol.warn import warn_once


def adamwn(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any | None = None,
    weight_decay: Any = 1e-4,
    mask: Mask = None,
    *,
    nesterov: bool = False,
    ratio: Value | None = None,
    norm: Value | None = None,
    rms: Value | None = None,
    gain: Value | None = None,
    hold: Value | None = None,
    rate: Value = 0.1,
    scope: Any = "global",
    law: str | Law = "proportional",
    order: str = "after",
    outputs: Outputs = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with weight norm control in place of weight decay (Algorithm 1, line 13.c).

    Takes every argument of :func:`optax.adamw` and every setting of :func:`control_norm`. It never
    decays: the arrays that ``mask`` selects are controlled, and the value of ``weight_decay`` is
    not used.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from normcontrol.optax import norms
    >>> params = {"kernel": jnp.ones((4, 4)), "bias": jnp.zeros(4)}
    >>> tx = adamwn(1e-3, ratio=optax.linear_schedule(1.0, 2.0, 100), rate=0.1)
    >>> state = tx.init(params)
    >>> @jax.jit
    ... def step(params, state, grads):
    ...     updates, state = tx.update(grads, state, params)
    ...     return optax.apply_updates(params, updates), state
    >>> for _ in range(200):
    ...     params, state = step(params, state, grads=params)
    >>> print(norms(state)[0].ratio.round(1))
    2.0
    """
    refuse_torch("learning_rate", learning_rate)
    if isinstance(weight_decay, (int, float)) and weight_decay not in (0, 1e-4):
        warn_once(
            "decay in optax",
            f"adamwn does not decay: the value of weight_decay={weight_decay:g} is not used, and "
            "mask says which arrays are controlled. The norm is set by gain=, ratio=, "
            "norm= or rms=; without one of them it is held.",
        )
    tx = optax.chain(
        optax.scale_by_adam(
            b1=b1, b2=b2, eps=eps, eps_root=eps_root, mu_dtype=mu_dtype, nesterov=nesterov
        ),
        optax.scale_by_learning_rate(learning_rate),
        control_norm(
            ratio,
            rate,
            scope,
            mask,
            norm=norm,
            rms=rms,
            gain=gain,
            hold=hold,
            law=law,
            order=order,
            outputs=outputs,
        ),
    )

    def init(params: Any) -> Any:
        refuse_torch_weights(params)  # before Adam's own init, whose error would not say why
        return tx.init(params)

    return optax.GradientTransformationExtraArgs(init, tx.update)
