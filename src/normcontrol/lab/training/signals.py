"""Turns Ctrl-C and SIGTERM into a request to stop, so that a run can save itself before it ends.

It may not know what is stopped.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """A context that yields a function: it returns True once Ctrl-C or SIGTERM was received.

    The first Ctrl-C only sets this flag. The second one has the usual effect.
    """
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
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
