"""Trains one cell and makes its record. Which cells are run, and where, is decided elsewhere."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from normcontrol.lab.errors import LabError
from normcontrol.lab.study.records import Record, has_diverged, summarise
from normcontrol.lab.training import metrics, parallel
from normcontrol.lab.training.config import Config, differences
from normcontrol.lab.training.loop import Status, train
from normcontrol.lab.training.run_folder import CONFIG, ENVIRONMENT, FREE
from normcontrol.lab.training.warm import Warm

Show = Callable[[str, Status], None]

SPENT = "seconds"
"""A file in the folder of a cell that was stopped: how many seconds it has been run so far."""


def silent(label: str, status: Status) -> None:
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
    """Keep the run folder after the record is made."""


_warm = Warm()


def run_cell(job: Job, show: Show = silent) -> Record | None:
    """Train one cell. Returns None if it was stopped and saved before its end.

    An error becomes the status of the record. Under torchrun all processes train the cell together;
    an error of one of them alone is raised, because the others may be waiting for that process.
    """
    started, error, spent = time.perf_counter(), "", job.folder / SPENT
    world = parallel.join(job.config.run.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(job.threads or threads)

    def seconds() -> float:
        return time.perf_counter() - started + (float(spent.read_text()) if spent.exists() else 0.0)

    if world.first and _is_stale(job):
        shutil.rmtree(job.folder)
    world.wait()
    try:
        if not train(
            job.config,
            job.folder,
            resume=(job.folder / CONFIG).exists(),
            display=lambda status: show(job.label, status),
            cache=job.cache,
            warm=_warm,
        ):
            if world.first:
                spent.write_text(str(seconds()))
            return None
    except Exception as problem:
        known = isinstance(problem, LabError)
        error = str(problem) if known else f"{type(problem).__name__}: {problem}"
        if world.size > 1 and not has_diverged(error):
            raise
    finally:
        torch.set_num_threads(threads)
    world.wait()  # until the first process has written all metrics
    record = _record(job, seconds(), error)
    world.wait()
    if world.first:
        spent.unlink(missing_ok=True)
        if not job.keep:
            shutil.rmtree(job.folder, ignore_errors=True)
    return record


def _is_stale(job: Job) -> bool:
    """True if the folder contains a run with other settings, which cannot be continued. The data
    may have moved, for example."""
    path = job.folder / CONFIG
    return path.exists() and not set(differences(Config.load(path), job.config)) <= FREE


def _record(job: Job, seconds: float, error: str) -> Record:
    path = job.folder / ENVIRONMENT
    environment = json.loads(path.read_text()) if path.exists() else {}
    return summarise(job.id, job.config, environment, metrics.read(job.folder), seconds, error)
