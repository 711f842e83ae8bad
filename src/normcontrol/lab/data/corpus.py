"""Sources of text: files, folders, Hugging Face datasets and the embedded corpus. Each is read as a
stream of documents, cut into pieces that fit in memory many times. It may not know about tokens.

Reading can start again at any piece. The ``fingerprint`` of a source shows whether it has changed.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from normcontrol.lab.errors import LabError

PIECE = 1 << 16
"""Length of a piece in characters. A longer document is cut at the next place where the cut does
not change its tokens."""

LONGEST = 64 * PIECE
"""Length at which a document without such a place (a very long line) is cut anyway, to bound the
memory."""

TEXT, TABLES = (".txt", ".md", ".rst", ".py", ".text"), (".jsonl", ".parquet")

# A line break without other white space around it. Tokenizers split the text into words before they
# encode it, and no word extends over such a line break. Of the two characters of a line break of
# Windows each is a word.
CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S\r)(?=\n\S)")


class Piece(NamedTuple):
    """A part of a document."""

    text: str
    last: bool  # True for the last piece of a document


class Source:
    """A list of files that contain text. ``column`` is the key of the text in jsonl and parquet."""

    def __init__(self, name: str, files: list[Path], column: str = "text") -> None:
        self.name, self.files, self.column = name, files, column

    @property
    def size(self) -> int:
        """Total size of the files in bytes, for the display of progress."""
        return sum(path.stat().st_size for path in self.files)

    def fingerprint(self) -> str:
        """A hash of the column, and of the names and sizes of the files."""
        listing = "\n".join(f"{path.name} {path.stat().st_size}" for path in self.files)
        content = f"{self.column}\n{listing}".encode(errors="surrogateescape")
        return hashlib.sha256(content).hexdigest()[:16]

    def documents(self) -> Iterator[tuple[Iterator[str], int]]:
        """Every document as blocks of text, with the number of bytes of the source up to the end of
        its file."""
        done = 0
        for path in self.files:
            done += path.stat().st_size
            if path.suffix not in TABLES:
                yield _blocks(path), done
                continue
            read = _parquet if path.suffix == ".parquet" else _jsonl
            yield from ((iter((text,)), done) for text in read(path, self.column))

    def pieces(self) -> Iterator[tuple[Piece, int]]:
        """All documents, cut into pieces. Empty documents are skipped."""
        for blocks, done in self.documents():
            previous = ""
            for text in cut(blocks):
                if previous:
                    yield Piece(previous, False), done
                previous = text
            if previous:
                yield Piece(previous, True), done


def cut(blocks: Iterator[str]) -> Iterator[str]:
    """Join blocks of text and cut the result into pieces of about PIECE characters, at places that
    no token extends over.

    >>> text = "a line\\n" * 100_000
    >>> pieces = list(cut(iter([text])))
    >>> len(pieces) > 1, "".join(pieces) == text
    (True, True)
    """
    rest = ""
    for block in blocks:
        rest += block
        start = 0
        while len(rest) - start > PIECE:
            place = CUT.search(rest, start + PIECE)
            if place is None and len(rest) - start < LONGEST:
                break
            end = place.start() if place else start + PIECE
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest:
        yield rest


OPENWEBTEXT = "hf:Skylion007/openwebtext@7577b918bd30b25df0b88bb718dc8a6c80cb619b"
"""The data of the paper, as parquet. The revision is the first one with all 80 files."""


def source(given: str, column: str = "text") -> Source:
    """The source that ``given`` names: "python", "openwebtext", "hf:owner/name@revision", a file or
    a folder."""
    if given == "python":
        return embedded()
    if given == "openwebtext" and not Path(given).exists():
        given = OPENWEBTEXT
    if given.startswith("hf:"):
        return hugging_face(given[3:], column)
    path = Path(given).expanduser()
    if not path.exists():
        raise LabError(
            f"There is no file or folder {given!r}. Give a text, jsonl or parquet file, a folder "
            "of those, python, or hf:NAME."
        )
    if not path.is_file() and not path.is_dir():
        raise LabError(
            f"{path} is a pipe or a device, and the text is read more than once. Write it to a "
            "file first."
        )
    if path.is_file():
        files = [path]
        if path.suffix not in (*TEXT, *TABLES):
            raise LabError(
                f"{path} ends in {path.suffix!r}, but only files that end in "
                f"{', '.join((*TEXT, *TABLES))} are read. Rename or convert it."
            )
    else:
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in (*TEXT, *TABLES))
        if not files:
            raise LabError(
                f"There is no text in the folder {path}: no file in it ends in "
                f"{', '.join((*TEXT, *TABLES))}."
            )
    if len(files) == 1 and files[0].stat().st_size == 0:
        raise LabError(f"{files[0]} is empty: it contains no text to train on.")
    return Source(str(path), files, column)


def embedded() -> Source:
    """The sources and docs of the standard library of the running Python, without its tests. Every
    machine has this text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "lib-dynload",
    }
    files = [
        p
        for p in root.rglob("*")
        if p.suffix in (".py", ".txt", ".rst") and not excluded & set(p.relative_to(root).parts)
    ]
    if not files:
        raise LabError(
            f"This Python has no sources of its standard library in {root}. Give another text with "
            "--data."
        )
    return Source(f"python {sys.version.split()[0]}", sorted(files))


def hugging_face(given: str, column: str) -> Source:
    """The parquet files of a dataset on the Hugging Face hub, at a fixed revision. They are stored
    in the cache of the hub."""
    from huggingface_hub import HfApi, hf_hub_download

    name, _, revision = given.partition("@")
    try:
        info = HfApi().dataset_info(name, revision=revision or None)
        names = sorted(f.rfilename for f in info.siblings or [] if f.rfilename.endswith(".parquet"))
        if not names:
            raise LabError(
                f"The dataset {name} has no parquet files at {info.sha}. Try the revision "
                "refs/convert/parquet."
            )
        files = [
            Path(hf_hub_download(name, f, repo_type="dataset", revision=info.sha)) for f in names
        ]
    except LabError:
        raise
    except Exception as error:
        raise LabError(
            f"The dataset {name} could not be fetched ({type(error).__name__}: {error}). Check the "
            "network and the name, or give local files."
        ) from None
    return Source(f"hf:{name}@{info.sha}", files, column)


def _blocks(path: Path) -> Iterator[str]:
    """A text file, decoded as UTF-8, block by block, without a byte order mark."""
    decoder, mark = codecs.getincrementaldecoder("utf-8")(), len(codecs.BOM_UTF8)
    with path.open("rb") as file:
        at = mark if file.read(mark) == codecs.BOM_UTF8 else 0
        file.seek(at)
        while block := file.read(1 << 20):
            yield _decoded(decoder, block, at, path, final=False)
            at += len(block)
        yield _decoded(decoder, b"", at, path, final=True)


def _decoded(
    decoder: codecs.IncrementalDecoder, block: bytes, at: int, path: Path, final: bool
) -> str:
    pending = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise LabError(
            f"{path} is not UTF-8: byte {at - pending + error.start:,} is 0x{byte:02x}. Convert "
            "the file (iconv -t utf-8), or remove it."
        ) from None


def _jsonl(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[column]
            except UnicodeDecodeError as error:
                raise LabError(
                    f"{path}, line {number}, is not UTF-8 at its byte {error.start}. Convert the "
                    "file, or remove it."
                ) from None
            except (ValueError, KeyError, TypeError, RecursionError):
                raise LabError(
                    f"{path}, line {number}, is not a JSON object with the text under {column!r}. "
                    "Give its key as --column."
                ) from None
            yield _text(text, column, f"{path}, line {number},")


def _parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise LabError(f"{path} is not a parquet file ({error}).") from None
    if column not in table.schema_arrow.names:
        raise LabError(
            f"{path} has the columns {', '.join(table.schema_arrow.names)}, and none named "
            f"{column!r}. Give one as --column."
        )
    row = 0
    try:
        for batch in table.iter_batches(batch_size=256, columns=[column]):
            for value in batch.column(0):
                row += 1
                yield _text(value.as_py(), column, f"{path}, row {row},")
    except UnicodeDecodeError as error:
        raise LabError(
            f"{path}, row {row}, is not UTF-8 at its byte {error.start}. Convert or remove it."
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise LabError(
            f"{path} cannot be read after row {row} ({error}). Copy it again, or remove it."
        ) from None


def _text(value: Any, column: str, where: str) -> str:
    """The text of a document, if it is one."""
    if not isinstance(value, str):
        given = "null" if value is None else f"{str(value)[:40]} ({type(value).__name__})"
        raise LabError(
            f"{where} has {given} under {column!r}, where a text is needed. Give another key or "
            "column as --column, or remove it."
        )
    check_unicode(value, where)
    return value


def check_unicode(text: str, where: str) -> None:
    """Raise :class:`LabError` for a text that no encoding can store: one with half of a surrogate
    pair, which JSON's escapes can contain."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise LabError(
            f"{where} has the lone surrogate U+{code:04X} at character {error.start}, which is "
            "half of a character. Replace or remove it."
        ) from None
