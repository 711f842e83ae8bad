"""Weight norm control in the frameworks people train with: one module each, which alone imports its
framework."""

from __future__ import annotations

import re
from importlib import metadata


def require(package: str, at_least: str, because: str) -> None:
    """Refuse a framework that is missing or too old, with a sentence.

    >>> require("torch", "2.0", "of no matter what")
    >>> require("torch", "99.0", "it has what we need since then")
    Traceback (most recent call last):
    ...
    ImportError: torch ... is too old: 99.0 or newer is needed, since it has what we need since then. pip install -U torch.
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
