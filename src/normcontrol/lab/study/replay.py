"""Runs the finished cells of a study again and compares: bit for bit on a CPU, within the spread
over seeds on a GPU. It changes nothing in the folder of the study."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normcontrol.lab.errors import LabError
from normcontrol.lab.study.cells import Cell
from normcontrol.lab.study.evidence import Evidence
from normcontrol.lab.study.executors import local
from normcontrol.lab.study.ledger import Ledger
from normcontrol.lab.study.records import Record, config_of
from normcontrol.lab.study.worker import Job, discard
from normcontrol.lab.training.device import choose
from normcontrol.lab.training.run_folder import BY_DIGEST


@dataclass(frozen=True)
class Comparison:
    """The record of a cell before and now."""

    label: str
    before: Record
    now: Record
    noise: float | None
    """The spread of final losses over seeds; None where the numbers must be equal bit for bit."""

    @property
    def same(self) -> bool:
        if self.noise is None:
            return _numbers(self.now) == _numbers(self.before)
        return self.now.status == self.before.status and abs(self.moved) <= 2 * self.noise

    @property
    def moved(self) -> float:
        return (
            self.now.value() - self.before.value()
            if self.before.good and self.now.good
            else math.nan
        )

    def __str__(self) -> str:
        if self.noise is None:
            other = f"another result, {self.moved:+.2e} in validation loss"
            return f"{self.label}: {'the same, bit for bit' if self.same else other}"
        noise = f"{'within' if self.same else 'beyond'} the noise of seeds ({self.noise:.5f})"
        return f"{self.label}: {self.moved:+.5f} in validation loss, {noise}"


def _numbers(record: Record) -> tuple[Any, ...]:
    """The numbers of a run that must be the same. What was only measured on the way, such as norms
    and angles, is not among them: it may be measured more often or more exactly than before."""
    losses = {k: v for k, v in record.final.items() if k.startswith(("loss", "val_loss"))}
    return record.status, losses, *(record.curves[k] for k in ("loss", "val_loss", "grad_norm"))


def replay(
    ledger: Ledger, device: str = "auto", only: tuple[str, ...] = (), workers: int = 1
) -> Iterator[Comparison]:
    """Run each finished cell of a study again, with as many threads as it had: the rounding of sums
    depends on their number."""
    done = ledger.results()
    cells = [cell for cell in ledger.cells(done) if cell.matches(only)]
    found = {
        record.id: (cell, record)
        for cell in cells
        if (record := done.of(cell)) is not None and record.status != "failed"
    }
    if not found:
        raise LabError(
            f"There is nothing to replay in {ledger.out}: no finished cell of the study that it "
            "names."
        )
    exact = choose(device).type == "cpu"
    noise = None if exact else seed_noise(Evidence(ledger.cells(done), done))
    with tempfile.TemporaryDirectory() as work, local(workers) as execute:

        def again(cell: Cell, record: Record) -> Job:
            places = {key: cell.config.flat()[key] for key in (*BY_DIGEST, "optimizer")}
            config = config_of(record.config).with_(
                **places, device=device, tensorboard=False, wandb=""
            )
            return Job(
                record.id,
                cell.label,
                config,
                Path(work) / record.id,
                ledger.cache,
                record.environment.get("threads"),
                optimizer=ledger.data_of(cell.config).optimizer,
            )

        for job, now in execute(again(*one) for one in found.values()):
            if now is None:
                return
            discard(job)
            yield Comparison(job.label, found[job.id][1], now, noise)


def seed_noise(evidence: Evidence) -> float:
    """The standard deviation of final losses over seeds, pooled over the trials that have
    several."""
    trials = [
        trial
        for arm in dict.fromkeys(cell.arm for cell in evidence.cells)
        for trial in evidence.trials(arm)
    ]
    variances = [spread**2 for trial in trials if (spread := trial.spread()) is not None]
    if not variances:
        raise LabError(
            "No trial has several seeds, so the noise that a replay on a GPU may show is not "
            "known. Replay on a CPU."
        )
    return math.sqrt(statistics.fmean(variances))
