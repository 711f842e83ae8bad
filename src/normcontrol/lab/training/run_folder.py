"""The run folder: all that a resume needs, and all that a reader needs to know where numbers came
from.

``config.json`` (resolved), ``environment.json`` (source revision, versions, machine, data),
``metrics.jsonl``, ``timing.jsonl`` and ``checkpoints/``. One process at a time may write to it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from normcontrol import __version__
from normcontrol.lab.data.tokenizer import Trained
from normcontrol.lab.errors import LabError
from normcontrol.lab.files import write_json
from normcontrol.lab.training.config import Config, differences
from normcontrol.lab.training.device import describe

CONFIG, ENVIRONMENT, CHECKPOINTS = "config.json", "environment.json", "checkpoints"

FREE = {"micro_batch", "device", "compile", "parallel", "checkpoint_every", "tensorboard", "wandb"}
"""What a resume may change: the computation does not depend on it (beyond the rounding of another
order of sums)."""


def begin(folder: Path, config: Config) -> None:
    """Make a new run's folder."""
    if (folder / CONFIG).exists():
        raise LabError(
            f"{folder} holds a run already. Go on with it by `normcontrol train --resume "
            f"{folder}`, or give another --out."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)


def write_config(folder: Path, config: Config) -> None:
    temporary = folder / (CONFIG + ".tmp")
    config.save(temporary)
    temporary.replace(folder / CONFIG)


def check_same(folder: Path, config: Config) -> None:
    """Refuse to go on with a run under settings that would make it another one."""
    for key, (old, new) in differences(Config.load(folder / CONFIG), config).items():
        if key not in FREE:
            raise LabError(
                f"{key} was {old!r} when {folder} was started, and is {new!r} now: that would be "
                "another run. Leave "
                f"--{key.replace('_', '-')} out to go on with this one, or start a new run."
            )


def describe_run(device: torch.device, world: int, dataset: Any) -> dict[str, Any]:
    """Where the numbers of a run come from."""
    packages = ("torch", "numpy", "tokenizers", "tiktoken")
    return {
        "normcontrol": __version__,
        "revision": revision(),
        "command": sys.argv,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "device": describe(device),
        "processes": world,
        "threads": torch.get_num_threads(),
        "packages": {name: _version(name) for name in packages},
        "data": {
            "folder": str(dataset.folder),
            "digest": dataset.digest,
            "tokenizer": dataset.tokenizer,
            "vocab": dataset.vocab,
        },
    }


def write_environment(folder: Path, environment: dict[str, Any]) -> None:
    write_json(folder / ENVIRONMENT, environment)


def keep_tokenizer(data: Path, folder: Path) -> None:
    """A trained tokenizer goes with the run: text can be sampled when the data is gone."""
    if (data / Trained.FILE).exists():
        shutil.copyfile(data / Trained.FILE, folder / Trained.FILE)


def revision() -> str:
    """The commit of the source that runs, "+" if it has changes; "unknown" for an installed
    package."""
    here = Path(__file__).resolve().parent
    try:
        commit = _git(here, "rev-parse", "HEAD")
        return commit + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a second process from writing to the same run. The lock goes with its process, however
    that ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LabError(
                f"Another process is writing to {folder}. Wait for it, or stop it, before going on "
                "with this run."
            ) from None
        yield


def free_name(parent: Path, stem: str) -> Path:
    """The first folder ``stem-1``, ``stem-2``, ... that is not taken."""
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"
