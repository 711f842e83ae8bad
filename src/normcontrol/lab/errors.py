"""The laboratory's one exception: a sentence for the person at the keyboard, shown without a
traceback."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable


class LabError(Exception):
    """What was given, why it cannot be, what to do."""


def nearest(given: str, known: Iterable[str]) -> str:
    """A phrase with the known names most like the given one, or all of them.

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


def told(command: Callable[[], int]) -> int:
    """Run a command; what cannot be done is said in a sentence, without a traceback. The exit
    status."""
    try:
        return command()
    except LabError as error:
        print(f"normcontrol: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("normcontrol: stopped.", file=sys.stderr)
        return 130
