"""The controller as a gradient transformation: the four lines of the method, for JAX arrays.

JAX arrays cannot be changed in place. The controller therefore changes the updates, so that
``optax.apply_updates`` gives the scaled weights. It knows nothing about the transformations before
it in the chain.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from normcontrol.optax.laws import Law
from normcontrol.optax.outputs import Outputs, is_known, outputs_of
from normcontrol.optax.parts import check_reference, measure, reference, spread, widened
from normcontrol.optax.rounding import round_to
from normcontrol.optax.selection import Mask, Selection, select
from normcontrol.optax.settings import Settings, Value, checked, value_at
from normcontrol.scope import check_axes
from normcontrol.target import RELATIVE


class NormControlState(NamedTuple):
    """The state of :func:`control_norm`: single numbers for a joint norm, else vectors with one
    number for every part."""

    count: jax.Array  # type: ignore[assignment]  # tuples have a method count; optax uses the name
    norm0: jax.Array  # the initial norm, ||theta_0||
    unit: jax.Array  # what the scheduled target is a multiple of: norm0 for a ratio
    norm: jax.Array  # norm, target and scale are those of the last update
    target: jax.Array
    scale: jax.Array


def control_norm(
    ratio: Value | None = None,
    rate: Value = 0.1,
    scope: Any = "global",
    mask: Mask = None,
    *,
    norm: Value | None = None,
    rms: Value | None = None,
    gain: Value | None = None,
    hold: Value | None = None,
    law: str | Law = "proportional",
    order: str = "after",
    outputs: Outputs = None,
) -> optax.GradientTransformation:
    """Steer the norm of the weights to a target that you choose and schedule.

    Put it last in a chain, because a transformation after it would change its updates again.

    Args:
        ratio: the target norm divided by the initial norm, r_t: a number or an optax schedule. The
            paper's is :func:`paper_ratio`.
        rate: the fraction of the distance to the target that each update covers, k_t in [0, 1].
        scope: which weights share a norm: "global" (the paper), "tensor", "row" (axis 0), "col"
            (axis 1), or a tuple of axes. For groups with norms of their own use
            :func:`optax.partition`.
        mask: which arrays are controlled: a tree of bools that matches the params or a prefix of
            them, or a function of the params that returns one. The default is arrays with two or
            more dimensions.
        norm: the target norm itself, in place of a ratio.
        rms: the target root mean square of the weights, in place of a ratio.
        gain: the target norm in units of sqrt(outputs), in place of a ratio. The outputs are the
            last axis of an array, and the tokens of an embedding.
        hold: as ``ratio``, but relative to the norm of gain 0.8 if that is larger. The default
            target is ``hold=1.0``.
        law: "proportional" (the paper), "upper" or "lower" (one-sided bounds), or "projection" (on
            target in one step).
        order: "after" the optimizer's update (Algorithm 1) or "before" it, as optax's own weight
            decay.
        outputs: for a gain, a function of name and array that returns the axes of its outputs, or
            None where the rule holds.

    >>> params = {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.zeros(2)}  # the kernel's norm is 4
    >>> tx = optax.chain(optax.sgd(0.1), control_norm(ratio=1.5, rate=0.5))
    >>> state = tx.init(params)
    >>> grads = jax.tree.map(jnp.zeros_like, params)
    >>> updates, state = tx.update(grads, state, params)
    >>> print(optax.apply_updates(params, updates)["kernel"])     # half of the way from 4 to 6
    [[2.5 2.5]
     [2.5 2.5]]
    """
    targets = {"ratio": ratio, "norm": norm, "rms": rms, "gain": gain, "hold": hold}
    settings = checked(targets, rate, scope, law, order, outputs)

    def init(params: Any) -> NormControlState:
        return _initial_state(settings, select(params, mask))

    def update(
        updates: Any, state: NormControlState, params: Any = None
    ) -> tuple[Any, NormControlState]:
        if params is None:
            raise ValueError(
                "control_norm needs the weights to measure their norm, but update was called "
                "without params: call tx.update(grads, opt_state, params)."
            )
        leaves, tree = jax.tree.flatten(updates)
        shapes, theirs = ([jnp.shape(x) for x in xs] for xs in (leaves, jax.tree.leaves(params)))
        if len(shapes) != len(theirs):
            raise ValueError(
                f"There are {len(shapes)} updates for {len(theirs)} weights: control_norm needs "
                "one for each. Give the gradients of the same params."
            )
        for got, needed in zip(shapes, theirs, strict=True):
            if got != needed:
                raise ValueError(
                    f"An update has the shape {got}, but its weights have the shape {needed}. Give "
                    "the gradients of the same params, in the same structure."
                )
        selected = select(params, mask)
        controlled, state = _controlled(settings, selected, leaves, state)
        for position, move in zip(selected.positions, controlled, strict=True):
            leaves[position] = move
        return jax.tree.unflatten(tree, leaves), state

    return optax.GradientTransformation(init, update)


def _initial_state(settings: Settings, selected: Selection) -> NormControlState:
    scope = settings.scope
    for name, weight in zip(selected.names, selected.arrays, strict=True):
        check_axes(
            scope,
            f"params{name}",
            weight,
            "Leave it out with a mask, or use optax.partition to give it another scope",
        )
    norm0 = measure(selected.arrays, scope)
    if settings.kind in RELATIVE:
        check_reference(norm0, scope, selected.names, selected.arrays)
    outputs = _outputs(settings, selected)
    # Adding 0 makes another array: a buffer that occurs twice in a state cannot be donated.
    unit = reference(settings.kind, norm0, scope, selected.arrays, outputs) + 0
    count = jnp.zeros([], jnp.int32)
    target = (value_at(settings.level, count) * unit).astype(norm0.dtype)
    return NormControlState(count, norm0, unit, norm0 + 0, target, jnp.ones_like(norm0))


def _outputs(settings: Settings, selected: Selection) -> list[int]:
    """Return the number of outputs of every array, if the target refers to them.

    Where nothing but the default asks for a number that cannot be known, it is 0.
    """
    if settings.kind not in ("gain", "hold"):
        return []
    told = settings.outputs
    return [
        outputs_of(name, array, told)
        if settings.kind == "gain" or is_known(name, array, told)
        else 0  # not NaN, which jax_debug_nans would refuse
        for name, array in zip(selected.names, selected.arrays, strict=True)
    ]


def _controlled(
    settings: Settings, selected: Selection, leaves: list[Any], state: NormControlState
) -> tuple[list[jax.Array], NormControlState]:
    """Return the controlled updates of the selected arrays, and the new state."""
    kind, level, rate, scope, law, order, _ = settings
    weights, count = selected.arrays, state.count
    moves = [widened(leaves[i]) for i in selected.positions]
    thetas = [widened(weight) for weight in weights]
    if order == "after":
        thetas = [theta + move for theta, move in zip(thetas, moves, strict=True)]

    norm = measure(thetas, scope)  #                          ||theta_t||
    _check_state(state, norm)
    target = value_at(level, count) * state.unit  #           r_t ||theta_0||
    scale = law(norm, target, value_at(rate, count))  #       1 - k_t (1 - target / norm)
    scale = _one_where_undefined(scale, norm, state.norm0 if kind in RELATIVE else norm)
    # A number in float64 must not change the dtypes of the state, which lax.scan compares.
    target, scale = target.astype(norm.dtype), scale.astype(norm.dtype)
    factors = spread(scale, scope, weights)  #                theta_t <- scale * theta_t
    thetas = [factor * theta for factor, theta in zip(factors, thetas, strict=True)]

    if order == "before":
        thetas = [theta + move for theta, move in zip(thetas, moves, strict=True)]
    # In low precision the difference is exact, by Sterbenz's lemma: apply_updates does not round.
    changes = [
        round_to(weight.dtype, theta, count, index) - weight
        for index, weight, theta in zip(selected.positions, weights, thetas, strict=True)
    ]
    count = optax.safe_int32_increment(count)
    return changes, state._replace(count=count, norm=scale * norm, target=target, scale=scale)


def _check_state(state: NormControlState, norm: jax.Array) -> None:
    """Raise an error if the state was made for other weights or another scope."""
    if norm.shape != state.norm0.shape:
        raise ValueError(
            f"The state has reference norms of shape {state.norm0.shape}, but {norm.shape} is "
            "needed: it was made for other params, another mask or another scope. Use the same "
            "ones, or call init again."
        )


def _one_where_undefined(scale: jax.Array, norm: jax.Array, initial: jax.Array) -> jax.Array:
    """Return the scale, and 1 where the norm or the initial norm is zero or not finite.

    Such weights have no direction to be scaled along, or no ratio, and stay as they are. One NaN
    therefore does not spread to other weights that share the norm.
    """
    return jnp.where(
        (norm > 0) & jnp.isfinite(norm) & (initial > 0) & jnp.isfinite(scale), scale, 1.0
    )
