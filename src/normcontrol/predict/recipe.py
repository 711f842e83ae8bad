"""A recipe: settings of a method, and the reasons for them. It may not know how they are found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from normcontrol.schedule import trace


@dataclass(frozen=True)
class Recipe:
    """The settings of a method that replaces another one, or of the same method for another size.

    Attributes:
        method: the name of the method.
        settings: its arguments. If they contain no learning rate, it stays the same.
        equates: which quantity is equal before and after.
        doubts: reasons why the conversion may be wrong.
        why: for each setting, the rule that gives it and the source of the rule.
    """

    method: str
    settings: dict[str, Any] = field(hash=False)
    equates: str
    doubts: tuple[str, ...] = ()
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        settings = ", ".join(f"{key}={_short(value)}" for key, value in self.settings.items())
        return "\n".join(
            [
                f"{self.method}({settings})",
                f"equal: {self.equates}",
                *(f"why: {reason}" for reason in self.why),
                *(f"DOUBTFUL: {d}" for d in self.doubts),
            ]
        )


def _short(value: Any) -> str:
    """A setting as text, with four digits."""
    if isinstance(value, trace):
        return str(value)
    return f"{value:.4g}" if isinstance(value, float) else repr(value)
