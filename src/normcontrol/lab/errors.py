"""The laboratory's own exceptions. Their messages are sentences that are shown without a
traceback, and so are errors of the file system: :func:`explain` turns them into sentences."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable
from pathlib import Path


class LabError(Exception):
    """Says what was given, why it is refused, and what to do instead."""


class Busy(LabError):
    """Another process is working on the same files."""


_SPACE = "Free some space, then give the same command again."
_ALLOWED = "Change its permissions, or give another folder."
_GONE = "It was moved or deleted, or never existed: restore it, or give another path."
_KIND = "A file is where a folder is needed, or a folder where a file is: give another path."
ADVICE = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: _SPACE,
    errno.EROFS: "Make its file system writable, or give another folder.",
    errno.EACCES: _ALLOWED,
    errno.EPERM: _ALLOWED,
    errno.ENOENT: _GONE,
    errno.ENOTDIR: _KIND,
    errno.EISDIR: _KIND,
    errno.EEXIST: _KIND,
    errno.EMFILE: "Raise the limit of open files (ulimit -n), then give the same command again.",
    errno.ENAMETOOLONG: "Give a shorter path.",
}
"""What to do about an error of the system, by its number."""


def explain(error: OSError, path: Path | None = None) -> str:
    """A sentence for an error of the system: the file (``path``, or the one that the error names),
    what is wrong with it, and what to do.

    >>> explain(OSError(errno.ENOSPC, "No space left on device"), Path("run/config.json"))
    'run/config.json: No space left on device. Free some space, then give the same command again.'
    """
    what = error.strerror or str(error) or type(error).__name__
    given = error.filename if path is None else path
    file = f"{os.fsdecode(given)}: " if isinstance(given, str | bytes | Path) else ""
    advice = ADVICE.get(error.errno or 0, "Check the disk, then give the same command again.")
    return f"{file}{what}. {advice}"


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
