"""The range of every number that a user can give, as part of its type, and the check of a value.

A field of a dataclass is declared with one of the types below, ``lr: Positive = 1e-3`` for example.
:func:`check_fields` compares all fields of a dataclass with their types. A number without a range
is an error of the program, so that no field can be forgotten.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

from normcontrol.lab.errors import LabError, nearest


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``, without those that are not finite."""

    low: float = -math.inf
    high: float = math.inf
    without_low: bool = False
    """True if ``low`` itself is outside."""
    without_high: bool = False
    """True if ``high`` itself is outside."""
    meaning: str = ""
    """Why there are no other values, as the end of a sentence that begins with "it is"."""

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.without_low else value >= self.low
        below = value < self.high if self.without_high else value <= self.high
        return above and below

    def words(self, whole: bool) -> str:
        """The range in words.

        >>> Range(1).words(whole=True)
        '1 or more'
        >>> Range(0, 1, without_high=True).words(whole=False)
        '0 or more and below 1'
        """
        parts = []
        if self.low > -math.inf:
            parts.append(f"above {self.low:g}" if self.without_low else f"{self.low:g} or more")
        if self.high < math.inf:
            parts.append(f"below {self.high:g}" if self.without_high else f"at most {self.high:g}")
        elif not whole:
            parts.append("finite")
        return " and ".join(parts)


Seed = Annotated[int, Range()]
"""Any integer."""
Count = Annotated[int, Range(1)]
CountOrNone = Annotated[int, Range(0)]
"""A number of things of which there may be none."""
Positive = Annotated[float, Range(0, without_low=True)]
NotNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1, meaning="a fraction")]
PositiveFraction = Annotated[float, Range(0, 1, without_low=True, meaning="a fraction")]
Probability = Annotated[float, Range(0, 1, without_high=True, meaning="a probability")]
"""The probability of something that does not always happen."""
Average = Annotated[
    float, Range(0, 1, without_high=True, meaning="the share of the past in a running mean")
]
"""One of Adam's betas."""
Shrinkage = Annotated[
    float, Range(-1, 1, meaning="the fraction by which weights shrink, or grow if it is negative")
]
Share = Annotated[
    float, Range(0, 0.5, without_low=True, meaning="the fraction of the documents to validate on")
]


def check_fields(values: Any) -> None:
    """Raise :class:`LabError` if a field of a dataclass, or of a dataclass in it, is not of its
    type or not in its range."""
    hints = typing.get_type_hints(type(values), include_extras=True)
    for each in dataclasses.fields(values):
        value = getattr(values, each.name)
        if dataclasses.is_dataclass(value):
            check_fields(value)
        else:
            check_value(each.name, value, hints[each.name])


def check_value(name: str, value: Any, kind: Any) -> None:
    """Raise :class:`LabError` if a value is not of a type, or not in the range of the type.

    >>> check_value("dropout", 1.5, Probability)
    Traceback (most recent call last):
    ...
    normcontrol.lab.errors.LabError: dropout=1.5: it must be 0 or more and below 1, since it is a \
probability.
    """
    inner, found = _bare(kind)
    origin, parts = typing.get_origin(inner), typing.get_args(inner)
    if origin in (Union, types.UnionType):
        if value is not None or type(None) not in parts:
            check_value(name, value, next(part for part in parts if part is not type(None)))
    elif origin is Literal:
        if value not in parts:
            raise LabError(f"{name}={value!r} is not a choice. {nearest(str(value), parts)}")
    elif origin is tuple:
        repeats = Ellipsis in parts
        if not isinstance(value, tuple) or not (repeats or len(value) == len(parts)):
            count = "" if repeats else f"{len(parts)} "
            raise LabError(f"{name}={value!r}: it must be a list of {count}values.")
        for one, own in zip(value, itertools.cycle(parts[:1]) if repeats else parts, strict=False):
            check_value(name, one, own)
    elif inner in (int, float):
        if found is None:
            raise TypeError(f"The number {name} has no range: declare it with one.")
        _check_number(name, value, found, whole=inner is int)
    elif inner in (bool, str) and not isinstance(value, inner):
        wanted = "true or false" if inner is bool else "a text"
        raise LabError(f"{name}={value!r}: it must be {wanted}.")


def _bare(kind: Any) -> tuple[Any, Range | None]:
    """A type without its annotations, and the range among them."""
    if typing.get_origin(kind) is not Annotated:
        return kind, None
    inner, *notes = typing.get_args(kind)
    return inner, next((note for note in notes if isinstance(note, Range)), None)


def _check_number(name: str, value: Any, inside: Range, whole: bool) -> None:
    wanted = inside.words(whole)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        number = "a whole number (int)" if whole else "a number (float)"
        raise LabError(f"{name}={value!r}: it must be {number}{', ' * bool(wanted)}{wanted}.")
    finite = whole or abs(value) <= sys.float_info.max
    if not finite or value not in inside:
        why = f", since it is {inside.meaning}" if inside.meaning else ""
        raise LabError(f"{name}={value}: it must be {wanted}{why}.")
