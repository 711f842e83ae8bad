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
def interruptible(told: Callable[[], bool] = lambda: False) -> Iterator[Callable[[], bool]]:
    """A context that yields a function: it returns True once Ctrl-C or SIGTERM was received, or
    ``told`` returns True.

    The first Ctrl-C only sets this flag. The second one has the usual effect. A context in another
    one has the function of that one, so that a run stops also if the request came before it began.
    """
    global _requested
    if _requested is not None:
        yield _requested
        return
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    try:
        before = {
            number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)
        }
    except ValueError:  # only the main thread can handle signals
        yield told
        return

    def requested() -> bool:
        return bool(received) or told()

    _requested = requested
    try:
        yield requested
    finally:
        _requested = None
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """A context in which Ctrl-C is held back until its end. A process that is started in it never
    receives Ctrl-C: somebody has to tell it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
