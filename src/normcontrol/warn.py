"""Warnings that are given once in a process. It knows nothing about what is warned of."""

from __future__ import annotations

import warnings

GIVEN: set[str] = set()


def warn_once(topic: str, sentence: str, stacklevel: int = 2) -> None:
    """Warn, unless a warning on the same topic was given before.

    ``stacklevel`` counts from the caller of this function.
    """
    if topic not in GIVEN:
        GIVEN.add(topic)
        warnings.warn(sentence, stacklevel=stacklevel + 1)
