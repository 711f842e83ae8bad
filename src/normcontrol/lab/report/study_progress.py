"""The progress of a study: on a terminal a table of trials by seeds, elsewhere a line for each
finished cell.

Without the package rich it prints lines on a terminal too.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from normcontrol.lab.study.cells import Cell
from normcontrol.lab.study.records import Record
from normcontrol.lab.text import columns, printable, wrapped
from normcontrol.lab.training.loop import Status


class Lines:
    """A line for each finished cell."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, label: str, status: Status) -> None:
        """Show the status of a running cell."""

    def finished(self, cell: Cell, record: Record, done: int, wanted: int) -> None:
        """Show the result of a cell."""
        minutes = (time.monotonic() - self.started) / 60
        print(
            f"{minutes:5.1f} min  {done}/{wanted}  {printable(cell.label)}: {_outcome(record)}, "
            f"{record.seconds:.0f} s",
            flush=True,
        )


class LiveTable(Lines):
    """A table of results, updated in place."""

    def __init__(self) -> None:
        super().__init__()
        from rich.live import Live

        self.rows: dict[str, dict[int, str]] = {}
        self.running: dict[str, Status] = {}
        self.count = (0, 0)
        self.live: Any = Live(refresh_per_second=4)

    def __enter__(self) -> LiveTable:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.running.clear()
        self.live.update(self.table(), refresh=True)
        self.live.stop()

    def show(self, label: str, status: Status) -> None:
        self.running[label] = status
        self.live.update(self.table())

    def finished(self, cell: Cell, record: Record, done: int, wanted: int) -> None:
        self.running.pop(cell.label, None)
        text = f"{record.value():.4f}" if record.good else record.status
        self.rows.setdefault(f"{cell.arm} {cell.trial}".strip(), {})[cell.seed] = text
        self.count = (done, wanted)
        self.live.update(self.table())

    def table(self, width: int | None = None) -> Any:
        """All trials by their seeds, and under them the cells that are running."""
        from rich.text import Text

        width = width or self.live.console.width
        seeds = sorted({seed for row in self.rows.values() for seed in row})
        headings = ["trial", *(f"seed {seed}" for seed in seeds)]
        rows = [(name, *(row.get(seed, "") for seed in seeds)) for name, row in self.rows.items()]
        lines = [f"{self.count[0]} of {self.count[1]} cells known so far"]
        lines += columns([headings, *rows], width)
        shown = Text("\n".join(lines), no_wrap=True)
        for label, s in self.running.items():
            line = f"{label}: {s.step}/{s.steps}, loss {s.loss:.3f}, ratio {s.ratio:.2f}"
            shown.append("\n" + "\n".join(wrapped(printable(line), width)), style="dim")
        return shown


def progress() -> Lines:
    """The display for this output: a table on a terminal, else lines."""
    if sys.stdout.isatty():
        try:
            return LiveTable()
        except ImportError:
            pass
    return Lines()


def _outcome(record: Record) -> str:
    if not record.good:
        return f"{record.status} ({record.error})"
    return ", ".join(f"{key} {value:.4f}" for key, value in record.final.items() if key != "loss")
