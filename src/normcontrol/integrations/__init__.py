"""Weight norm control in training frameworks: one module for each framework.

Each is the only module that imports its framework, and the rest of the package imports none of
them. This file checks the version of a framework before it is imported.
"""

from __future__ import annotations

import re
from importlib import metadata


def require(package: str, at_least: str, because: str) -> None:
    """Raise an ImportError if a package is missing or older than ``at_least``.

    >>> require("torch", "2.0", "any reason")
    >>> require("torch", "99.0", "an interface that we use is new in it")
    Traceback (most recent call last):
    ...
    ImportError: torch ... is too old: 99.0 or newer is needed, since an interface ...
    """
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ModuleNotFoundError(
            f"{package} is not installed: pip install '{package}>={at_least}'."
        ) from None
    if _numbers(found) < _numbers(at_least):
        raise ImportError(
            f"{package} {found} is too old: {at_least} or newer is needed, since {because}. pip "
            f"install -U {package}."
        )


def _numbers(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3]]
