"""Runs the cells of a study: those that are not finished, in their order, on one or several
workers.

A worker is a process that trains one cell after the other. Here it is decided what is started and
when to stop; how a cell is trained is the training loop's affair, and where its numbers go that of
``results``.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normcontrol.lab.errors import LabError
from normcontrol.lab.study import records as results
from normcontrol.lab.study.cells import Cell, unique
from normcontrol.lab.study.ledger import WORK, Ledger
from normcontrol.lab.study.records import Record, Results
from normcontrol.lab.training import metrics
from normcontrol.lab.training.config import Config, differences
from normcontrol.lab.training.device import choose, describe
from normcontrol.lab.training.loop import Status, train
from normcontrol.lab.training.run_folder import CONFIG, ENVIRONMENT, FREE
from normcontrol.lab.training.signals import interruptible
from normcontrol.lab.training.warm import Warm

Show = Callable[[str, Status], None]

MARGIN = 1.1
"""A cell is started only if so many times its expected duration are left."""

SPENT = "seconds"
"""In the folder of a cell that was stopped: how long it has been run so far."""


@dataclass(frozen=True)
class Job:
    """All that a worker needs to run a cell."""

    id: str
    label: str
    config: Config
    work: Path
    cache: Path
    threads: int | None = None
    """Of torch on a CPU; None: the worker's."""


_warm = Warm()


def run_cell(job: Job, show: Show = lambda label, status: None) -> Record | None:
    """Train one cell; None when it was stopped (and saved) before its end. What goes wrong is a
    record too."""
    started, error, spent = time.perf_counter(), "", job.work / SPENT
    threads = torch.get_num_threads()
    torch.set_num_threads(job.threads or threads)

    def seconds() -> float:
        return time.perf_counter() - started + (float(spent.read_text()) if spent.exists() else 0.0)

    if (job.work / CONFIG).exists() and not set(
        differences(Config.load(job.work / CONFIG), job.config)
    ) <= FREE:
        shutil.rmtree(job.work)  # the data moved: what was begun cannot be gone on with
    try:
        going_on = (job.work / CONFIG).exists()
        if not train(
            job.config,
            job.work,
            resume=going_on,
            display=lambda s: show(job.label, s),
            cache=job.cache,
            warm=_warm,
        ):
            spent.write_text(str(seconds()))
            return None
    except LabError as problem:
        error = str(problem)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    finally:
        torch.set_num_threads(threads)
    lines = metrics.read(job.work)
    environment = (
        json.loads((job.work / ENVIRONMENT).read_text())
        if (job.work / ENVIRONMENT).exists()
        else {}
    )
    record = results.summarise(job.id, job.config, environment, lines, seconds(), error)
    shutil.rmtree(job.work, ignore_errors=True)
    return record


@dataclass
class Outcome:
    """What came of a call: how many cells are finished, how many are left, and why it ended."""

    done: int
    left: int
    stopped: str = ""


class Runner:
    """Runs a study's cells until none is left, the time is up, or a person stops it."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        device: str = "auto",
        workers: int = 1,
        on: str = "local",
        only: tuple[str, ...] = (),
        limit_minutes: float | None = None,
        show: Show = lambda label, status: None,
        finished: Callable[[Cell, Record, int, int], None] = lambda cell, record, done, wanted: (
            None
        ),
    ) -> None:
        self.ledger, self.device, self.workers, self.on, self.only = (
            ledger,
            device,
            workers,
            on,
            only,
        )
        self.deadline = None if limit_minutes is None else time.monotonic() + 60 * limit_minutes
        self.show, self.finished = show, finished
        self.stopped, self._tried = "", set[str]()
        self._speeds: list[float] = []

    def run(self) -> Outcome:
        done = self.ledger.results()
        self._speeds = self._known_speeds(done)
        with interruptible() as interrupted, self._executor() as execute:
            while not self.stopped:
                cells = self._wanted(done)
                self.ledger.save()  # by now the digests of its data are known
                todo = {
                    i: c
                    for i, c in cells.items()
                    if i not in self._tried and not self._has(done, c)
                }
                if not todo:
                    break
                for job, record in execute(self._jobs(todo, interrupted)):
                    if record is None:
                        self.stopped = "stopped by hand"
                        continue
                    self._tried.add(job.id)
                    results.write(self.ledger.out, record, job.label)
                    done.add(record)
                    self._speeds.append(record.seconds / _work(job.config))
                    self.finished(
                        todo[job.id],
                        record,
                        sum(self._has(done, c) for c in cells.values()),
                        len(cells),
                    )
        cells = self._wanted(done)
        finished = sum(self._has(done, c) for c in cells.values())
        with contextlib.suppress(OSError):
            (self.ledger.out / WORK).rmdir()
        return Outcome(finished, len(cells) - finished, self.stopped)

    def _wanted(self, done: Results) -> dict[str, Cell]:
        cells = unique(self.ledger.cells(done), self.ledger.data_of)
        return {
            i: c
            for i, c in cells.items()
            if not self.only or any(text in f"{c.part} {c.label}" for text in self.only)
        }

    def _has(self, done: Results, cell: Cell) -> bool:
        """Failed cells, as opposed to those that diverged, are worth another try at the next
        call."""
        record = done.of(cell)
        return record is not None and record.status != "failed"

    def _jobs(self, todo: dict[str, Cell], interrupted: Callable[[], bool]) -> Iterator[Job]:
        """Jobs one by one, as workers ask for them."""
        for id, cell in todo.items():
            if interrupted():
                self.stopped = self.stopped or "stopped by hand"
            if (
                self.deadline is not None
                and time.monotonic() + MARGIN * self._expected(cell.config) > self.deadline
            ):
                self.stopped = self.stopped or "the time is up"
            if self.stopped:
                return
            config = cell.config.with_(device=self.device)
            yield Job(id, cell.label, config, self.ledger.out / WORK / id, self.ledger.cache)

    def _expected(self, config: Config) -> float:
        """Seconds that a cell will take, by the slowest of the last ones; 0 while nothing is
        known."""
        return max(self._speeds[-4:], default=0.0) * _work(config)

    def _known_speeds(self, done: Results) -> list[float]:
        here = describe(choose(self.device))
        same = [r for r in done.values() if r.good and r.environment.get("device") == here]
        return [
            r.seconds
            / _work(Config().with_(**{k: r.config[k] for k in ("steps", "tokens_per_step")}))
            for r in same
        ]

    def _executor(self) -> contextlib.AbstractContextManager[Execute]:
        if self.on == "ray":
            from normcontrol.lab.study.on_ray import cluster

            return cluster(self.workers, choose(self.device).type == "cuda")
        return local(self.workers, self.show)


def _work(config: Config) -> float:
    """What a cell's duration is proportional to, within a study."""
    return float(config.run.steps * config.data.tokens_per_step)


Execute = Callable[[Iterator[Job]], Iterator[tuple[Job, "Record | None"]]]


def local(
    workers: int, show: Show = lambda label, status: None
) -> contextlib.AbstractContextManager[Execute]:
    """On this machine: in this process, or in several."""
    return in_turn(show) if workers == 1 else pool(workers, show)


@contextlib.contextmanager
def in_turn(show: Show) -> Iterator[Execute]:
    """One cell after the other, in this process."""
    yield lambda jobs: ((job, run_cell(job, show)) for job in jobs)


@contextlib.contextmanager
def pool(workers: int, show: Show) -> Iterator[Execute]:
    """Several processes on this machine, each with its share of the cores."""
    context = multiprocessing.get_context(
        "spawn"
    )  # a forked process cannot use a GPU, nor torch's threads
    said: Any = context.Queue()
    threads = max(cores() // workers, 1)
    listener = threading.Thread(target=_listen, args=(said, show), daemon=True)
    listener.start()

    def execute(jobs: Iterator[Job]) -> Iterator[tuple[Job, Record | None]]:
        under_way: dict[Future[Record | None], Job] = {}
        for job in jobs:
            under_way[executor.submit(_work_on, job)] = job
            if len(under_way) == workers:
                yield from _collect(under_way)
        while under_way:
            yield from _collect(under_way)

    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start, initargs=(said, threads)
    ) as executor:
        yield execute
    said.put(None)
    listener.join()


def _collect(under_way: dict[Future[Record | None], Job]) -> Iterator[tuple[Job, Record | None]]:
    done, _ = wait(under_way, return_when=FIRST_COMPLETED)
    for future in done:
        job = under_way.pop(future)
        try:
            yield job, future.result()
        except BrokenProcessPool:
            raise LabError(
                f"A worker was killed while it ran {job.label}; memory is the usual reason. "
                "Finished cells are safe: give the same command "
                "again, with fewer --workers."
            ) from None


_said: Any = None


def _start(said: Any, threads: int) -> None:
    """In a new worker."""
    global _said
    _said = said
    torch.set_num_threads(threads)


def _work_on(job: Job) -> Record | None:
    return run_cell(job, lambda label, status: _said.put((label, status)))


def _listen(said: Any, show: Show) -> None:
    while (heard := said.get()) is not None:
        show(*heard)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
