"""Starts Python processes that have torch and the library imported already.

A server imports them once and forks. A process then starts in a tenth of a second instead of three
seconds. What it must not share with the server is a reason for :mod:`subprocess`: the time or order
of imports, and variables that are read at an import, such as TRITON_INTERPRET.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

context = mp.get_context("forkserver")
context.set_forkserver_preload(
    [
        *("pytest", "matplotlib.figure", "torch._dynamo", "torch.distributed.checkpoint"),
        *("torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.tensor.parallel"),
        *("normcontrol.predict", "normcontrol.watch", "normcontrol.lab.training.loop"),
        *("normcontrol.lab.cli.main", "normcontrol.lab.study.runner", "spread"),
    ]
)


@dataclass
class Ended:
    """How a process ended, and what it printed."""

    status: int
    out: str
    err: str


class Python:
    """``python *command``, that is a file, ``-m module`` or ``-c code``, with its arguments."""

    def __init__(self, *command: Any, cwd: Path | None = None, **environ: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._printed = [Path(self._folder.name, name) for name in ("out", "err")]
        words, variables = [str(word) for word in command], {**os.environ, **environ}
        given = (words, cwd or Path.cwd(), variables, self._printed)
        self._process = context.Process(target=_main, args=given)
        self._process.start()

    @property
    def runs(self) -> bool:
        return self._process.is_alive()

    def wait_for(self, condition: Callable[[], bool], timeout: float = 600) -> None:
        """Wait until a condition holds. It must, before the process has ended."""
        end = time.monotonic() + timeout
        while self.runs and not condition() and time.monotonic() < end:
            time.sleep(0.01)
        assert condition(), f"It runs: {self.runs}. It printed: {self._text()}"

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def end(self, timeout: float = 600) -> Ended:
        """Wait for the end. A process that does not end in time is killed, and its status is
        negative."""
        self._process.join(timeout)
        self.kill()
        ended = Ended(self._process.exitcode, *self._text())
        self._folder.cleanup()
        return ended

    def _text(self) -> list[str]:
        return [path.read_text() if path.exists() else "" for path in self._printed]

    def kill(self) -> None:
        if self.runs:
            self.signal(signal.SIGKILL)
        self._process.join()


def python(*command: Any, cwd: Path | None = None, **environ: str) -> Ended:
    """Run ``python *command`` to its end."""
    return Python(*command, cwd=cwd, **environ).end()


def _main(command: list[str], cwd: Path, environ: dict[str, str], printed: list[Path]) -> None:
    for number, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec", dont_inherit=True), {"__name__": "__main__"})
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
