"""Numbers as users give them: converted to Python's, refused if they are no numbers, recognised if
they are JAX's; and functions that take one. What they are for is not known here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from inspect import signature
from typing import Any


def plain(value: Any) -> Any:
    """Return a number of numpy or torch as one of Python, whose ``repr`` can be read back."""
    if hasattr(value, "item"):
        with suppress(RuntimeError, ValueError):  # of several numbers, which is refused
            return value.item()
    return value


def is_number(value: Any) -> bool:
    """Return whether this is a number. Texts and truth values are not."""
    return isinstance(value, float | int) and not isinstance(value, bool)


def numbers(values: Iterable[Any]) -> tuple[float, ...]:
    """Return these as floats. Raise a TypeError if one of them is no number."""
    found = tuple(map(plain, values))
    if not all(map(is_number, found)):
        raise TypeError
    return tuple(map(float, found))


def check_finite(kind: str, values: Iterable[float]) -> None:
    """Raise a ValueError if one of the values of this kind of schedule is not finite."""
    for value in values:
        if not math.isfinite(value):
            raise ValueError(f"{kind} got the value {value}: give finite numbers.")


def takes_a_number(function: Callable[..., Any]) -> bool:
    """Return whether a function can be called with one number, as far as its signature tells.

    >>> takes_a_number(math.sqrt), takes_a_number(lambda: 1.0), takes_a_number(lambda a, b: 1.0)
    (True, False, False)
    """
    try:
        signature(function).bind(1)
    except TypeError:
        return False
    except ValueError:  # it has none that Python knows
        return True
    return True


def is_jax(given: Any) -> bool:
    """True for an array or a function of JAX or optax. Neither of them is imported."""
    module = str(getattr(given, "__module__", None) if callable(given) else type(given).__module__)
    ours = module.startswith("normcontrol.optax.")
    return ours or module.partition(".")[0] in ("jax", "jaxlib", "optax")
