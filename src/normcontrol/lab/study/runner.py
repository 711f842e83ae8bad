"""Runs the cells of a study that are not finished, in their order.

The runner decides which cells are started and when to stop. How a cell is trained is in ``worker``,
in which processes in ``executors`` and ``on_ray``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from normcontrol.lab.errors import LabError
from normcontrol.lab.study.cells import Cell, identity, unique
from normcontrol.lab.study.executors import Execute, local
from normcontrol.lab.study.ledger import WORK, Ledger
from normcontrol.lab.study.records import Record, Results, write
from normcontrol.lab.study.worker import Job, Show, discard, silent
from normcontrol.lab.training import parallel
from normcontrol.lab.training.config import Config, check
from normcontrol.lab.training.device import choose, describe
from normcontrol.lab.training.options import check_used
from normcontrol.lab.training.signals import interruptible

MARGIN = 1.1
"""A cell is started only if this many times its expected duration is left."""

BY_HAND, TIME_IS_UP = "stopped by hand", "the time is up"
CHANGED = "the file of an optimizer was changed"


@dataclass
class Outcome:
    """How many cells are finished, how many are left, why the runner stopped before the end, and
    the errors of the cells that failed, by their labels. Those are among the cells that are
    left."""

    done: int
    left: int
    stopped: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)


class Runner:
    """Runs a study's cells until none is left, the time is up, or it is stopped by hand.

    Under torchrun every process has a runner, and all of them train each cell together. The first
    process alone writes.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        device: str = "auto",
        workers: int = 1,
        on: str = "local",
        only: tuple[str, ...] = (),
        limit_minutes: float | None = None,
        show: Show = silent,
        finished: Callable[[Cell, Record, int, int], None] = silent,
    ) -> None:
        self.ledger, self.only = ledger, only
        self.device, self.workers, self.on = device, workers, on
        self.deadline = None if limit_minutes is None else time.monotonic() + 60 * limit_minutes
        self.show, self.finished = show, finished
        self.stopped = ""
        self._tried: set[str] = set()
        self._speeds: list[float] = []

    def run(self) -> Outcome:
        self.world = parallel.join(self.device)
        alone = self.ledger.alone(shared=bool(self.only))
        with alone if self.world.first else contextlib.nullcontext():
            return self._run()

    def _run(self) -> Outcome:
        done = self.ledger.results()
        self._speeds = self._known_speeds(done)
        with interruptible() as interrupted, self._executor() as execute:
            while not self.stopped:
                cells = self._wanted(done)
                todo = {
                    i: c
                    for i, c in cells.items()
                    if i not in self._tried and not self._has(done, c)
                }
                for cell in todo.values():
                    _check_settings(cell)
                if self.world.first:
                    self.ledger.save()  # with the digests of its data, which are known now
                if not todo:
                    break
                for job, record in execute(self._jobs(todo, interrupted)):
                    if record is None:
                        self.stopped = BY_HAND
                        continue
                    self._store(job, record, done)
                    count = sum(self._has(done, c) for c in cells.values())
                    self.finished(todo[job.id], record, count, len(cells))
        cells = self._wanted(done)
        finished = sum(self._has(done, c) for c in cells.values())
        if self.world.first:
            with contextlib.suppress(OSError):
                (self.ledger.out / WORK).rmdir()
        failed = {
            cell.label: record.error
            for cell in cells.values()
            if (record := done.of(cell)) is not None and record.status == "failed"
        }
        return Outcome(finished, len(cells) - finished, self.stopped, failed)

    def _store(self, job: Job, record: Record, done: Results) -> None:
        """Write a record. The run itself is deleted only after that, and not if it failed: the
        next call continues it."""
        self._tried.add(job.id)
        if self.world.first:
            write(self.ledger.out, record, job.label)
            if record.status != "failed":
                discard(job)
        done.add(record)
        self._speeds.append(record.seconds / _size(job.config))

    def _wanted(self, done: Results) -> dict[str, Cell]:
        """The cells that the study wants by now. To name them the data may have to be prepared:
        the first process does that while the others wait."""
        if not self.world.first:
            self.world.wait()
        cells = unique(self.ledger.cells(done), self.ledger.data_of)
        if self.world.first:
            self.world.wait()
        return {i: c for i, c in cells.items() if c.matches(self.only)}

    def _has(self, done: Results, cell: Cell) -> bool:
        """True if a cell need not be run. One that failed, unlike one that diverged, is tried again
        at the next call."""
        record = done.of(cell)
        return record is not None and record.status != "failed"

    def _jobs(self, todo: dict[str, Cell], interrupted: Callable[[], bool]) -> Iterator[Job]:
        """Jobs one by one, as workers ask for them."""
        device = choose(self.device, self.world.local_rank)
        for id, cell in todo.items():
            if self.world.any(interrupted(), device):
                self.stopped = self.stopped or BY_HAND
            if (
                self.deadline is not None
                and time.monotonic() + MARGIN * self._expected(cell.config) > self.deadline
            ):
                self.stopped = self.stopped or TIME_IS_UP
            data = self.ledger.data_of(cell.config)
            if identity(cell.config, data) != id:
                self.stopped = self.stopped or CHANGED
            if self.stopped:
                return
            yield Job(
                id,
                cell.label,
                cell.config.with_(device=self.device),
                self.ledger.run_folder(id, cell),
                self.ledger.cache,
                keep=self.ledger.study.keeps_runs,
                optimizer=data.optimizer,
            )

    def _expected(self, config: Config) -> float:
        """The seconds that a cell will take, by the slowest of the last ones; 0 while nothing is
        known."""
        return max(self._speeds[-4:], default=0.0) * _size(config)

    def _known_speeds(self, done: Results) -> list[float]:
        """The seconds per token of the finished cells that were run on this device."""
        device = describe(choose(self.device))
        same = [r for r in done.values() if r.good and r.environment.get("device") == device]
        return [
            r.seconds
            / _size(Config().with_(**{k: r.config[k] for k in ("steps", "tokens_per_step")}))
            for r in same
        ]

    def _executor(self) -> contextlib.AbstractContextManager[Execute]:
        if self.on == "ray":
            from normcontrol.lab.study.on_ray import cluster

            return cluster(self.workers, choose(self.device).type == "cuda")
        return local(self.workers, self.show)


def _check_settings(cell: Cell) -> None:
    """Refuse a trial that cannot be run, or with a setting that has no effect: all values of it
    would give the same result, as if it made no difference."""
    values = cell.config.flat()
    own = [key for key, value in cell.settings if key in values and values[key] == value]
    try:
        check(cell.config)
        check_used(cell.config, own)
    except LabError as error:
        raise LabError(f"{cell.label}: {error}") from None


def _size(config: Config) -> float:
    """The number of tokens of a run, to which its duration is proportional within a study."""
    return float(config.run.steps * config.data.tokens_per_step)
