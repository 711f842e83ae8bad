"""Fixtures of the laboratory's tests: a small corpus, prepared once, a run that takes a second, and
a study of such runs."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from fakes import blank_figures
from fork_server import context

from normcontrol.lab.data.corpus import source
from normcontrol.lab.data.prepare import prepare
from normcontrol.lab.study import executors
from normcontrol.lab.training.config import Config, Data, Model, Optim, Run

# Tests run in parallel on few cores: several threads in each process would slow them down.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


def document(number: int) -> str:
    """Lines of text with a pattern that a model can learn."""
    return "".join(
        f"the square of {i} is {i * i}, and its cube {i**3}\n"
        for i in range(20 * number, 20 * number + 20)
    )


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 documents of a kilobyte, two of them to validate on, in bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "squares.jsonl").write_text(
        "".join(json.dumps({"text": document(i)}) + "\n" for i in range(200))
    )
    return prepare(
        source(str(folder / "squares.jsonl")), folder / "data", "bytes", val_fraction=0.01
    )


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """The tests survive no power cut. Those of files see when they would be on the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture
def config(corpus: Path) -> Config:
    """A run of twelve steps."""
    return Config(
        Model(layers=1, heads=2, width=32, context=32),
        Data(data=str(corpus), tokens_per_step=256, micro_batch=8),
        Optim(optimizer="AdamW", lr=1e-2, warmup=2, ramp=3, rate=0.1),
        Run(steps=12, log_every=1, eval_every=6, checkpoint_every=4, device="cpu"),
    )


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of studies begin with torch imported, where that is not what is tested."""
    forkserver.ensure_running()  # now, and not where Ctrl-C is held back: other tests use it too
    monkeypatch.setattr(executors.multiprocessing, "get_context", lambda _: context)


@pytest.fixture
def quick_figures() -> Iterator[None]:
    """Figures without anything in them, where they are not what is tested."""
    with blank_figures():
        yield


@pytest.fixture
def study(config: Config, tmp_path: Path) -> str:
    """A study of two arms and two seeds, in a file of its own."""
    path = tmp_path / "mine.py"
    config.save(tmp_path / "base.json")
    path.write_text(
        textwrap.dedent(f"""
        from pathlib import Path
        from normcontrol.lab.training.config import Config
        from normcontrol.lab.study.cells import grid

        BASE = Config.load(Path({str(tmp_path / "base.json")!r})).with_(checkpoint_every=0)

        def decays(scale, done):
            "Two decays against one ratio."
            first = grid("AdamW", BASE, weight_decay=[0.1, 1.0], seeds=[0, 1])
            if not done.done(first):
                return first
            best = done.best(first)
            return first + grid("AdamWN", BASE.with_(optimizer="AdamWN", lr=best.config.optim.lr), ratio=[1.5], seeds=[0, 1])

        def spoiled(scale, done):
            return grid("AdamW", BASE, lr=[1e-2]) + grid("AdamW", BASE.with_(context=2**16, tokens_per_step=2**16), lr=[2e-2])
        """)
    )
    return f"{path}:decays"
