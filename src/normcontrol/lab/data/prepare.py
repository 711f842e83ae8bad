"""Converts text to shards: flat files of token ids, with a manifest that describes them.

The source is streamed and encoded on all cores, with some megabytes in memory, whatever its size.
Every few seconds a journal records what is on disk. A stopped preparation continues from the
journal and ends in the same bytes. This file may not know about training.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from normcontrol.lab.data.corpus import Piece, Source
from normcontrol.lab.data.tokenizer import Ids, Tokenizer, make, stored
from normcontrol.lab.errors import LabError
from normcontrol.lab.files import largest, read_json, sha256, sync, sync_folder, write_json
from normcontrol.lab.ranges import Count, Share, check_value

MANIFEST, JOURNAL = "manifest.json", "journal.json"
TASK = 1 << 20  # characters that a thread encodes in one task
TRAINED_ON = 1 << 26  # largest number of characters that a BPE is trained on
SPLITS = ("train", "val")

Progress = Callable[[int, int, int], None]
"""Called with the bytes of the source read so far, their total, and the tokens written so far."""


@dataclass
class Shards:
    """The shards of one split while they are written. All but the last are finished: hashed, and
    renamed from ``.bin.part`` to ``.bin``."""

    folder: Path
    split: str
    dtype: np.dtype[Any]
    limit: int
    done: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0  # in the unfinished shard

    @property
    def part(self) -> Path:
        """The path of the unfinished shard."""
        return self.folder / f"{self.split}-{len(self.done):05d}.bin.part"

    def restart(self, done: list[dict[str, Any]], tokens: int) -> None:
        """Return to the state that the journal recorded. Everything that was written later is
        deleted, finished shards too."""
        self.done, self.tokens = done, tokens
        finished = self.part.with_suffix("")
        if tokens:
            if finished.exists():
                finished.replace(self.part)
            os.truncate(self.part, tokens * self.dtype.itemsize)
        recorded = {entry["file"] for entry in done} | ({self.part.name} if tokens else set())
        for path in self.folder.glob(f"{self.split}-*.bin*"):
            if path.name not in recorded:
                path.unlink()

    def add(self, ids: Ids) -> None:
        """Append tokens, and begin a new shard whenever one is full."""
        while len(ids):
            fitting, ids = ids[: self.limit - self.tokens], ids[self.limit - self.tokens :]
            with self.part.open("ab") as file:
                file.write(fitting.astype(self.dtype).tobytes())
            self.tokens += len(fitting)
            if self.tokens == self.limit:
                self.finish()

    def flush(self) -> None:
        """Make sure that all tokens are on the disk."""
        if self.tokens:
            with self.part.open("ab") as file:
                sync(file)

    def finish(self) -> None:
        """Hash and rename the unfinished shard, if there is one."""
        if not self.tokens:
            return
        self.flush()
        path = self.part.with_suffix("")
        highest = largest(self.part, self.dtype)
        entry = {
            "file": path.name,
            "tokens": self.tokens,
            "sha256": sha256(self.part),
            "max": highest,
        }
        self.part.replace(path)
        sync_folder(self.folder)
        self.done.append(entry)
        self.tokens = 0


def prepare(
    source: Source,
    out: Path,
    tokenizer: str,
    val_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    progress: Progress = lambda read, total, tokens: None,
) -> Path:
    """Tokenize ``source`` into shards in the folder ``out``, and return ``out``. A preparation that
    was stopped is continued."""
    _check_arguments(out, val_fraction, shard_tokens)
    out.mkdir(parents=True, exist_ok=True)
    every = round(1 / val_fraction)
    settings = {
        "source": source.name,
        "fingerprint": source.fingerprint(),
        "tokenizer": tokenizer,
        "every": every,
        "shard": shard_tokens,
    }
    journal = _journal(out, settings)
    encoder = _tokenizer(out, journal, tokenizer, source, every)
    dtype = np.dtype("<u2" if encoder.size <= 1 << 16 else "<u4")
    shards = {split: Shards(out, split, dtype, shard_tokens) for split in SPLITS}
    for split, own in shards.items():
        own.restart(*journal["splits"].get(split, ([], 0)))

    pieces, written = int(journal["pieces"]), time.monotonic()
    for batch, ids, read in _encoded(encoder, itertools.islice(source.pieces(), pieces, None)):
        for piece, tokens in zip(batch, ids, strict=True):
            pieces += 1
            into = shards["val" if pieces % every == 0 else "train"]
            into.add(np.append(tokens, encoder.end) if piece.last else tokens)
        progress(read, source.size, sum(_total(own) for own in shards.values()))
        if time.monotonic() - written > 5:
            _write_journal(out, settings, shards, pieces)
            written = time.monotonic()

    _check_count(source, pieces, every)
    for own in shards.values():
        own.finish()
    write_json(out / MANIFEST, _manifest(source, encoder, shards, every, pieces))
    (out / JOURNAL).unlink(missing_ok=True)
    return out


def _check_arguments(out: Path, val_fraction: float, shard_tokens: int) -> None:
    check_value("val_fraction", val_fraction, Share)
    check_value("shard_tokens", shard_tokens, Count)
    if (out / MANIFEST).exists():
        raise LabError(
            f"{out} already contains prepared data. Train on it with --data {out}, or give another "
            "folder as --out."
        )


def _check_count(source: Source, pieces: int, every: int) -> None:
    """Refuse a source that is too short to have documents for validation."""
    if not pieces:
        raise LabError(f"There is no text in {source.name}: all of its files are empty.")
    if pieces < every:
        raise LabError(
            f"{source.name} has {pieces} documents, and every {every}th is for validation, so "
            f"there would be none. Raise --val-fraction to {1 / max(pieces, 2):.2g} or more."
        )


def _manifest(
    source: Source, encoder: Tokenizer, shards: dict[str, Shards], every: int, pieces: int
) -> dict[str, Any]:
    """The content of ``manifest.json``."""
    return {
        "format": 1,
        "tokenizer": encoder.name,
        "vocab": encoder.size,
        "end": encoder.end,
        "dtype": shards["train"].dtype.name,
        "source": source.name,
        "fingerprint": source.fingerprint(),
        "split": f"every {every}th document (or 64 KB of a longer one) is for validation",
        "documents": pieces,
        "splits": {
            split: {"tokens": _total(own), "shards": own.done} for split, own in shards.items()
        },
    }


def _total(shards: Shards) -> int:
    """The number of tokens in finished and unfinished shards."""
    return sum(entry["tokens"] for entry in shards.done) + shards.tokens


def _journal(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The journal of a stopped preparation, or an empty one. A journal of another preparation is an
    error."""
    if not (out / JOURNAL).exists():
        return {"pieces": 0, "splits": {}}
    journal = read_json(out / JOURNAL)
    for key, value in settings.items():
        if journal["asked"][key] != value:
            raise LabError(
                f"{out} contains another, incomplete preparation: {key} was "
                f"{journal['asked'][key]!r} and is {value!r} now. Delete the folder, or give "
                "another as --out."
            )
    return journal


def _write_journal(
    out: Path, settings: dict[str, Any], shards: dict[str, Shards], pieces: int
) -> None:
    """Flush the shards to the disk, then record their state."""
    for own in shards.values():
        own.flush()
    splits = {split: (own.done, own.tokens) for split, own in shards.items()}
    write_json(out / JOURNAL, {"asked": settings, "pieces": pieces, "splits": splits})


def _tokenizer(
    out: Path, journal: dict[str, Any], name: str, source: Source, every: int
) -> Tokenizer:
    """The tokenizer by name. One that has to be trained is trained once, on the documents that are
    not for validation."""
    if journal["pieces"]:
        return stored(name, out)

    def texts() -> Iterator[str]:
        seen = 0
        for number, (piece, _) in enumerate(source.pieces(), 1):
            if number % every:
                yield piece.text
                seen += len(piece.text)
            if seen > TRAINED_ON:
                return

    made = make(name, texts())
    made.save(out)
    return made


def _encoded(
    encoder: Tokenizer, pieces: Iterator[tuple[Piece, int]]
) -> Iterator[tuple[list[Piece], list[Ids], int]]:
    """Encode on all cores, in order, with a bounded number of pending tasks. Threads are enough:
    tiktoken and tokenizers release Python's global lock."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    waiting: deque[tuple[list[Piece], Future[list[Ids]], int]] = deque()
    with ThreadPoolExecutor(cores) as pool:
        for batch, read in _batches(pieces):
            waiting.append(
                (
                    batch,
                    pool.submit(lambda b: [encoder.encode(piece.text) for piece in b], batch),
                    read,
                )
            )
            if len(waiting) > 2 * cores:
                done, future, at = waiting.popleft()
                yield done, future.result(), at
        for done, future, at in waiting:
            yield done, future.result(), at


def _batches(pieces: Iterator[tuple[Piece, int]]) -> Iterator[tuple[list[Piece], int]]:
    """Group pieces into tasks of at least TASK characters."""
    batch: list[Piece] = []
    size = at = 0
    for piece, at in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= TASK:
            yield batch, at
            batch, size = [], 0
    if batch:
        yield batch, at
