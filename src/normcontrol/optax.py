"""Weight norm control for JAX: a gradient transformation for the end of an optax chain, and AdamWN
made with it.

The same method as in the rest of the package, which is for torch; the four lines are in
:func:`control_norm`. Everything is a pure function of arrays, so that jit, sharding and checkpoints
need no help from here. Needs the extra ``jax``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from normcontrol.schedule import Schedule
from normcontrol.scope import Scope, check_axes, parse_scope
from normcontrol.warn import warn_once

try:
    import jax
    import jax.numpy as jnp
    import optax
except ImportError as missing:
    raise ImportError(
        f"normcontrol.optax needs jax and optax, and {missing.name} is not installed: pip install "
        "'normcontrol[jax]'."
    ) from missing

OLDEST_OPTAX = (0, 2, 5)
if tuple(map(int, optax.__version__.split(".")[:3])) < OLDEST_OPTAX:
    raise ImportError(
        f"normcontrol.optax is tested with optax {'.'.join(map(str, OLDEST_OPTAX))} and newer, but "
        f"this is {optax.__version__}: "
        "pip install -U optax."
    )

Value = float | jax.Array | Callable[[Any], Any]
"""What a ratio, a rate or a target may be given as: a number, or an optax schedule, which counts
updates from 0."""

Mask = Any | Callable[[Any], Any] | None

DROPPED_BITS = {jnp.dtype(jnp.bfloat16): 16, jnp.dtype(jnp.float16): 13}
"""How many of float32's 23 mantissa bits the format does not have."""


class NormControlState(NamedTuple):
    """What :func:`control_norm` keeps: one number for a joint norm, else a vector with one for
    every part."""

    count: jax.Array  # type: ignore[assignment]  # a tuple has a method of that name, and optax the habit
    norm0: jax.Array  # the reference, ||theta_0||
    norm: jax.Array  # the rest is what the last update saw and did
    target: jax.Array
    scale: jax.Array


class Reading(NamedTuple):
    """What a controller saw and did at its last update."""

    norm: jax.Array
    target: jax.Array
    ratio: jax.Array
    scale: jax.Array


def proportional(norm: jax.Array, target: jax.Array, rate: Any) -> jax.Array:
    """Equation 3 of the paper: ``theta <- theta - k_t (1 - r_t ||theta_0|| / ||theta_t||)
    theta``."""
    return 1 - rate * (1 - target / norm)


LAWS: dict[str, Callable[[jax.Array, jax.Array, Any], jax.Array]] = {
    "proportional": proportional,
    "upper": lambda norm, target, rate: proportional(norm, jnp.minimum(norm, target), rate),
    "lower": lambda norm, target, rate: proportional(norm, jnp.maximum(norm, target), rate),
    "projection": lambda norm, target, rate: target / norm,
}


def paper_ratio(count: Any) -> Any:
    """The default ratio, the paper's Figure 1: the norm doubles over 2,500 steps, of which the
    first is step 1."""
    return 1 + jnp.minimum((count + 1) / 2500, 1)


def control_norm(
    ratio: Value | None = None,
    rate: Value = 1e-2,
    scope: Any = "global",
    mask: Mask = None,
    *,
    norm: Value | None = None,
    rms: Value | None = None,
    law: str = "proportional",
    order: str = "after",
) -> optax.GradientTransformation:
    """Holds the norm of the weights at a value you choose and schedule. The last link of a chain.

    It sees the weights as the updates before it would leave them, and changes the updates so that
    the weights end up where the controller wants them: nothing may come after it that changes
    updates.

    Args: ratio: the target norm as a multiple of the initial norm, r_t: a number or an optax
        schedule. The default is the
            paper's: from 1 to 2 over 2,500 steps, then constant.
        rate: how much of the way to the target each update goes, k_t in [0, 1]. scope: which
        weights share a norm: "global" (the paper), "tensor", "row" (axis 0), "col" (axis 1), or a
        tuple of axes.
            For groups with norms of their own use :func:`optax.partition`.
        mask: who is controlled: a tree of bools that fits the params or a prefix of them, or a
            function of the params that gives one. By default arrays with two or more dimensions
            are.
        norm: the target norm itself, in place of a ratio. rms: the target root-mean-square of the
        weights, in place of a ratio. law: "proportional" (the paper), "upper" or "lower" (one-sided
        bounds), or "projection" (on target at once). order: "after" the optimizer's update
        (Algorithm 1) or "before" it, as optax's own weight decay.

    >>> params = {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.zeros(2)}     # the kernel's norm is 4
    >>> tx = optax.chain(optax.sgd(0.1), control_norm(ratio=1.5, rate=0.5))
    >>> state = tx.init(params)
    >>> grads = jax.tree.map(jnp.zeros_like, params)
    >>> updates, state = tx.update(grads, state, params)
    >>> print(optax.apply_updates(params, updates)["kernel"])     # half of the way from 4 to 6
    [[2.5 2.5]
     [2.5 2.5]]
    """
    given = {"ratio": ratio, "norm": norm, "rms": rms}
    chosen = {name: value for name, value in given.items() if value is not None} or {
        "ratio": paper_ratio
    }
    if len(chosen) > 1:
        raise ValueError(
            f"{' and '.join(chosen)} were both given, but weights have one target: give one of "
            "them."
        )
    ((kind, level),) = chosen.items()
    _check_value(
        kind, level, 0.0, 1e300, "a norm cannot be negative, infinite or NaN. Give 0 or more."
    )
    why = (
        "a rate outside [0, 1] overshoots the target (from 2 on it diverges) or runs away from "
        "it. Give a rate within [0, 1]."
    )
    _check_value("rate", rate, 0.0, 1.0, why)
    if law not in LAWS:
        raise ValueError(f"law={law!r} is not known: give one of {', '.join(map(repr, LAWS))}.")
    if order not in ("after", "before"):
        raise ValueError(
            f"order={order!r} is not known: give 'after' (Algorithm 1) or 'before' (as optax's own "
            "weight decay)."
        )
    if scope == "group":
        raise ValueError(
            "scope='group': optax has no parameter groups. Give each label of optax.partition a "
            "control_norm of its own."
        )
    parts = parse_scope(scope)

    def init(params: Any) -> NormControlState:
        names, weights, _ = _controlled(params, mask)
        for name, weight in zip(names, weights, strict=True):
            check_axes(
                parts,
                f"params{name}",
                weight,
                "Leave it out with a mask, or use optax.partition to give it another scope",
            )
        norm0 = _measure(weights, parts)
        if kind == "ratio":
            _check_reference(norm0, parts, names, weights)
        target = _at(level, 0) * _reference(kind, norm0, parts, weights)
        return NormControlState(
            jnp.zeros([], jnp.int32), norm0, norm0 + 0, target, jnp.ones_like(norm0)
        )

    def update(
        updates: Any, state: NormControlState, params: Any = None
    ) -> tuple[Any, NormControlState]:
        if params is None:
            raise ValueError(
                "control_norm needs the weights to know their norm, but update was called without "
                "params: call "
                "tx.update(grads, opt_state, params)."
            )
        _, weights, where = _controlled(params, mask)
        leaves, tree = jax.tree.flatten(updates)
        if len(leaves) != len(jax.tree.leaves(params)):
            raise ValueError(
                f"There are {len(leaves)} updates for {len(jax.tree.leaves(params))} weights: "
                "control_norm needs one for each. Give the "
                "gradients of the params that update gets."
            )
        moves = [_wide(leaves[i]) for i in where]
        before = [_wide(weight) for weight in weights]
        after = [theta + move for theta, move in zip(before, moves, strict=True)]

        norm = _measure(
            after if order == "after" else before, parts
        )  #                    ||theta_t||
        if norm.shape != state.norm0.shape:
            raise ValueError(
                f"The state holds reference norms of shape {state.norm0.shape}, but {norm.shape} "
                "is needed: it belongs to other params, or "
                "to another mask or scope. Use those it was made with, or init anew."
            )
        target = _at(level, state.count) * _reference(
            kind, state.norm0, parts, weights
        )  # r_t ||theta_0||
        scale = LAWS[law](
            norm, target, _at(rate, state.count)
        )  #                          1 - k_t (1 - r_t ||theta_0|| / ||theta_t||)
        scale = _where_there_is_a_norm(scale, norm, state.norm0 if kind == "ratio" else norm)
        factors = _spread(scale, parts, weights)
        if (
            order == "after"
        ):  #                                                             theta_t <- scale * theta_t
            scaled = [factor * theta for factor, theta in zip(factors, after, strict=True)]
        else:
            scaled = [
                factor * theta + move
                for factor, theta, move in zip(factors, before, moves, strict=True)
            ]

        for index, weight, theta in zip(where, weights, scaled, strict=True):
            leaves[index] = (
                _round(theta, weight.dtype, state.count, index) - weight
            )  # low precision: exact, by Sterbenz's lemma
        seen = NormControlState(
            optax.safe_int32_increment(state.count), state.norm0, scale * norm, target, scale
        )
        return jax.tree.unflatten(tree, leaves), seen

    return optax.GradientTransformation(init, update)


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
    rate: Value = 1e-2,
    scope: Any = "global",
    law: str = "proportional",
    order: str = "after",
) -> optax.GradientTransformationExtraArgs:
    """AdamW with weight norm control in place of weight decay (Algorithm 1, line 13.c).

    Takes every argument of :func:`optax.adamw` and every setting of :func:`control_norm`. It never
    decays: what ``mask`` had decayed is controlled, and the value of ``weight_decay`` is not used.

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
    _refuse_torch("learning_rate", learning_rate)
    if isinstance(weight_decay, (int, float)) and weight_decay not in (0, 1e-4):
        warn_once(
            "decay in optax",
            f"adamwn does not decay: the value of weight_decay={weight_decay:g} is not used, and "
            "mask says who is controlled. The norm is "
            "set by ratio= and rate=.",
        )
    tx = optax.chain(
        optax.scale_by_adam(
            b1=b1, b2=b2, eps=eps, eps_root=eps_root, mu_dtype=mu_dtype, nesterov=nesterov
        ),
        optax.scale_by_learning_rate(learning_rate),
        control_norm(ratio, rate, scope, mask, norm=norm, rms=rms, law=law, order=order),
    )

    def init(params: Any) -> Any:
        _refuse_torch_weights(params)  # before Adam meets them, which has no words for it
        return tx.init(params)

    return optax.GradientTransformationExtraArgs(init, tx.update)


def norms(opt_state: Any) -> list[Reading]:
    """The norm, target, ratio to the initial norm and last factor of every controller in an
    optimizer state.

    All of it was computed in the last update. One reading for each ``control_norm`` in the chain;
    its fields are numbers where the norm is joint, and else vectors in the order of
    ``jax.tree.leaves`` of what is controlled. Works within jit.

    >>> state = control_norm(ratio=2.0).init(jnp.ones((3, 3)))
    >>> [(float(reading.norm), float(reading.target)) for reading in norms(state)]
    [(3.0, 6.0)]
    """
    found = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, NormControlState))
    states = [state for state in found if isinstance(state, NormControlState)]
    if not states:
        raise ValueError(
            "No norm is controlled in this optimizer state: norms wants the state that init or "
            "update of a chain with control_norm gave."
        )
    return [Reading(s.norm, s.target, s.norm / s.norm0, s.scale) for s in states]


def _controlled(params: Any, mask: Mask) -> tuple[list[str], list[jax.Array], list[int]]:
    """Names, arrays and positions among all leaves of what is controlled."""
    found, _ = jax.tree_util.tree_flatten_with_path(params)
    _refuse_torch_weights(params)
    if not found:
        if any(
            isinstance(x, optax.MaskedNode)
            for x in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
        ):
            raise ValueError(
                "Nothing would be controlled: a mask or partition around control_norm leaves it no "
                "weights. Mend it or remove it."
            )
        return [], [], []
    marks = (
        [_is_matrix(leaf) for _, leaf in found]
        if mask is None
        else _marks(mask(params) if callable(mask) else mask, params)
    )
    where = [
        i
        for i, (marked, (_, leaf)) in enumerate(zip(marks, found, strict=True))
        if marked and jnp.size(leaf)
    ]
    if not where:
        rule = (
            "no array has two or more dimensions. Give a mask that says which"
            if mask is None
            else "the mask selects no array. Mend it"
        )
        raise ValueError(
            f"Nothing would be controlled: of {len(found)} arrays, {rule}, such as {{'layer': "
            "True, 'norm': False}}."
        )
    return (
        [jax.tree_util.keystr(found[i][0]) for i in where],
        [jnp.asarray(found[i][1]) for i in where],
        where,
    )


def _is_matrix(leaf: Any) -> bool:
    return jnp.ndim(leaf) >= 2 and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _marks(mask: Any, params: Any) -> list[bool]:
    try:
        whole = jax.tree.map(lambda mark, below: jax.tree.map(lambda _: mark, below), mask, params)
        marks = jax.tree.leaves(whole)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "The mask does not fit the params: it must be a tree of bools like them, or a prefix "
            f"of it. {error}"
        ) from error
    for mark in marks:
        if not isinstance(mark, (bool, jnp.bool_)):
            raise TypeError(
                f"The mask holds {mark!r}: give True for what is controlled and False for what is "
                "left alone."
            )
    return marks


def _measure(weights: Sequence[Any], scope: Scope) -> jax.Array:
    """The norms under control. Under jit, sharded arrays are summed over their devices by the
    compiler."""
    squares = [
        jnp.sum(jnp.square(jnp.abs(_wide(w))), axis=_summed(w, scope)).ravel() for w in weights
    ]
    together = jnp.concatenate(squares) if squares else jnp.zeros(0)
    return jnp.sqrt(jnp.sum(together) if scope.joint else together)


def _spread(scale: jax.Array, scope: Scope, weights: Sequence[Any]) -> list[jax.Array]:
    """The factor of every array, shaped so that it multiplies the parts it belongs to."""
    if scope.joint:
        return [scale] * len(weights)
    factors, start = [], 0
    for size, weight in zip(scope.sizes(weights), weights, strict=True):
        shape = [1 if axis in _summed(weight, scope) else n for axis, n in enumerate(weight.shape)]
        factors.append(scale[start : start + size].reshape(shape))
        start += size
    return factors


def _summed(weight: Any, scope: Scope) -> tuple[int, ...]:
    kept = {axis % weight.ndim for axis in scope.axes or ()}
    return tuple(axis for axis in range(weight.ndim) if axis not in kept)


def _reference(kind: str, norm0: jax.Array, scope: Scope, weights: Sequence[Any]) -> jax.Array:
    """What the scheduled number is a multiple of: the initial norm, 1, or the norm of weights of
    rms 1."""
    if kind == "ratio":
        return norm0
    if kind == "norm":
        return jnp.ones_like(norm0)
    if scope.joint:
        return jnp.full_like(norm0, math.sqrt(sum(w.size for w in weights)))
    return jnp.asarray(
        [
            math.sqrt(w.size / n)
            for n, w in zip(scope.sizes(weights), weights, strict=True)
            for _ in range(n)
        ],
        norm0.dtype,
    )


def _where_there_is_a_norm(scale: jax.Array, norm: jax.Array, reference: jax.Array) -> jax.Array:
    """A norm that is zero or not finite has no direction to be scaled along, and zero has no
    multiples: leave them alone."""
    return jnp.where(
        (norm > 0) & jnp.isfinite(norm) & (reference > 0) & jnp.isfinite(scale), scale, 1.0
    )


def _round(theta: jax.Array, dtype: Any, count: jax.Array, index: int) -> jax.Array:
    """To the weights' dtype; bf16 and fp16 up or down at random, so that factors near one change
    them on average.

    The random bits are a function of the count, the array and the position: the same after a
    resume, on any sharding.
    """
    if dtype not in DROPPED_BITS:
        return theta.astype(dtype)
    dropped = (1 << DROPPED_BITS[dtype]) - 1
    key = jax.random.fold_in(
        jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), count), index
    )
    bits = jax.lax.bitcast_convert_type(theta, jnp.uint32) + (
        jax.random.bits(key, theta.shape, jnp.uint32) & dropped
    )
    return jax.lax.bitcast_convert_type(bits & ~jnp.uint32(dropped), jnp.float32).astype(dtype)


def _wide(array: Any) -> jax.Array:
    return jnp.asarray(array).astype(jnp.promote_types(jnp.result_type(array), jnp.float32))


def _at(value: Value, count: Any) -> Any:
    return value(count) if callable(value) else value


def _check_value(name: str, value: Any, low: float, high: float, why: str) -> None:
    """Refuse what can be seen to be wrong before training; a schedule is looked at here and
    there."""
    _refuse_torch(name, value)
    for count in (0, *(10**power for power in range(7))) if callable(value) else (0,):
        number = _at(value, count)
        if isinstance(number, jax.core.Tracer):
            return
        if not low <= float(number) <= high:
            when = f" at count {count}" if callable(value) else ""
            raise ValueError(f"{name} takes the value {float(number):g}{when}: {why}")


def _check_reference(
    norm0: jax.Array, scope: Scope, names: list[str], weights: Sequence[Any]
) -> None:
    """Refuse a ratio to an initial norm of zero, where it can be seen: not within jit."""
    if isinstance(norm0, jax.core.Tracer) or not names or bool(jnp.all(norm0 > 0)):
        return
    zeros = [float(jnp.min(factor)) for factor in _spread(norm0, scope, weights)]
    name = next(name for name, least in zip(names, zeros, strict=True) if not least > 0)
    whose = "The controlled weights have" if scope.joint else f"params{name} has"
    raise ValueError(
        f"{whose} an initial norm of zero in scope={scope.name!r}, so no ratio to it can be held. "
        "Give an absolute target (norm= or rms=), "
        "or leave it out with a mask."
    )


def _refuse_torch(name: str, value: Any) -> None:
    if isinstance(value, Schedule):
        raise TypeError(
            f"{name}={value!r} is a schedule for torch, and this is JAX: give an optax schedule, "
            "such as "
            "optax.linear_schedule(1.0, 2.0, 2500)."
        )
    if isinstance(value, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)):
        raise TypeError(
            f"{name} is a torch {type(value).__name__}, and normcontrol.optax is for JAX: give JAX "
            "arrays, or use normcontrol.AdamWN and "
            "normcontrol.NormControl, which are for torch."
        )


def _refuse_torch_weights(params: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        _refuse_torch(f"params{jax.tree_util.keystr(path)}", leaf)
