"""The live display: one line for each arm, with step, loss, norm ratio against target, tokens a
second and time left.

On a terminal the lines move; in a log, a plain line is printed every few seconds.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from normcontrol.lab.training.loop import Status
from normcontrol.lab.training.parallel import is_first

QUIET = 10.0
"""Seconds between lines in a log."""


class Board:
    """Shows the arms of an experiment as they train."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(quiet=not is_first())
        self.arms: dict[
            str, tuple[Status | None, float, int]
        ] = {}  # the last status, when the arm started, and at which step
        self.live = (
            Live(console=self.console, refresh_per_second=4) if self.console.is_terminal else None
        )
        self._printed = 0.0

    def __enter__(self) -> Board:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live:
            self.live.update(self._table(), refresh=True)
            self.live.stop()

    def plan(self, *names: str) -> None:
        """Name the arms to come, so that they have their lines from the start."""
        for name in names:
            self.arms.setdefault(name, (None, time.monotonic(), 0))

    def show(self, name: str, status: Status) -> None:
        """Take note of an arm's status."""
        before, started, first = self.arms.get(name, (None, time.monotonic(), 0))
        if before is None:
            started, first = time.monotonic(), status.step
        self.arms[name] = (status, started, first)
        if self.live:
            self.live.update(self._table())
        elif time.monotonic() - self._printed > QUIET or status.step == status.steps:
            self._printed = time.monotonic()
            self.console.print(
                "  ".join((name, *_cells(status, _left(status, started, first)))), highlight=False
            )

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in ("arm", "", "step", "loss", "norm ratio", "validation", "speed", "left"):
            table.add_column(
                column, no_wrap=True, justify="left" if column in ("arm", "") else "right"
            )
        for name, (status, started, first) in self.arms.items():
            if status is None:
                table.add_row(name, ProgressBar(total=1, completed=0, width=20), *["-"] * 6)
            else:
                bar = ProgressBar(total=status.steps, completed=status.step, width=20)
                table.add_row(name, bar, *_cells(status, _left(status, started, first)))
        return table


def _cells(status: Status, left: str) -> tuple[str, ...]:
    ratio = (
        f"{status.ratio:.3f}"
        if status.target is None
        else f"{status.ratio:.3f} of {status.target:.3f}"
    )
    val = "-" if status.val_loss is None else f"val {status.val_loss:.4f}"
    speed = f"{status.tokens_per_second:,.0f} tok/s" + (
        "" if status.mfu is None else f" (MFU {status.mfu:.0%})"
    )
    return f"{status.step}/{status.steps}", f"{status.loss:.4f}", ratio, val, speed, left


def _left(status: Status, started: float, first: int) -> str:
    """Time left, by the mean speed since the first status seen: evaluation and checkpoints
    count."""
    done = status.step - first
    if status.step == status.steps:
        return "done"
    if not done:
        return "-"
    seconds = round((time.monotonic() - started) / done * (status.steps - status.step))
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
