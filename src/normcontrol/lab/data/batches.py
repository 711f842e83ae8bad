"""Loads prepared data and computes the batch of every step, a pure function of (data seed, step).

The batch does not depend on the number of processes, the micro-batch or earlier evaluations. So
runs with the same data seed are paired, and a resumed run gets the same batches as an uninterrupted
one. This file may not know about the model or the training loop.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from normcontrol.lab import seeds
from normcontrol.lab.data import corpus, manifest, prepare
from normcontrol.lab.errors import LabError
from normcontrol.lab.files import largest, sha256
from normcontrol.lab.text import in_shell

Tokens = npt.NDArray[Any]

DRAWN = (1 << 64) - 1
"""The stream of a seed that draws the windows of ``unique_tokens``: no epoch has this number."""


@dataclass(frozen=True)
class Dataset:
    """The training and validation split as token ids, with their tokenizer and digest."""

    folder: Path
    tokenizer: str
    vocab: int
    train: list[Tokens]
    val: list[Tokens]
    digest: str
    """SHA-256 of the SHA-256 hashes of all shards. It identifies the data."""
    val_digest: str
    """The same of the validation split alone."""
    tokenizer_sha256: str | None = None
    """The checksum of a trained tokenizer's file."""


def load(given: str, tokenizer: str, cache: Path) -> Dataset:
    """Load and verify the data that ``given`` names: a folder, or "python" for the embedded corpus,
    which is prepared in ``cache`` on first use."""
    folder = Path(given).expanduser()
    if given == "python":
        folder = cache / f"python-{sys.version.split()[0]}-{tokenizer.replace(':', '')}"
        if not (folder / manifest.MANIFEST).exists():
            prepare.prepare(corpus.embedded(), folder, tokenizer, wait=True)
    if (folder / manifest.MANIFEST).exists():
        return _prepared(folder)
    if (folder / "train.bin").exists() and (folder / "val.bin").exists():
        return _nanogpt(folder)
    if (folder / prepare.JOURNAL).exists():
        raise LabError(
            f"The data in {folder} is not complete. Run the same `normcontrol prepare` command "
            "again: it continues where it stopped."
        )
    if folder.is_file():
        raise LabError(
            f"{given!r} is a file, and prepared data is a folder. Prepare it with `normcontrol "
            f"prepare {in_shell(given)} --out FOLDER`, and give that folder as --data."
        )
    raise LabError(
        f"{given!r} is not prepared data: there is no {manifest.MANIFEST} in it, and no train.bin "
        f"and val.bin. Prepare it with `normcontrol prepare TEXT --out {in_shell(given)}`."
    )


def _prepared(folder: Path) -> Dataset:
    """Data that `normcontrol prepare` made. The manifest and all shards are verified."""
    about = manifest.read(folder)
    dtype = manifest.DTYPES[about["dtype"]]
    entries = {split: about["splits"][split]["shards"] for split in manifest.SPLITS}
    train, val = (
        [_tokens(folder / entry["file"], dtype) for entry in entries[split]]
        for split in manifest.SPLITS
    )
    return Dataset(
        folder,
        about["tokenizer"],
        about["vocab"],
        train,
        val,
        _digest([entry["sha256"] for split in manifest.SPLITS for entry in entries[split]]),
        _digest([entry["sha256"] for entry in entries["val"]]),
        about.get("tokenizer_sha256"),
    )


def _tokens(path: Path, dtype: Any) -> Tokens:
    return np.memmap(path, dtype, "r")


def _digest(hashes: list[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _nanogpt(folder: Path) -> Dataset:
    """nanoGPT's train.bin and val.bin: flat uint16 ids of GPT-2's BPE."""
    paths = [folder / "train.bin", folder / "val.bin"]
    train, val = map(_uint16, paths)
    hashes = [sha256(path) for path in paths]
    return Dataset(folder, "gpt2", 50257, [train], [val], _digest(hashes), _digest(hashes[1:]))


def _uint16(path: Path) -> Tokens:
    """A flat file of uint16 ids of GPT-2's BPE."""
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise LabError(
            f"{path} has {size} bytes: uint16 ids need an even number above 0. It may be "
            "truncated: copy it again."
        )
    manifest.check_ids(path, largest(path, "<u2"), 50257)
    return _tokens(path, "<u2")


def load_validation(given: str, like: Dataset) -> tuple[str, list[Tokens], str]:
    """The name, tokens and digest of another validation split. It must have the tokenizer of
    ``like``."""
    folder = Path(given).expanduser()
    if (folder / manifest.MANIFEST).exists():
        dataset = _prepared(folder)
        tokens, made_by, digest = dataset.val, dataset.tokenizer, dataset.val_digest
    elif (folder / "val.bin").exists():
        path = folder / "val.bin"
        tokens, made_by, digest = [_uint16(path)], "gpt2", _digest([sha256(path)])
    else:
        raise LabError(
            f"There is no {manifest.MANIFEST} and no val.bin in {given!r}, so it has no validation "
            "split. Give a folder with one of them."
        )
    if made_by != like.tokenizer or (
        made_by.startswith("bpe") and folder.resolve() != like.folder.resolve()
    ):
        raise LabError(
            f"{given} contains tokens of {made_by}, and the model is trained on tokens of "
            f"{like.tokenizer} from {like.folder}: their ids stand for different texts. Prepare "
            "both with the same tokenizer, gpt2 for example."
        )
    return folder.name, tokens, digest


class Batches:
    """The rows of the batch of every step.

    A row is a window of ``context`` tokens. Windows are adjacent, and their common offset differs
    from epoch to epoch. An epoch goes through all windows in a random order that depends on (seed,
    epoch). Row i of step t, both from 0, is number t * rows + i in the sequence of all epochs.

    With ``unique_tokens`` an epoch goes through as many windows as have that many tokens. They are
    drawn once, and stay where they are.
    """

    def __init__(
        self,
        shards: list[Tokens],
        context: int,
        rows: int,
        seed: int,
        unique_tokens: int = 0,
    ) -> None:
        self.shards, self.context, self.rows, self.seed = shards, context, rows, seed
        # Windows in each shard. One fewer than fit, to leave room for the offset.
        self.counts = [max((len(tokens) - 1) // context - 1, 0) for tokens in shards]
        self.windows = sum(self.counts)
        if self.windows < 1:
            total = sum(map(len, shards))
            raise LabError(
                f"The training split has {total:,} tokens, but two contexts of {context} and the "
                "token after them are needed. Use more text, or a smaller --context."
            )
        self.ends = np.cumsum(self.counts)
        self.drawn: Tokens | None = None
        if unique_tokens:
            self.drawn = self._draw(unique_tokens)
            self.windows = len(self.drawn)
        self._epoch, self._order, self._offset = -1, np.empty(0, np.int64), 0

    def _draw(self, unique_tokens: int) -> Tokens:
        """Windows that have so many tokens together."""
        count = unique_tokens // self.context
        if not 1 <= count <= self.windows:
            raise LabError(
                f"unique_tokens={unique_tokens}, but the training split has {self.windows:,} "
                f"windows of {self.context} tokens. Give {self.context} to "
                f"{self.windows * self.context}, or 0 to use all of them."
            )
        return seeds.for_numpy(self.seed, stream=DRAWN).permutation(self.windows)[:count]

    def __call__(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """The inputs and targets of some rows of ``step``."""
        numbers = np.arange(self.rows)[rows] + step * self.rows
        block = np.stack([self._window(*divmod(int(n), self.windows)) for n in numbers])
        whole = torch.from_numpy(block)
        return whole[:, :-1], whole[:, 1:]

    def _window(self, epoch: int, place: int) -> Tokens:
        if epoch != self._epoch:
            random = seeds.for_numpy(self.seed, stream=epoch)
            self._offset = int(random.integers(self.context)) if self.drawn is None else 0
            self._epoch, self._order = epoch, random.permutation(self.windows)
        window = int(self._order[place])
        if self.drawn is not None:
            window = int(self.drawn[window])
        shard = int(np.searchsorted(self.ends, window, side="right"))
        start = (window - (int(self.ends[shard - 1]) if shard else 0)) * self.context + self._offset
        return self.shards[shard][start : start + self.context + 1].astype(np.int64)


def feed(
    batches: Batches, mine: slice, micro: int, device: torch.device, steps: range
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the micro-batches of the rows ``mine`` of every step. Each is loaded in the background
    while the one before it is computed."""

    def fetch(step: int, start: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step, slice(start, start + micro))
        if device.type == "cuda":
            x, y = x.contiguous().pin_memory(), y.contiguous().pin_memory()
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    with ThreadPoolExecutor(1) as pool:
        ahead = None
        for step in steps:
            for start in range(mine.start, mine.stop, micro):
                coming = pool.submit(fetch, step, start)
                if ahead is not None:
                    yield ahead.result()
                ahead = coming
        if ahead is not None:
            yield ahead.result()


def validation(shards: list[Tokens], context: int) -> list[Tokens]:
    """The whole validation split as adjacent windows, each with the token that follows it."""
    windows = [
        tokens[i : i + context + 1]
        for tokens in shards
        for i in range(0, len(tokens) - context, context)
    ]
    if not windows:
        total = sum(map(len, shards))
        raise LabError(
            f"The validation split has {total:,} tokens, but one context of {context} and the "
            "token after it are needed. Use a smaller --context, or prepare the data with a larger "
            "--val-fraction."
        )
    return windows


def stack(windows: list[Tokens]) -> Tensor:
    """Windows as one int64 tensor."""
    return torch.from_numpy(np.stack(windows).astype(np.int64))


def padded(vocab: int) -> int:
    """The number of rows of the embedding: the vocabulary, rounded up to a multiple of 64, for
    which matrix products are fast.

    >>> padded(50257)
    50304
    """
    return -(-vocab // 64) * 64
