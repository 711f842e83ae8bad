"""Converts text to shards: flat files of token ids, with a manifest that describes them.

The source is streamed and encoded on all cores, with some megabytes in memory, whatever its size.
Every few seconds a journal records what is on disk. A stopped preparation continues from the
journal and ends in the same bytes. This file may not know about training.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from normcontrol.lab.cores import cores
from normcontrol.lab.data.corpus import Piece, Source
from normcontrol.lab.data.manifest import DTYPES, FORMAT, MANIFEST, SPLITS
from normcontrol.lab.data.tokenizer import Ids, Tokenizer, digest, make, stored
from normcontrol.lab.errors import LabError
from normcontrol.lab.files import (
    append,
    claimed,
    flush,
    largest,
    move,
    read_json,
    sha256,
    truncate,
    write_json,
)
from normcontrol.lab.ranges import Count, Share, check_value
from normcontrol.lab.text import in_shell

JOURNAL = "journal.json"
TASK = 1 << 20  # characters that a thread encodes in one task
TRAINED_ON = 1 << 26  # largest number of characters that a BPE is trained on

Progress = Callable[[int, int, int], None]
"""Called with the bytes of the source read so far, their total, and the tokens written so far."""


@dataclass
class Shards:
    """The shards of one split while they are written. All but the last are finished: fsynced, and
    renamed from ``.bin.part`` to ``.bin``. Tokens are hashed before they are written."""

    folder: Path
    split: str
    dtype: np.dtype[Any]
    limit: int
    done: list[dict[str, Any]] = field(default_factory=list)
    # Of the unfinished shard:
    tokens: int = 0
    highest: int = 0
    hashed: Any = field(default_factory=hashlib.sha256)

    @property
    def part(self) -> Path:
        """The path of the unfinished shard."""
        return self.folder / f"{self.split}-{len(self.done):05d}.bin.part"

    def restart(self, done: list[dict[str, Any]], tokens: int, digest: str | None = None) -> None:
        """Return to the state that the journal recorded. Everything that was written later is
        deleted, finished shards too."""
        self.done, self.tokens = done, tokens
        finished = self.part.with_suffix("")
        if tokens:
            if finished.exists():
                move(finished, self.part)
            self._reopen(digest)
        recorded = {entry["file"] for entry in done} | ({self.part.name} if tokens else set())
        for path in self.folder.glob(f"{self.split}-*.bin*"):
            if path.name not in recorded:
                path.unlink()

    def _reopen(self, digest: str | None) -> None:
        """Cut the unfinished shard to what the journal recorded, and hash it."""
        size = self.tokens * self.dtype.itemsize
        if (
            not self.part.exists()
            or self.part.stat().st_size < size
            or digest not in (None, sha256(self.part, size))
        ):
            raise LabError(
                f"The unfinished shard {self.part} was changed or deleted after the preparation "
                f"was stopped. Delete {self.folder}, and prepare the data again."
            )
        truncate(self.part, size)
        self.highest = largest(self.part, self.dtype)
        with self.part.open("rb") as file:
            while block := file.read(1 << 20):
                self.hashed.update(block)

    def add(self, ids: Ids) -> None:
        """Append tokens, and begin a new shard whenever one is full."""
        while len(ids):
            fitting, ids = ids[: self.limit - self.tokens], ids[self.limit - self.tokens :]
            block = fitting.astype(self.dtype).tobytes()
            append(self.part, block)
            self.hashed.update(block)
            self.highest = max(self.highest, int(fitting.max()))
            self.tokens += len(fitting)
            if self.tokens == self.limit:
                self.finish()

    def recorded(self) -> tuple[list[dict[str, Any]], int, str]:
        """What the journal records, after all tokens are on the disk."""
        if self.tokens:
            flush(self.part)
        return self.done, self.tokens, self.hashed.hexdigest()

    def finish(self) -> None:
        """Rename the unfinished shard, if there is one."""
        if not self.tokens:
            return
        path = self.part.with_suffix("")
        entry = {
            "file": path.name,
            "tokens": self.tokens,
            "sha256": self.hashed.hexdigest(),
            "max": self.highest,
        }
        move(self.part, path)
        self.done.append(entry)
        self.tokens, self.highest, self.hashed = 0, 0, hashlib.sha256()


def prepare(
    source: Source,
    out: Path,
    tokenizer: str,
    val_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    progress: Progress = lambda read, total, tokens: None,
    wait: bool = False,
) -> Path:
    """Tokenize ``source`` into shards in the folder ``out``, and return ``out``. A preparation that
    was stopped is continued. If another process is preparing the same data, that is an error, or
    with ``wait`` this one waits and uses what the other has made."""
    held = f"Another process is preparing data in {out}. Wait until it ends, or give another --out."
    with claimed(out, held, (JOURNAL, MANIFEST), wait=wait):
        if not (wait and (out / MANIFEST).exists()):
            _prepare(source, out, tokenizer, val_fraction, shard_tokens, progress)
    return out


def _prepare(
    source: Source,
    out: Path,
    tokenizer: str,
    val_fraction: float,
    shard_tokens: int,
    progress: Progress,
) -> None:
    _check_arguments(out, val_fraction, shard_tokens)
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
    dtype = DTYPES["uint16" if encoder.size <= 1 << 16 else "uint32"]
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
    write_json(out / MANIFEST, _manifest(source, encoder, shards, every, pieces, digest(out)))
    (out / JOURNAL).unlink(missing_ok=True)


def _check_arguments(out: Path, val_fraction: float, shard_tokens: int) -> None:
    check_value("val_fraction", val_fraction, Share)
    check_value("shard_tokens", shard_tokens, Count)
    if (out / MANIFEST).exists():
        raise LabError(
            f"{out} already contains prepared data. Train on it with --data {in_shell(out)}, or "
            "give another folder as --out."
        )


def _check_count(source: Source, pieces: int, every: int) -> None:
    """Refuse a source that is too short to have documents for validation."""
    if not pieces:
        raise LabError(f"There is no text in {source.name}: all of its documents are empty.")
    if pieces == 1:
        raise LabError(
            f"{source.name} has one document, and training and validation need one each. A "
            "document is divided after 64 KB, at a line break without a blank line or other white "
            "space beside it. Give more text, or several files in a folder."
        )
    if pieces < every:
        # Rounded up: a smaller fraction would leave no document for validation.
        enough = math.ceil(1000 / pieces) / 1000
        raise LabError(
            f"{source.name} has {pieces} documents, and one of every {every} is for validation, so "
            f"there would be none. Raise --val-fraction to {enough:g} or more."
        )


def _manifest(
    source: Source,
    encoder: Tokenizer,
    shards: dict[str, Shards],
    every: int,
    pieces: int,
    tokenizer_sha256: str | None,
) -> dict[str, Any]:
    """The content of ``manifest.json``."""
    return {
        "format": FORMAT,
        "tokenizer": encoder.name,
        "tokenizer_sha256": tokenizer_sha256,
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
    journal = read_json(out / JOURNAL, "asked", "pieces", "splits")
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
    splits = {split: own.recorded() for split, own in shards.items()}
    write_json(
        out / JOURNAL,
        {
            "asked": settings,
            "pieces": pieces,
            "splits": splits,
            "tokenizer_sha256": digest(out),
        },
    )


def _tokenizer(
    out: Path, journal: dict[str, Any], name: str, source: Source, every: int
) -> Tokenizer:
    """The tokenizer by name. One that has to be trained is trained once, on the documents that are
    not for validation."""
    if journal["pieces"]:
        return stored(name, out, journal.get("tokenizer_sha256"))

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
    waiting: deque[tuple[list[Piece], Future[list[Ids]], int]] = deque()
    with ThreadPoolExecutor(cores()) as pool:
        for batch, read in _batches(pieces):
            waiting.append(
                (
                    batch,
                    pool.submit(lambda b: [encoder.encode(piece.text) for piece in b], batch),
                    read,
                )
            )
            if len(waiting) > 2 * cores():
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
