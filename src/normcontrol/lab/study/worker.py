"""Trains one cell and makes its record. Which cells are run, and where, is decided elsewhere.

What was trained stays in the folder of the cell until its record is stored: a cell that failed or
was stopped goes on from its last checkpoint when it is run again.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from normcontrol.lab.errors import Busy, LabError, explain
from normcontrol.lab.files import read_json, write_json
from normcontrol.lab.study.records import Record, has_diverged, summarise
from normcontrol.lab.training import metrics, parallel
from normcontrol.lab.training.config import Config, differences
from normcontrol.lab.training.loop import Status, train
from normcontrol.lab.training.optimizer_names import file_of
from normcontrol.lab.training.run_folder import (
    BY_DIGEST,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    FREE,
    NOT_FINITE,
    digest_of_optimizer,
    free_name,
)
from normcontrol.lab.training.warm import Warm

Show = Callable[[str, Status], None]

SPENT = "seconds.json"
"""A file in the folder of a cell that is not finished: how many seconds it has been run so far."""


def silent(*_: object) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Job:
    """All that is needed to run a cell."""

    id: str
    label: str
    config: Config
    folder: Path
    cache: Path
    threads: int | None = None
    """The number of threads of torch on a CPU; None for the process's own."""
    keep: bool = False
    """Keep the run folder after the record is stored."""
    optimizer: str = ""
    """The digest of the user's file with the optimizer, if it is in one."""


_warm = Warm()


def run_cell(job: Job, show: Show = silent) -> Record | None:
    """Train one cell, or continue it. Returns None if it was stopped and saved before its end.

    An error becomes the status of the record. A cell that another process is training is an error
    that is raised. Under torchrun all processes train the cell together; an error of one of them
    alone is raised, because the others may be waiting for that process.
    """
    started, error = time.perf_counter(), ""
    world = parallel.join(job.config.run.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(job.threads or threads)
    before = 0.0
    try:
        before = _spent(job)
        if world.first:
            _adopt(job)
        world.wait()
        _check_file(job)
        done = train(
            job.config,
            job.folder,
            resume=(job.folder / CONFIG).exists(),
            display=lambda status: show(job.label, status),
            cache=job.cache,
            warm=_warm,
        )
    except Busy:
        raise
    except Exception as problem:
        done, error = True, _sentence(problem)
        if world.size > 1 and not has_diverged(error):
            raise
    finally:
        torch.set_num_threads(threads)
    world.wait()  # until the first process has written all metrics
    seconds = time.perf_counter() - started + before
    record = _record(job, seconds, error) if done else None
    if world.first and job.folder.exists() and (record is None or record.status == "failed"):
        with contextlib.suppress(LabError) if error else contextlib.nullcontext():
            write_json(job.folder / SPENT, {"seconds": seconds})
    world.wait()
    return record


def discard(job: Job) -> None:
    """Delete the run folder of a cell whose record is stored, unless it is to be kept. Of a run
    that diverged only the checkpoints are deleted: its error names a file in the folder."""
    (job.folder / SPENT).unlink(missing_ok=True)
    if not job.keep:
        diverged = (job.folder / NOT_FINITE).exists()
        shutil.rmtree(job.folder / CHECKPOINTS if diverged else job.folder, ignore_errors=True)


def _sentence(problem: Exception) -> str:
    if isinstance(problem, LabError):
        return str(problem)
    if isinstance(problem, OSError):
        return explain(problem)
    return f"{type(problem).__name__}: {problem}"


def _spent(job: Job) -> float:
    """The seconds that the cell has been run before."""
    path = job.folder / SPENT
    return float(read_json(path, "seconds")["seconds"]) if path.exists() else 0.0


def _check_file(job: Job) -> None:
    """Refuse an optimizer whose file is not the one that the cell is named by."""
    file = file_of(job.config)
    if file is not None and file.sha256 != job.optimizer:
        raise LabError(
            f"{file.given} was changed after the study had begun. Give the same command again, for "
            "runs with the new file."
        )


def _adopt(job: Job) -> None:
    """Make a run folder that is there usable for the job. If only its data has moved, the run goes
    on with the data where it is now: a cell is identified by the digest of its data. A run with
    other settings, or with another file of the user's own, is renamed."""
    path = job.folder / CONFIG
    if not path.exists():
        return
    changed = set(differences(Config.load(path), job.config))
    if not changed <= FREE | BY_DIGEST or digest_of_optimizer(job.folder) != job.optimizer:
        job.folder.rename(free_name(job.folder.parent, f"{job.folder.name}-earlier"))
    elif not changed <= FREE:
        job.config.save(path)


def _record(job: Job, seconds: float, error: str) -> Record:
    """The record of a run. What cannot be read of a run that failed is left out of it."""
    with contextlib.suppress(LabError) if error else contextlib.nullcontext():
        path = job.folder / ENVIRONMENT
        environment = read_json(path) if path.exists() else {}
        lines = metrics.read(job.folder)
        return summarise(job.id, job.config, environment, lines, seconds, error)
    return summarise(job.id, job.config, {}, [], seconds, error)
