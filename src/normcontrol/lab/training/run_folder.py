"""The run folder: its files, what a resume may change, and the lock against a second writer.

It contains ``config.json``, ``environment.json`` (source revision, versions, machine, data),
``metrics.jsonl``, ``timing.jsonl`` and ``checkpoints/``: all that is needed to resume the run, and
to see where its numbers come from. This file may not know about the training loop or the model.
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
"""Settings that a resume may change. Results depend on them only through rounding, where they
change the order of a sum."""


def begin(folder: Path, config: Config) -> None:
    """Create the folder of a new run, with its config."""
    if (folder / CONFIG).exists():
        raise LabError(
            f"{folder} already contains a run. Resume it with `normcontrol train --resume "
            f"{folder}`, or give another --out."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)


def write_config(folder: Path, config: Config) -> None:
    """Write ``config.json`` atomically."""
    temporary = folder / (CONFIG + ".tmp")
    config.save(temporary)
    temporary.replace(folder / CONFIG)


def check_same(folder: Path, config: Config) -> None:
    """Raise :class:`LabError` if a setting that determines the results differs from the stored
    config of the run."""
    for key, (old, new) in differences(Config.load(folder / CONFIG), config).items():
        if key not in FREE:
            raise LabError(
                f"{key} was {old!r} when {folder} was started, and is {new!r} now: that would be "
                f"another run. Omit --{key.replace('_', '-')} to resume this one, or start a new "
                "run."
            )


def describe_run(device: torch.device, world: int, dataset: Any) -> dict[str, Any]:
    """The content of ``environment.json``: software, machine and data of a run."""
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
    """Write ``environment.json`` atomically."""
    write_json(folder / ENVIRONMENT, environment)


def keep_tokenizer(data: Path, folder: Path) -> None:
    """Copy a trained tokenizer into the run folder, so that text can be sampled without the
    data."""
    if (data / Trained.FILE).exists():
        shutil.copyfile(data / Trained.FILE, folder / Trained.FILE)


def revision() -> str:
    """The commit of the running source, followed by "+" if there are uncommitted changes.
    "unknown" for an installed package."""
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
def locked(folder: Path) -> Iterator[None]:
    """Lock the run folder against a second process. The system releases the lock when the process
    ends, even if it is killed."""
    try:
        import fcntl
    except ImportError:  # this system has no such locks
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LabError(
                f"Another process is writing to {folder}. Wait until it ends, or stop it, before "
                "you resume this run."
            ) from None
        yield


def free_name(parent: Path, stem: str) -> Path:
    """The first of the folders ``stem-1``, ``stem-2``, ... that does not exist."""
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"
