"""The run folder: its files, what a resume may change, and the lock against a second writer.

It contains ``config.json``, ``environment.json`` (source revision, versions, machine, data),
``metrics.jsonl``, ``timing.jsonl`` and ``checkpoints/``: all that is needed to resume the run, and
to see where its numbers come from. This file may not know about the training loop or the model.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from normcontrol import __version__
from normcontrol.lab.cores import cores
from normcontrol.lab.data.batches import Dataset
from normcontrol.lab.data.tokenizer import Trained
from normcontrol.lab.errors import LabError
from normcontrol.lab.files import claimed, read_json, read_text, write_json, write_text
from normcontrol.lab.own_files import OwnFile
from normcontrol.lab.text import in_shell
from normcontrol.lab.training.config import Config, differences
from normcontrol.lab.training.device import describe

CONFIG, ENVIRONMENT, CHECKPOINTS = "config.json", "environment.json", "checkpoints"
NOT_FINITE = "not-finite.pt"

FREE = {"micro_batch", "device", "compile", "parallel", "checkpoint_every", "tensorboard", "wandb"}
"""Settings that a resume may change. Results depend on them only through rounding, where they
change the order of a sum."""

BY_DIGEST = {"data", "tokenizer", "also_validate"}
"""Settings that say where the data is. A run is identified by the digest of the data instead."""


@contextlib.contextmanager
def opened(folder: Path, resume: bool) -> Iterator[None]:
    """The run folder, locked against a second process. If a new run ends with an error before its
    config is written, nothing was trained, and the folder is as it was before: the corrected
    command is not refused."""
    held = (
        f"Another process is writing to {folder}. Wait until it ends, or stop it, before you "
        "resume this run."
    )
    with claimed(folder, held, (CONFIG, CHECKPOINTS)):
        if not resume:
            _check_free(folder)
        yield


def _check_free(folder: Path) -> None:
    """Refuse to start a new run where there is one."""
    if (folder / CONFIG).exists():
        raise LabError(
            f"{folder} already contains a run. Resume it with `normcontrol train --resume "
            f"{in_shell(folder)}`, or give another --out."
        )
    if any((folder / CHECKPOINTS).glob("*.pt")):
        raise LabError(
            f"{folder} contains the checkpoints of a run, but no {CONFIG}. Restore that file to "
            "resume the run, or give another --out."
        )


def write_config(folder: Path, config: Config) -> None:
    """Write ``config.json``. It is the last file that is written before the first step: from then
    on the folder contains a run."""
    config.save(folder / CONFIG)


def check_same(folder: Path, config: Config) -> None:
    """Raise :class:`LabError` if a setting that determines the results differs from the stored
    config of the run."""
    for key, (old, new) in differences(Config.load(folder / CONFIG), config).items():
        if key not in FREE and key != "data":  # see check_data
            raise LabError(
                f"{key} was {old!r} when {folder} was started, and is {new!r} now: that would be "
                f"another run. Omit --{key.replace('_', '-')} to resume this one, or start a new "
                "run."
            )


def check_data(folder: Path, dataset: Dataset, digest: str | None = None) -> None:
    """Raise :class:`LabError` if a run that is there was started on other data. ``digest`` is that
    of its data, by default the one in ``environment.json``. The same data may be in another folder
    now."""
    if digest is None:
        digest = _environment(folder).get("data", {}).get("digest")
    if digest not in (None, dataset.digest):
        raise LabError(
            f"The data in {dataset.folder} is not what {folder} was trained on: its digest "
            "differs. Restore the old data, or give the folder where it is now as --data."
        )


def check_optimizer(folder: Path, file: OwnFile | None) -> None:
    """Raise :class:`LabError` if a run that is there was started with other code of the user's
    own."""
    if file is None or not (folder / CONFIG).exists():
        return
    if digest_of_optimizer(folder) not in ("", file.sha256):
        raise LabError(
            f"{file.given} is not what {folder} was trained with: its text has changed. Restore "
            "the old file to resume this run, or start a new run."
        )


def digest_of_optimizer(folder: Path) -> str:
    """The digest of the user's file with the optimizer of a run that is there, if it is known."""
    path = folder / ENVIRONMENT
    digest: str = read_json(path).get("optimizer", {}).get("sha256", "") if path.exists() else ""
    return digest


def check_checkpoint(folder: Path, config: Config, dataset: Dataset, state: dict[str, Any]) -> None:
    """Raise :class:`LabError` if a checkpoint is of other settings or other data."""
    check_data(folder, dataset, state["data"])
    known = config.flat()
    before = config.with_(**{key: v for key, v in state["config"].items() if key in known})
    for key, (then, now) in differences(before, config).items():
        if key not in FREE | BY_DIGEST:
            raise LabError(
                f"{key} was {then!r} when the checkpoint of step {state['step']} in {folder} "
                f"was written, and {CONFIG} says {now!r}. Restore {CONFIG} from a copy."
            )


def describe_run(
    device: torch.device, world: int, dataset: Dataset, optimizer: OwnFile | None = None
) -> dict[str, Any]:
    """The content of ``environment.json``: software, machine and data of a run."""
    own = {} if optimizer is None else {"optimizer": optimizer.described()}
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
            "tokenizer_sha256": dataset.tokenizer_sha256,
        },
        **own,
    }


@contextlib.contextmanager
def same_threads(folder: Path, device: torch.device) -> Iterator[None]:
    """A run that is resumed on a CPU has as many threads as before, if this machine has as many
    cores: the rounding of sums depends on their number."""
    usual = torch.get_num_threads()
    before = _environment(folder).get("threads", usual) if device.type == "cpu" else usual
    torch.set_num_threads(before if before <= cores() else usual)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def write_environment(folder: Path, environment: dict[str, Any], first: int) -> None:
    """Write ``environment.json`` for a run that starts or goes on with step ``first``. On resume
    the environments before are kept, in the list ``earlier``."""
    before = _environment(folder)
    earlier = [*before.pop("earlier", []), before] if before else []
    write_json(folder / ENVIRONMENT, {**environment, "first_step": first, "earlier": earlier})


def _environment(folder: Path) -> dict[str, Any]:
    """The content of ``environment.json`` of the run in a folder; empty if there is no run."""
    path = folder / ENVIRONMENT
    return read_json(path) if (folder / CONFIG).exists() and path.exists() else {}


def keep_tokenizer(data: Path, folder: Path) -> None:
    """Copy a trained tokenizer into the run folder, so that text can be sampled without the
    data."""
    if (data / Trained.FILE).exists():
        write_text(folder / Trained.FILE, read_text(data / Trained.FILE))


@functools.cache  # what runs is what was there at the first run
def revision() -> str:
    """The commit of the running source, followed by "+" if there are uncommitted changes.
    "unknown" for an installed package."""
    source = Path(__file__).resolve()
    here = source.parent
    try:
        # An environment inside a project is within the project's repository, and not of it.
        _git(here, "ls-files", "--error-unmatch", source.name)
        commit = _git(here, "rev-parse", "HEAD")
        return commit + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
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


def free_name(parent: Path, stem: str) -> Path:
    """The first of the folders ``stem-1``, ``stem-2``, ... that does not exist."""
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"
