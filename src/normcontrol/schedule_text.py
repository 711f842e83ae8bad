"""Schedules as text: how a checkpoint stores a schedule, and how it is read back. Configuration
files and command lines give a schedule in the same form.

The text is the call that constructs the schedule, such as ``linear(start=1.0, end=2.0,
steps=2500)``. It is parsed, never executed. This file knows the registry of schedules and nothing
about optimizers or checkpoints.
"""

from __future__ import annotations

import ast
from typing import Any

from normcontrol.custom_schedule import as_schedule, custom
from normcontrol.schedule import SCHEDULES, Schedule


def to_text(value: Any) -> Any:
    """Return the ``repr`` of a schedule or another callable, and any other value as it is.

    >>> from normcontrol.schedule import linear
    >>> to_text(linear(1.0, 2.0, steps=2500)), to_text(0.5)
    ('linear(start=1.0, end=2.0, steps=2500)', 0.5)
    """
    return repr(value) if callable(value) else value


def checked_text(name: str, value: Any) -> Any:
    """Return what :func:`to_text` returns, if :func:`from_text` can read it back.

    It is better to refuse a checkpoint when it is saved than when it is needed.
    """
    text = to_text(value)
    if not isinstance(value, Schedule):
        return text
    try:
        same = repr(from_text(text, value)) == text
    except (ValueError, SyntaxError, TypeError):
        same = False
    if not same:
        raise ValueError(
            f"{name}={text} cannot be saved: it would not be read back. A checkpoint stores a "
            "schedule as the call that constructs it. If it is a class of your own, let its repr "
            "be that call with plain numbers (a frozen dataclass does that), and add it to "
            "normcontrol.schedule.SCHEDULES by its name."
        )
    return text


def from_text(text: Any, current: Any = None) -> Any:
    """Construct the schedule that :func:`to_text` stored. A value that is not a string is returned
    as it is.

    Args:
        text: what :func:`to_text` returned.
        current: the schedule that the optimizer has now. It is used if ``text`` stands for a
            function, which cannot be stored.

    >>> from_text("linear(start=1.0, end=2.0, steps=2500)")
    linear(start=1.0, end=2.0, steps=2500)
    """
    if not isinstance(text, str):
        return text
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(
            f"The checkpoint contains the schedule {text!r}, which is not the call of a schedule."
        )
    if call.func.id == "custom":
        if isinstance(current, custom):
            return current
        raise ValueError(
            f"The checkpoint was made with the function {text[7:-1]} as a schedule, and a function "
            "cannot be stored. Construct the optimizer with the same function before loading."
        )
    if call.func.id not in SCHEDULES:
        raise ValueError(
            f"The checkpoint contains the schedule {text!r}, but the known schedules are "
            f"{', '.join(SCHEDULES)}. Add it to normcontrol.schedule.SCHEDULES before loading."
        )
    positional = [ast.literal_eval(argument) for argument in call.args]
    named = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
    if len(named) < len(call.keywords):
        raise ValueError(
            f"{text!r} gives an argument twice, or by **: every argument is given once, by its "
            "name or its place"
        )
    return SCHEDULES[call.func.id](*positional, **named)


def given_schedule(given: Any, name: str) -> float | Schedule:
    """Return what :func:`as_schedule` returns, also for a schedule as text.

    >>> given_schedule("linear(1, 2, steps=2500)", "ratio")
    linear(start=1, end=2, steps=2500)
    """
    text = given.strip() if isinstance(given, str) else ""
    if "(" not in text:
        return as_schedule(given, name)
    kind = text.partition("(")[0]
    if kind not in SCHEDULES:
        raise ValueError(
            f"{name}={given!r}: there is no schedule {kind!r}; there are {', '.join(SCHEDULES)}."
        )
    try:
        return from_text(text)
    except (ValueError, SyntaxError, TypeError) as error:
        raise ValueError(
            f"{name}={given!r} cannot be read as a schedule: {error}. Write the call as in Python, "
            "with plain numbers, such as linear(1.0, 2.0, steps=2500)."
        ) from None
