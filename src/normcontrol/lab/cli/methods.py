"""``normcontrol methods``: the published methods in a table, or one of them explained."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tyro

from normcontrol.lab.cli.flags import parse
from normcontrol.lab.errors import LabError


@dataclass(frozen=True)
class Methods:
    """The published methods that are settings of the controller, in a table."""

    name: tyro.conf.Positional[str] = ""
    """Explain one of them."""


def run(args: Sequence[str]) -> int:
    flags = parse("methods", Methods, args)
    from normcontrol.lab.text import terminal_width, wrapped
    from normcontrol.methods import find

    if not flags.name:
        show_all()
        return 0
    try:
        method = find(flags.name)
    except ValueError as error:
        raise LabError(str(error)) from None
    call, width = f"{method.build.__name__}({arguments(method.build)})", terminal_width()
    paragraphs = plain(inspect.getdoc(method.build) or "").split("\n\n")
    for text in (f"{method.name}: normcontrol.methods.{call}", *paragraphs):
        indented = "\n " in text  # a list, which keeps its lines
        lines = text.splitlines() if indented else wrapped(" ".join(text.split()), width)
        print("\n".join([*lines, ""]))
    return 0


def arguments(build: Callable[..., object]) -> str:
    """The arguments of a function with their defaults, without their types.

    >>> def build(params: list, lr: float = 0.1, **adam: object) -> None: ...
    >>> arguments(build)
    'params, lr=0.1, **adam'
    """
    signature = inspect.signature(build)
    bare = [
        one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))[1:-1]


def plain(text: str) -> str:
    """A docstring without the markup of the documentation's pages.

    >>> print(plain("With ``gain``, :math:`r_t` is 1 (:func:`~normcontrol.law.upper`)."))
    With gain, r_t is 1 (normcontrol.law.upper).
    """
    return re.sub(r":[a-z:]+:`~?([^`]*)`", r"\1", text).replace("``", "")


def show_all() -> None:
    from normcontrol.lab.text import columns, terminal_width
    from normcontrol.methods import METHODS

    rows = [(m.name, m.scope, m.target, m.law, m.reference) for m in METHODS.values()]
    headings = ("method", "scope", "target", "law", "reference")
    print("\n".join(columns([headings, *rows], terminal_width())))
