"""Warnings that name the user's line, and those that are given once in a process. It knows nothing
about what is warned of."""

from __future__ import annotations

import sys
import warnings

GIVEN: set[str] = set()

INSIDE = {"normcontrol", "torch"}
"""Packages whose lines a warning does not name: torch calls our methods through its own."""


def warn(sentence: str) -> None:
    """Warn about the line that called the library, directly or through torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, stacklevel=level)


def warn_once(topic: str, sentence: str) -> None:
    """Warn, unless a warning on the same topic was given before."""
    if topic not in GIVEN:
        GIVEN.add(topic)
        warn(sentence)
