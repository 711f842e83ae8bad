"""Selection: which arrays of the params are controlled.

By default these are arrays with two or more dimensions; a mask replaces that rule. This file knows
trees and masks, and nothing about norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from normcontrol.optax.no_torch import refuse_torch_weights

Mask = Any | Callable[[Any], Any] | None
"""A tree of bools that matches the params or a prefix of them, a function of the params that
returns one, or None for the default rule."""


class Selection(NamedTuple):
    """The controlled arrays."""

    names: list[str]
    arrays: list[jax.Array]
    positions: list[int]  # among all leaves of the params


def select(params: Any, mask: Mask) -> Selection:
    """Return the arrays that the mask selects. Raise an error if there are none."""
    refuse_torch_weights(params)
    found, _ = jax.tree_util.tree_flatten_with_path(params)
    if not found:
        _refuse_if_all_are_masked(params)
        return Selection([], [], [])
    if mask is None:
        marks = [_is_matrix(leaf) for _, leaf in found]
    else:
        marks = _marks(mask(params) if callable(mask) else mask, params)
    positions = [
        i
        for i, (marked, (_, leaf)) in enumerate(zip(marks, found, strict=True))
        if marked and jnp.size(leaf) and _is_inexact(leaf)
    ]
    if not positions:
        reason = (
            "none has two or more dimensions. Give a mask that selects some"
            if mask is None
            else "the mask selects none. Correct it"
        )
        raise ValueError(
            f"Nothing would be controlled: of {len(found)} arrays, {reason}, such as "
            "{'layer': True, 'norm': False}."
        )
    return Selection(
        [jax.tree_util.keystr(found[i][0]) for i in positions],
        [jnp.asarray(found[i][1]) for i in positions],
        positions,
    )


def _refuse_if_all_are_masked(params: Any) -> None:
    """Raise an error if ``params`` has no leaves because optax.masked or optax.partition replaced
    all of them."""
    nodes = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    if any(isinstance(x, optax.MaskedNode) for x in nodes):
        raise ValueError(
            "Nothing would be controlled: a mask or partition around control_norm leaves it no "
            "weights. Correct it or remove it."
        )


def _is_matrix(leaf: Any) -> bool:
    return jnp.ndim(leaf) >= 2 and _is_inexact(leaf)


def _is_inexact(leaf: Any) -> bool:
    """Return whether an array can be scaled: counters of whole numbers cannot."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _marks(mask: Any, params: Any) -> list[bool]:
    """Return the mask's value for every leaf of ``params``."""
    try:
        whole = jax.tree.map(lambda mark, below: jax.tree.map(lambda _: mark, below), mask, params)
        marks = jax.tree.leaves(whole)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "The mask does not match the params: it must be a tree of bools with their structure, "
            f"or a prefix of it. {error}"
        ) from error
    for mark in marks:
        if not isinstance(mark, (bool, jnp.bool_)):
            raise TypeError(
                f"The mask contains {mark!r}: give True for arrays that are controlled and False "
                "for the others."
            )
    return marks
