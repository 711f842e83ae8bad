"""The one place where the laboratory writes files, and the checksums that show whether they
changed.

A file is written beside its place, fsynced and renamed, so that a reader sees the old file or the
new one, complete, even after a power cut. An error of the disk becomes a sentence. This module
does not know what the files contain.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from normcontrol.lab.errors import Busy, LabError, explain

LOCK = ".lock"
DIGEST = "sha256"
"""The key of a JSON file under which the checksum of its other content is stored."""


def folder_name(text: str) -> str:
    """The text as the name of a folder, without what a path or a shell would read.

    >>> folder_name("tiny mine.py:Lion")
    'tiny-mine.py-Lion'
    """
    return "".join(c if c.isalnum() or c in ".=" else "-" for c in text)


class Draft:
    """A file while it is written. ``path`` is where it will be; it may be changed until then."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.error, self._file = path, None, file
        self._digest = hashlib.sha256()

    path: Path
    error: OSError | None
    """What the disk answered, if a write failed. torch.save raises an error of its own instead."""

    def write(self, block: Any) -> int:
        # Hashed before it is written: a hash of the file would not detect errors of the disk.
        self._digest.update(block)
        try:
            return self._file.write(block)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()

    @property
    def sha256(self) -> str:
        """The checksum of what was written so far."""
        return self._digest.hexdigest()


@contextlib.contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[Draft]:
    """Write a file completely or not at all: what the block writes is on the disk, under the name
    ``path``, when the block has ended, and nothing has changed if it fails.

    ``temporary`` is where the file is written first; by default a new name for each call, so that
    two processes can write the same file.
    """
    temporary = temporary or path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    draft = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            draft = Draft(path, file)
            yield draft
            sync(file)
        temporary.replace(draft.path)
        sync_folder(draft.path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        cause = (draft.error if draft else None) or error
        if isinstance(cause, OSError):
            raise LabError(explain(cause, path)) from cause
        raise


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file."""
    with replacing(path) as file:
        file.write(content)


def write_text(path: Path, content: str) -> None:
    """Replace a text file, in UTF-8."""
    write_bytes(path, content.encode())


def append(path: Path, content: bytes) -> None:
    """Append to a file that is not complete yet. It is fsynced when it is moved to its place."""
    with _sentences(path), path.open("ab") as file:
        file.write(content)


def flush(path: Path) -> None:
    """Make sure that all bytes of a file are on the disk."""
    with _sentences(path), path.open("ab") as file:
        sync(file)


def move(path: Path, to: Path) -> None:
    """Rename a file that :func:`append` wrote, after all of its bytes are on the disk."""
    flush(path)
    with _sentences(path):
        path.replace(to)
        sync_folder(to.parent)


def truncate(path: Path, size: int) -> None:
    """Cut a file to its first ``size`` bytes."""
    with _sentences(path):
        os.truncate(path, size)


def make_folder(path: Path) -> None:
    """Create a folder, and those that contain it."""
    with _sentences(path):
        path.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _sentences(path: Path) -> Iterator[None]:
    """Turn an error of the disk into a sentence."""
    try:
        yield
    except OSError as error:
        raise LabError(explain(error, path)) from error


def sync(file: IO[Any]) -> None:
    """Write the file's buffers to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk. Without this a rename may be lost in a power cut."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file, with the checksum of its content in it."""
    write_text(path, json.dumps({**content, DIGEST: digest_of(content)}, indent=2) + "\n")


def read_json(path: Path, *needed: str) -> dict[str, Any]:
    """The content of a JSON file. It must have the ``needed`` keys, and match the checksum in it,
    if there is one."""
    try:
        content = json.loads(read_text(path))
        if not isinstance(content, dict):
            raise ValueError("it is not an object with keys")
    except (ValueError, RecursionError) as error:
        raise LabError(
            f"{path} is not readable as JSON ({error}): restore it from a copy, or delete it."
        ) from None
    if content.pop(DIGEST, None) not in (None, digest_of(content)):
        raise LabError(
            f"{path} was changed after it was written: its content does not match the {DIGEST} in "
            f"it. Restore it from a copy. If you changed it on purpose, delete its {DIGEST} line."
        )
    for key in needed:
        if key not in content:
            raise LabError(
                f"{path} has no {key!r}: it is not complete, or of another program. Restore it "
                "from a copy."
            )
    return content


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    with _sentences(path):
        return path.read_bytes()


def read_text(path: Path) -> str:
    """The text in a file, in UTF-8."""
    return read_bytes(path).decode()


def digest_of(content: Any) -> str:
    """The checksum of what is stored as JSON; spaces and line breaks do not count.

    >>> digest_of({"a": (1, 2)}) == digest_of({"a": [1, 2]})
    True
    """
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def sha256(path: Path, size: int | None = None) -> str:
    """The checksum of a file, or of its first ``size`` bytes."""
    digest, left = hashlib.sha256(), size
    with _sentences(path), path.open("rb") as file:
        while block := file.read(1 << 20 if left is None else min(left, 1 << 20)):
            digest.update(block)
            left = None if left is None else left - len(block)
    return digest.hexdigest()


def largest(path: Path, dtype: Any) -> int:
    """The largest number in a file of numbers, which is read a block at a time."""
    import numpy as np

    highest = 0
    with _sentences(path), path.open("rb") as file:
        while len(block := np.fromfile(file, dtype, count=1 << 22)):
            highest = max(highest, int(block.max()))
    return highest


@contextlib.contextmanager
def claimed(
    folder: Path, held: str, begun: Iterable[str], *, shared: bool = False, wait: bool = False
) -> Iterator[None]:
    """A folder to work in, created if need be, and locked against a second process.

    If it is new and the block fails before one of the files ``begun`` is in it, nothing of worth
    was done: the folder is deleted, so that it is not in the way of the next attempt.
    """
    new = not folder.exists()
    make_folder(folder)
    try:
        with locked(folder / LOCK, held, shared=shared, wait=wait):
            yield
    except BaseException as error:
        unused = new and not any((folder / name).exists() for name in begun)
        if unused and not isinstance(error, Busy):
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def locked(path: Path, held: str, *, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Hold a lock, as long as the block runs. The system releases it when the process ends, even
    if it is killed: a lock file that is left behind blocks nothing.

    Args:
        path: the lock file. It stays empty.
        held: what the error says if another process holds the lock.
        shared: allow other holders that share it too.
        wait: wait for the lock instead of raising an error.
    """
    try:
        import fcntl
    except ImportError:  # this system has no such locks
        yield
        return
    with contextlib.ExitStack() as stack:
        with _sentences(path):
            # Network file systems lock only what is open to read (shared) or write (exclusive).
            file = stack.enter_context(path.open("a+"))
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise Busy(held) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise LabError(explain(error, path)) from error
            # This file system has no locks: go on without one.
        yield
