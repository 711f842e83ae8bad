"""Text for a terminal: tables and sentences that are laid out for its width.

A number is never cut and never broken over two lines. Names are broken instead, and where even that
is not enough, each row of a table becomes a block of lines. Text that does not go to a terminal has
no width, and its lines are as long as they need to be.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

GAP = "  "
NARROW = 24
"""The width down to which a column of names is made narrower. Longer words are broken."""
NUMBER = set("0123456789.")


def terminal_width() -> int | None:
    """The width of the terminal that is printed to; None if it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def printable(text: str) -> str:
    """The text with escapes for what cannot be shown: control characters, half characters.

    >>> printable("a\\x1b[2J\\udcffb ü")
    'a\\\\x1b[2J\\\\udcffb ü'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def in_shell(path: str | Path) -> str:
    """A path as it has to be written in a command, in quotes if need be.

    >>> print(in_shell("runs/tiny-1"), in_shell("my runs/1"))
    runs/tiny-1 'my runs/1'
    """
    return shlex.quote(str(path))


def wide(text: str) -> int:
    """The number of columns that a text takes up in a terminal.

    >>> wide("abc"), wide("北京")
    (3, 4)
    """
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


def wrapped(text: str, width: int | None) -> list[str]:
    """The text in lines of at most this width. Only words that are longer are broken.

    >>> wrapped("one pair of runs", 8)
    ['one pair', 'of runs']
    """
    if width is None or wide(text) <= width:
        return [text]
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if wide(joined) <= width:
            lines[-1] = joined
            continue
        lines += [word] if lines[-1] else []
        lines[-1] = lines[-1] or word
        while wide(lines[-1]) > width:
            end = _end(lines[-1], width)
            lines[-1:] = [lines[-1][:end], lines[-1][end:]]
    return lines


def _end(word: str, width: int) -> int:
    """Where to break a long word: as far as it fits, but not in a number."""
    fits = [n for n in range(1, len(word)) if wide(word[:n]) <= width]
    return max([n for n in fits if not set(word[n - 1 : n + 1]) <= NUMBER] or fits[-1:] or [1])


def columns(table: Iterable[Sequence[str]], width: int | None = None) -> list[str]:
    """A table as lines. The first row contains the headings, and the first column names.

    >>> columns([("arm", "loss"), ("AdamW from scaled weights", "3.25")], 24)
    ['arm                 loss', 'AdamW from scaled   3.25', 'weights']
    """
    headings, *rows = ([printable(cell) for cell in row] for row in table)
    every = [headings, *rows]
    widths = [max(wide(row[i]) for row in every) for i in range(len(headings))]
    least = [max(_least(row[i], row is headings) for row in every) for i in range(len(headings))]
    gaps = len(GAP) * (len(headings) - 1)
    if width is not None and sum(widths) + gaps > width:
        if sum(least) + gaps > width:
            return _blocks(headings, rows, width)
        room = width - gaps - sum(least)
        for i in sorted(range(len(widths)), key=lambda i: widths[i] - least[i]):
            more = min(widths[i] - least[i], room)
            widths[i], room = least[i] + more, room - more
    return [line for row in every for line in _side_by_side(row, widths)]


def _least(cell: str, heading: bool) -> int:
    """The width down to which a cell can be made narrower: a number keeps its own."""
    if not heading and not cell[:1].isalpha():
        return wide(cell)
    return min(max(map(wide, cell.split(" "))), NARROW)


def _side_by_side(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    cells = [wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    return [
        GAP.join(
            _padded(cell[i] if i < len(cell) else "", w)
            for cell, w in zip(cells, widths, strict=True)
        ).rstrip()
        for i in range(max(map(len, cells)))
    ]


def _padded(text: str, width: int) -> str:
    return text + " " * (width - wide(text))


def _blocks(headings: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> list[str]:
    """Each row as its name, and under it its other cells with their headings."""
    lines: list[str] = []
    for name, *cells in rows:
        lines += wrapped(name, width)
        line = ""
        for heading, cell in zip(headings[1:], cells, strict=True):
            item = f"{heading} {cell}".strip()
            if line and wide(f"{GAP}{line},{GAP}{item},") > width:
                lines += [GAP + part for part in wrapped(line + ",", width - len(GAP))]
                line = ""
            line = f"{line},{GAP}{item}" if line else item
        lines += [GAP + part for part in wrapped(line, width - len(GAP))]
    return lines
