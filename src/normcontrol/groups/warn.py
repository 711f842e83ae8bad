"""Warnings that are given once in a process, however often there is reason for them."""

from __future__ import annotations

import warnings

SAID: set[str] = set()


def say_once(about: str, sentence: str, stacklevel: int = 2) -> None:
    """Warn, unless a warning about the same was given already. ``stacklevel`` counts from whoever
    calls this."""
    if about not in SAID:
        SAID.add(about)
        warnings.warn(sentence, stacklevel=stacklevel + 1)
