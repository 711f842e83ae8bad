"""Studies with invented results, for tests of verdicts and pages, and Ray without a cluster."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from matplotlib.figure import Figure

from normcontrol.lab.report.page import Page, Run
from normcontrol.lab.study.cells import Cell, Data, Study, identity
from normcontrol.lab.study.evidence import Evidence
from normcontrol.lab.study.records import Record, Results, summarise
from normcontrol.lab.training.config import Config

DATA = Data("digest")
NOISE = {0: 0.0, 1: 0.003, 2: -0.004, 3: 0.001, 4: 0.002}
"""For each seed, the number that is added to a loss."""


@functools.cache  # a study whose later cells depend on earlier ones is asked for them many times
def name(config: Config) -> str:
    return identity(config, DATA)


def record(
    cell: Cell,
    loss: float,
    *,
    ratio: float = 2.0,
    digest: str = "digest",
    owt: float | None = None,
    points: int = 5,
) -> Record:
    """The record of a cell whose loss falls in a straight line from 10 to ``loss``. If ``loss`` is
    not finite, the cell has diverged."""
    steps = [round(cell.config.run.steps * i / (points - 1)) for i in range(points)]
    lines = [
        {
            "step": s,
            "loss": 10 + (loss - 10) * i / (points - 1),
            "grad_norm": 1.0,
            "ratio": 1 + (ratio - 1) * i / (points - 1),
            "gain": 0.5 * (1 + (ratio - 1) * i / (points - 1)),
        }
        for i, s in enumerate(steps)
    ]
    lines += [
        {"step": s, "val_loss": 10 + (loss - 10) * i / (points - 1)} for i, s in enumerate(steps)
    ]
    if owt is not None:
        lines[-1]["val_loss_owt"] = owt
    environment = {
        "command": ["normcontrol", "study"],
        "platform": "Linux",
        "device": "a device",
        "revision": "0" * 40,
        "normcontrol": "0",
        "processes": 1,
        "threads": 1,
        "packages": {"torch": "2"},
        "data": {"folder": "data", "digest": digest, "tokenizer": "gpt2", "vocab": 1024},
    }
    error = "" if abs(loss) < 100 else "The loss or gradient was not finite"
    return summarise(name(cell.config), cell.config, environment, lines, 60.0, error)


@dataclass
class FakeLedger:
    """A ledger whose cells were all run, as ``outcome`` says."""

    study: Study
    outcome: Callable[[Cell], Record | None]
    scale: str = "tiny"
    out: Path = Path("results/fake")
    problems: list[str] = field(default_factory=list)

    def results(self) -> Results:
        done = Results(lambda config: DATA, problems=self.problems)
        tried: set[str] = set()
        while todo := [  # later cells depend on earlier ones
            cell for cell in self.study.cells(self.scale, done) if name(cell.config) not in tried
        ]:
            for cell in todo:
                tried.add(name(cell.config))
                made = self.outcome(cell)
                if made is not None:
                    done.add(made)
        return done

    def cells(self, done: Results) -> list[Cell]:
        return list(self.study.cells(self.scale, done))


def nothing_run() -> Results:
    """The results of a study before its first run."""
    return Results(lambda config: DATA)


def evidence_of(ledger: Any) -> Evidence:
    """The cells of a study's folder with their records."""
    done = ledger.results()
    return Evidence(ledger.cells(done), done)


@contextlib.contextmanager
def blank_figures() -> Iterator[None]:
    """Figures are written as files without anything in them: drawing one takes a second."""
    savefig = Figure.savefig
    Figure.savefig = lambda _, *given, **options: savefig(Figure(), *given, **options)
    try:
        yield
    finally:
        Figure.savefig = savefig


def big(runs: int, points: int) -> Page:
    """Runs with a point at every step, in all curves."""
    steps = list(range(points))
    made = []
    for i in range(runs):
        values = [4 + math.exp(-s / 200) + 0.01 * math.sin(s * (i + 1)) for s in steps]
        made.append(
            Run(
                f"arm {i % 8}",
                f"trial {i}",
                0,
                Config().flat(),
                dict.fromkeys(("loss", "val_loss", "ratio"), (steps, values)),
                {},
            )
        )
    return Page("Large", [], made)


def record_files(out: Path) -> dict[str, int]:
    """The files of the records in a study's folder, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in (out / "cells").glob("*.jsonl")}


def recorded_often(study, above, curve, value):
    """Made-up results: what an arm ends above the others, with noise of each seed and arm, and a
    curve that is logged at every third step and has one value for each seed."""

    def outcome(cell):
        noise = 1e-3 * (cell.seed % 5) + 2e-4 * (len(cell.arm) * cell.seed % 7)
        made = record(cell, 4.2 + noise + above.get(cell.arm, 0.0))
        steps = range(3, cell.config.run.steps + 1, 3)
        made.curves[curve] = (list(steps), [value(cell.seed) for _ in steps])
        return made

    return FakeLedger(study, outcome, "tiny")


class Ray(ModuleType):
    """Ray with one node, this process, whose working directory is a folder of its own."""

    exceptions = SimpleNamespace(RayError=ConnectionError)

    def __init__(self, node: Path) -> None:
        super().__init__("ray")
        self.node = node

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {}

    def remote(self, **_: Any) -> Callable[[Callable[[Any], Any]], Any]:
        return lambda function: SimpleNamespace(remote=lambda job: lambda: function(job))

    def wait(self, futures: list[Any]) -> tuple[list[Any], list[Any]]:
        return futures, []

    def get(self, future: Callable[[], Any]) -> Any:
        before = Path.cwd()
        os.chdir(self.node)
        try:
            return future()
        finally:
            os.chdir(before)
