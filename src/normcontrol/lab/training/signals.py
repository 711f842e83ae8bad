"""Turns Ctrl-C and SIGTERM into a request to stop, so that a run can save itself before it ends.

It may not know what is stopped.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

_requested: Callable[[], bool] | None = None
"""The function of the context that this process is in."""


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """A context that yields a function: it returns True once Ctrl-C or SIGTERM was received.

    The first Ctrl-C only sets this flag. The second one has the usual effect. A context in another
    one has the function of that one, so that a run stops also if the request came before it began.
    """
    global _requested
    if _requested is not None:
        yield _requested
        return
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    before: dict[int, Any] = {}
    try:
        before |= {
            number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)
        }
    except ValueError:  # only the main thread can handle signals
        yield lambda: False
        return

    def requested() -> bool:
        return bool(received)

    _requested = requested
    try:
        yield requested
    finally:
        _requested = None
        for number, handler in before.items():
            signal.signal(number, handler)


def held_back() -> contextlib.AbstractContextManager[None]:
    """A context in which Ctrl-C is held back until its end. In a process that is started in it,
    Ctrl-C is held back outside :func:`let_through`."""
    return _mask("SIG_BLOCK")


def let_through() -> contextlib.AbstractContextManager[None]:
    """A context in which Ctrl-C is received, also one that was held back before."""
    return _mask("SIG_UNBLOCK")


@contextlib.contextmanager
def _mask(how: str) -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(getattr(signal, how), {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
