"""Where the cells of a study are trained on this machine: in this process, or in several processes.

An executor takes jobs one by one and yields each job with its record, or with None if the cell was
stopped. It does not choose the jobs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from normcontrol.lab.cores import cores
from normcontrol.lab.errors import LabError
from normcontrol.lab.study.records import Record
from normcontrol.lab.study.worker import Job, Show, run_cell, silent
from normcontrol.lab.training.signals import held_back, interruptible, let_through

Finished = Iterator[tuple[Job, "Record | None"]]
Execute = Callable[[Iterator[Job]], Finished]


def local(workers: int, show: Show = silent) -> contextlib.AbstractContextManager[Execute]:
    """The executor for a number of workers on this machine."""
    return in_turn(show) if workers == 1 else pool(workers, show)


@contextlib.contextmanager
def in_turn(show: Show) -> Iterator[Execute]:
    """One cell after the other, in this process."""
    yield lambda jobs: ((job, run_cell(job, show)) for job in jobs)


@contextlib.contextmanager
def pool(workers: int, show: Show) -> Iterator[Execute]:
    """Several processes, each with an equal share of the cores."""
    # A forked process can use neither a GPU nor torch's threads.
    context = multiprocessing.get_context("spawn")
    statuses: Any = context.Queue()
    threads = max(cores() // workers, 1)
    listener = threading.Thread(target=_listen, args=(statuses, show), daemon=True)
    listener.start()

    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start, initargs=(statuses, threads)
    ) as executor:

        def submit(job: Job) -> Future[Record | None]:
            with held_back():  # also in a worker that is started now, until it runs a cell
                return executor.submit(_run, job)

        yield lambda jobs: side_by_side(jobs, workers, submit, _collect)
    statuses.put(None)
    listener.join()


def side_by_side(
    jobs: Iterator[Job],
    workers: int,
    submit: Callable[[Job], Any],
    collect: Callable[[dict[Any, Job]], Finished],
) -> Finished:
    """Submit jobs while fewer than ``workers`` are running. ``collect`` waits for at least one of
    the running jobs, removes those that ended, and yields them."""
    running: dict[Any, Job] = {}
    for job in jobs:
        running[submit(job)] = job
        if len(running) == workers:
            yield from collect(running)
    while running:
        yield from collect(running)


def _collect(running: dict[Future[Record | None], Job]) -> Finished:
    """Wait for at least one job to end."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        job = running.pop(future)
        try:
            yield job, future.result()
        except BrokenProcessPool:
            raise LabError(
                f"A worker was killed while it ran {job.label}; memory is the usual reason. "
                "Finished cells are safe, and the others go on from their last checkpoints: give "
                "the same command again, with fewer --workers."
            ) from None


_statuses: Any = None
"""In a worker process: the queue through which it reports the status of its cell."""


def _start(statuses: Any, threads: int) -> None:
    """Runs first in a new worker process."""
    global _statuses
    _statuses = statuses
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, killed for example. Otherwise it would
    go on with a cell whose record nobody takes, and keep it locked."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(job: Job) -> Record | None:
    """Runs in a worker process."""
    with interruptible(), let_through():
        return run_cell(job, lambda label, status: _statuses.put((label, status)))


def _listen(statuses: Any, show: Show) -> None:
    while (status := statuses.get()) is not None:
        show(*status)
