"""The table of docs/methods.md, made from the registry of methods.

``python tests/methods/methods_table.py`` writes it into the page.
"""

from __future__ import annotations

import re
from pathlib import Path

from normcontrol.methods import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
PLACE = re.compile(r"(?<=<!-- methods -->\n).*?(?=\n<!-- end -->)", re.S)


def table() -> str:
    """The table as Markdown."""
    head = ["| method | function | scope | target | law | reference |", "|---|---|---|---|---|---|"]
    rows = [
        f"| {m.name} | `{m.build.__name__}` | {m.scope} | {m.target} | {m.law} | {m.reference} |"
        for m in METHODS.values()
    ]
    return "\n".join(head + rows)


if __name__ == "__main__":
    PAGE.write_text(PLACE.sub(lambda _: table(), PAGE.read_text()))
