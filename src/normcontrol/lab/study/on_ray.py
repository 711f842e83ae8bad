"""An executor that trains cells as Ray tasks, on the cluster of this machine or on a local one.

Each task trains in a temporary folder on its node and sends its record back; the data must be on a
file system that all nodes share. A task that is lost with its node or its process is tried again
where there is room. It starts from its first step, and so does a cell that was running when the
study was stopped. This module does not choose the cells.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from normcontrol.lab.errors import LabError
from normcontrol.lab.study.executors import Execute, Finished, side_by_side
from normcontrol.lab.study.records import Record
from normcontrol.lab.study.worker import Job, run_cell

TRIES = 3
"""How often a task is started before the study gives up. An error of the training is no reason to
try again: it is the result of the cell."""


@contextlib.contextmanager
def cluster(workers: int, gpu: bool) -> Iterator[Execute]:
    """Run ``workers`` jobs at a time on Ray. Several share a GPU if there are fewer GPUs."""
    try:
        import ray
    except ImportError:
        raise LabError(
            "--on ray needs Ray, which is not installed: pip install 'normcontrol[ray]'."
        ) from None
    mine = not ray.is_initialized()
    if mine:
        address = os.environ.get("RAY_ADDRESS")
        ray.init(
            **(
                {"address": address}
                if address
                else {"num_cpus": workers, "include_dashboard": False}
            ),
            log_to_driver=False,
        )
    gpus = min(ray.cluster_resources().get("GPU", 0) / workers, 1) if gpu else 0
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=TRIES - 1)(_train)

    def collect(running: dict[Any, Job]) -> Finished:
        done, _ = ray.wait(list(running))
        for future in done:
            job = running.pop(future)
            try:
                yield job, ray.get(future)
            except ray.exceptions.RayError as error:
                raise LabError(
                    f"Ray lost {job.label} {TRIES} times: {error}. Finished cells are stored. To "
                    "continue, give the same command again."
                ) from None

    try:
        yield lambda jobs: side_by_side(
            jobs, workers, lambda job: task.remote(_for_any_node(job)), collect
        )
    finally:
        if mine:
            ray.shutdown()


def _for_any_node(job: Job) -> Job:
    """The job with absolute paths."""
    given = job.config.data
    data = given.data if given.data == "python" else str(Path(given.data).expanduser().resolve())
    # The name of a folder names the loss on it, so that a link must stay one.
    also = [str(Path(path).expanduser().absolute()) for path in given.also_validate]
    config = job.config.with_(data=data, also_validate=also)
    return replace(job, config=config, cache=job.cache.resolve())


def _train(job: Job) -> Record | None:
    """Runs on a node."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        return run_cell(replace(job, folder=Path(work) / job.id))
