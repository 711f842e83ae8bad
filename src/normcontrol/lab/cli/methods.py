"""``normcontrol methods``: the published methods in a table, or one of them explained."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
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
    from normcontrol.methods import find

    if not flags.name:
        show_all()
        return 0
    try:
        method = find(flags.name)
    except ValueError as error:
        raise LabError(str(error)) from None
    signature = f"{method.build.__name__}{inspect.signature(method.build)}"
    print(f"{method.name}: normcontrol.methods.{signature}\n")
    print(inspect.getdoc(method.build))
    return 0


def show_all() -> None:
    from normcontrol.lab.text import columns, terminal_width
    from normcontrol.methods import METHODS

    rows = [(m.name, m.scope, m.target, m.law, m.reference) for m in METHODS.values()]
    headings = ("method", "scope", "target", "law", "reference")
    print("\n".join(columns([headings, *rows], terminal_width())))
