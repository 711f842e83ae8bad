"""Where the cells of a study are trained on this machine: in this process, or in several processes.

An executor takes jobs one by one and yields each job with its record, or with None if the cell was
stopped. It does not choose the jobs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
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
from normcontrol.lab.training.signals import held_back, interruptible

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
    """Several processes, each with an equal share of the cores.

    This process receives Ctrl-C, and tells the workers: one that is only starting would end with an
    error, and one that starts later would not receive it.
    """
    # A forked process can use neither a GPU nor torch's threads.
    context = multiprocessing.get_context("spawn")
    statuses: Any = context.Queue()
    stop = context.Event()
    threads = max(cores() // workers, 1)
    with interruptible() as interrupted:
        arguments = (statuses, show, stop, interrupted)
        listener = threading.Thread(target=_listen, args=arguments, daemon=True)
        listener.start()

        try:
            with ProcessPoolExecutor(
                workers, mp_context=context, initializer=_start, initargs=(statuses, stop, threads)
            ) as executor:

                def submit(job: Job) -> Future[Record | None]:
                    with held_back():  # from a worker that is started now
                        return executor.submit(_run, job)

                yield lambda jobs: side_by_side(jobs, workers, submit, _collect)
        finally:
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
_stop: Any = None
"""In a worker process: the event that tells it to stop."""
POLL = 0.2
"""Seconds between two looks at whether the workers have to be told to stop."""


def _start(statuses: Any, stop: Any, threads: int) -> None:
    """Runs first in a new worker process."""
    global _statuses, _stop
    _statuses, _stop = statuses, stop
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
    with interruptible(_stop.is_set):
        return run_cell(job, lambda label, status: _statuses.put((label, status)))


def _listen(statuses: Any, show: Show, stop: Any, interrupted: Callable[[], bool]) -> None:
    """Show what the workers report, and tell them to stop."""
    while True:
        if interrupted():
            stop.set()
        with contextlib.suppress(queue.Empty):
            status = statuses.get(timeout=POLL)
            if status is None:
                return
            show(*status)
