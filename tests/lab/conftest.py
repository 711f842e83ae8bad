"""What the laboratory's tests share: a small corpus, prepared once, and a run of a second."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from normcontrol.lab.config import Config, Data, Model, Optim, Run
from normcontrol.lab.corpus import source
from normcontrol.lab.prepare import prepare

# Tests run side by side on few cores: threads that wait for each other would only be in the way.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


def text(lines: int) -> str:
    """Lines with something to learn in them."""
    return "".join(f"the square of {i} is {i * i}, and its cube {i**3}\n" for i in range(lines))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data of a few hundred kilobytes, in bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "squares.txt").write_text(text(12_000))
    return prepare(source(str(folder / "squares.txt")), folder / "data", "bytes", val_fraction=0.2)


@pytest.fixture
def config(corpus: Path) -> Config:
    """A run of twelve steps."""
    return Config(
        Model(layers=1, heads=2, width=32, context=32),
        Data(data=str(corpus), tokens_per_step=256, micro_batch=8),
        Optim(optimizer="AdamW", lr=1e-2, warmup=2, ramp=3, rate=0.1),
        Run(steps=12, log_every=1, eval_every=6, checkpoint_every=4, device="cpu"),
    )
