"""The laboratory's one exception. Its message is a sentence that is shown without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LabError(Exception):
    """Says what was given, why it is refused, and what to do instead."""


def nearest(given: str, known: Iterable[str]) -> str:
    """A phrase with the known names that are most similar to the given one, or with all of them.

    >>> nearest("adamv", ["AdamW", "AdamWN", "SGD"])
    'Did you mean AdamW or AdamWN?'
    >>> nearest("zzz", ["tiny", "small"])
    'Known are tiny, small.'
    """
    names = list(known)
    lower = {name.lower(): name for name in names}
    close = [
        lower[match] for match in difflib.get_close_matches(given.lower(), lower, n=3, cutoff=0.6)
    ]
    return f"Did you mean {' or '.join(close)}?" if close else f"Known are {', '.join(names)}."
