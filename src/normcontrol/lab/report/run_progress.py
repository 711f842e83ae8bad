"""The progress of runs: one line for each run, with step, loss, norm ratio and target, tokens per
second and time left.

On a terminal the lines are updated in place; elsewhere a line is printed every few seconds. It
shows the status that it is given, and does not know studies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from normcontrol.lab.text import columns, printable, wide
from normcontrol.lab.training.loop import Status
from normcontrol.lab.training.parallel import is_first

QUIET = 10.0
"""Seconds between printed lines, where the output is not a terminal."""


class Board:
    """Shows runs while they train."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(quiet=not is_first())
        # For each run: its last status, when it was first seen, and at which step.
        self.runs: dict[str, tuple[Status | None, float, int]] = {}
        self.live = (
            Live(console=self.console, refresh_per_second=4) if self.console.is_terminal else None
        )
        self._printed = 0.0

    def __enter__(self) -> Board:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            # Runs that were planned and not trained, such as those done before, are not left there.
            self.runs = {name: run for name, run in self.runs.items() if run[0] is not None}
            self.live.update(self.table() if self.runs else "", refresh=True)
            self.live.stop()

    def plan(self, *names: str) -> None:
        """Show a line for each of these runs before it starts."""
        for name in names:
            self.runs.setdefault(name, (None, time.monotonic(), 0))

    def show(self, name: str, status: Status) -> None:
        """Show the status of a run."""
        before, started, first = self.runs.get(name, (None, time.monotonic(), 0))
        if before is None:
            started, first = time.monotonic(), status.step
        self.runs[name] = (status, started, first)
        if self.live:
            self.live.update(self.table())
        elif time.monotonic() - self._printed > QUIET or status.step == status.steps:
            self._printed = time.monotonic()
            step, loss, ratio, val, *rest = _cells(status, started, first)
            words = (printable(name), step, f"loss {loss}", f"ratio {ratio}", f"val {val}", *rest)
            self.console.print(Text("  ".join(words)), soft_wrap=True)

    def table(self) -> RenderableType:
        """A line for each run, with a bar at its end if the terminal has room for it."""
        headings = ("run", "step", "loss", "norm ratio", "validation", "speed", "left")
        rows, bars = [], []
        for name, (status, started, first) in self.runs.items():
            rows.append((name, *(["-"] * 6 if status is None else _cells(status, started, first))))
            bars.append((0, 1) if status is None else (status.step, status.steps))
        lines = columns([headings, *rows], self.console.width)
        room = min(20, self.console.width - max(map(wide, lines)) - 2)
        if room < 5 or len(lines) > len(rows) + 1:
            return Text("\n".join(lines), no_wrap=True)
        table = Table.grid(padding=(0, 2))
        table.add_row(Text(lines[0], no_wrap=True))
        for line, (done, total) in zip(lines[1:], bars, strict=True):
            bar = ProgressBar(total=total, completed=done, width=room)
            table.add_row(Text(line, no_wrap=True), bar)
        return table


def _cells(status: Status, started: float, first: int) -> Sequence[str]:
    ratio = (
        f"{status.ratio:.3f}"
        if status.target is None
        else f"{status.ratio:.3f} of {status.target:.3f}"
    )
    val = "-" if status.val_loss is None else f"{status.val_loss:.4f}"
    speed = f"{status.tokens_per_second:,.0f} tok/s" + (
        "" if status.mfu is None else f" (MFU {status.mfu:.0%})"
    )
    step, left = f"{status.step}/{status.steps}", _left(status, started, first)
    return step, f"{status.loss:.4f}", ratio, val, speed, left


def _left(status: Status, started: float, first: int) -> str:
    """The time left, by the mean speed since the first status, evaluations and checkpoints
    included."""
    done = status.step - first
    if status.step == status.steps:
        return "done"
    if not done:
        return "-"
    seconds = round((time.monotonic() - started) / done * (status.steps - status.step))
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
