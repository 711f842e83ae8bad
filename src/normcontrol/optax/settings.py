"""The settings of :func:`control_norm` and their checks.

Settings are checked when the transformation is constructed, because a compiled update cannot raise
an error. This file knows nothing about weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from normcontrol.numbers import takes_a_number
from normcontrol.optax.laws import LAWS, Law
from normcontrol.optax.no_torch import refuse_torch
from normcontrol.optax.outputs import Outputs
from normcontrol.scope import Scope, parse_scope

Value = float | jax.Array | Callable[[Any], Any]
"""The type of a ratio, a rate or an absolute target: a number, or an optax schedule, which is a
function of the number of updates before this one."""


class Settings(NamedTuple):
    """The checked settings of one transformation."""

    kind: str  # how the target is given: "ratio", "norm", "rms", "gain" or "hold"
    level: Value
    rate: Value
    scope: Scope
    law: Law
    order: str
    outputs: Outputs


def paper_ratio(count: Any) -> Any:
    """The paper's Figure 1 and best run: the norm doubles over 2,500 steps, then stays.

    ``count`` is the number of updates before this one, so that ``count + 1`` is the paper's step.
    """
    return 1 + jnp.minimum((count + 1) / 2500, 1)


def checked(
    targets: dict[str, Value | None],
    rate: Value,
    scope: Any,
    law: str | Law,
    order: str,
    outputs: Outputs,
) -> Settings:
    """Return the :class:`Settings`, or raise an error that says what is wrong with them.

    ``targets`` has a key for every kind of target. At most one of them may have a value.
    """
    given = {kind: level for kind, level in targets.items() if level is not None}
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} were both given, but weights have one target: give one of them."
        )
    ((kind, level),) = (given or {"hold": 1.0}).items()
    check_range(
        kind, level, 0.0, 1e300, "a norm cannot be negative, infinite or NaN. Give 0 or more."
    )
    why = (
        "a rate outside [0, 1] overshoots the target (at 2 or more it diverges) or moves away from "
        "it. Give a rate within [0, 1]."
    )
    check_range("rate", rate, 0.0, 1.0, why)
    applied = law_of(law)
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
    if outputs is not None and not callable(outputs):
        raise TypeError(
            f"outputs={outputs!r} is no function: give one of name and array that returns the axes "
            "of its outputs, such as lambda name, array: 0."
        )
    return Settings(kind, level, rate, parse_scope(scope), applied, order, outputs)


def law_of(law: str | Law) -> Law:
    """Return the law with this name, or a function that returns a scale for every norm."""
    if not callable(law):
        if law not in LAWS:
            raise ValueError(
                f"law={law!r} is not known: give one of {', '.join(map(repr, LAWS))}, or a "
                "function of (norm, target, rate)."
            )
        return LAWS[law]
    if getattr(law, "__module__", "") == "normcontrol.law":
        raise TypeError(
            f"{law!r} is a law for torch: give its name, or the function of the same name in "
            "normcontrol.optax.laws."
        )
    for norm in (jnp.ones(2), jnp.ones(())):
        scale = law(norm, 2 * norm, 0.5)
        if not hasattr(scale, "__float__") or jnp.shape(scale) != norm.shape:
            is_array = isinstance(scale, jax.Array)
            found = f"shape {scale.shape}" if is_array else repr(scale)
            raise ValueError(
                f"law={law!r} returned {found} for norms of shape {norm.shape}: a law is a "
                "function of (norm, target, rate) that returns a scale for every norm."
            )
    return law


def value_at(value: Value, count: Any) -> Any:
    """Return the value of a number or a schedule at this count."""
    return value(count) if callable(value) else value


def check_range(name: str, value: Any, low: float, high: float, why: str) -> None:
    """Raise an error if a number is outside ``[low, high]``, or a schedule is at one of the counts
    0, 1, 10, ... 1,000,000."""
    refuse_torch(name, value)
    if callable(value) and not takes_a_number(value):
        raise TypeError(
            f"{name}={value!r} cannot be called with a count: give an optax schedule, such as "
            "optax.linear_schedule(1.0, 2.0, 2500) or normcontrol.optax.paper_ratio."
        )
    for count in (0, *(10**power for power in range(7))) if callable(value) else (0,):
        number = value_at(value, jnp.asarray(count, jnp.int32))  # as in an update
        if isinstance(number, jax.core.Tracer):
            return
        when = f" at count {count}" if callable(value) else ""
        is_number = hasattr(number, "__float__") and jnp.ndim(number) == 0
        if not is_number or jnp.issubdtype(jnp.result_type(number), jnp.bool_):
            raise TypeError(
                f"{name}={number!r}{when} is no number: give one, or an optax schedule, which is a "
                "function of the number of updates and returns one."
            )
        if not low <= float(number) <= high:
            raise ValueError(f"{name} takes the value {float(number):g}{when}: {why}")
