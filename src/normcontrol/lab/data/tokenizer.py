"""Tokenizers: GPT-2's BPE (tiktoken), bytes, or a BPE trained on the corpus (tokenizers).

Each converts text to a numpy array of ids, and has one id that marks the end of a document. A
trained tokenizer is stored with the data, so that ids can be decoded later. This file may not know
about sources of text or shards.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from normcontrol.lab.errors import LabError, nearest
from normcontrol.lab.files import read_text, sha256, write_text

Ids = npt.NDArray[Any]


class Tokenizer(Protocol):
    """The interface of all tokenizers. ``end`` is the id that marks the end of a document."""

    name: str
    size: int
    end: int

    def encode(self, text: str) -> Ids: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, folder: Path) -> None: ...


class Bytes:
    """Every byte of UTF-8 is a token. 256 marks the end of a document."""

    name, size, end = "bytes", 257, 256

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        """Do nothing: the name is enough to make it again."""


class GPT2:
    """GPT-2's BPE with 50,257 tokens. tiktoken downloads it once, or reads it from
    ``TIKTOKEN_CACHE_DIR``."""

    name, size, end = "gpt2", 50257, 50256

    def __init__(self) -> None:
        import tiktoken

        try:
            self.bpe = tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken raises errors of many types from the network library
            raise LabError(
                f"GPT-2's BPE could not be loaded ({type(error).__name__}): tiktoken downloads it "
                "once. Check the network, set TIKTOKEN_CACHE_DIR to a folder that contains it, or "
                "use the tokenizer bytes or bpe:1024."
            ) from None

    def encode(self, text: str) -> Ids:
        # encode_ordinary would return a list of Python integers, which takes longer to build than
        # the encoding itself.
        return self.bpe.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        return self.bpe.decode([i for i in ids if i < self.size])

    def save(self, folder: Path) -> None:
        """Do nothing: the name is enough to make it again."""


class Trained:
    """A byte-level BPE trained on the corpus. It can encode every text."""

    FILE = "tokenizer.json"
    END = "<|endoftext|>"

    def __init__(self, bpe: Any) -> None:
        self.bpe = bpe
        # The text "<|endoftext|>" in a document is text, as with GPT-2's BPE, and not its end.
        bpe.encode_special_tokens = True
        self.size = bpe.get_vocab_size()
        self.end = bpe.token_to_id(self.END)
        self.name = f"bpe:{self.size}"

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> Trained:
        """Train a BPE with ``size`` tokens on the texts."""
        import tokenizers

        if not 257 <= size <= 1 << 20:
            raise LabError(
                f"tokenizer=bpe:{size}: a byte-level BPE has at least the 256 bytes and an end of "
                "document, and at most 2^20 tokens. Give a size from 257 to 1048576."
            )
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[cls.END],
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        bpe.train_from_iterator(texts, trainer)
        return cls(bpe)

    @classmethod
    def load(cls, folder: Path, digest: str | None = None) -> Trained:
        """Load the tokenizer that :meth:`save` stored in a folder. ``digest`` is the checksum that
        its file must have, if it is known."""
        import tokenizers

        path = folder / cls.FILE
        if not path.exists():
            raise LabError(
                f"{folder} was made with a trained BPE, but its {cls.FILE} is missing. Restore it, "
                "or prepare the data again."
            )
        try:
            if digest not in (None, sha256(path)):
                raise ValueError("its checksum differs")
            return cls(tokenizers.Tokenizer.from_str(read_text(path)))
        except LabError:
            raise
        except Exception as error:  # tokenizers raises plain exceptions
            raise LabError(
                f"The tokenizer {path} was changed after it was written ({error}). Restore it from "
                "a copy, or prepare the data again."
            ) from None

    def encode(self, text: str) -> Ids:
        return np.asarray(self.bpe.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return self.bpe.decode([i for i in ids if i < self.size])

    def save(self, folder: Path) -> None:
        write_text(folder / self.FILE, self.bpe.to_str(pretty=True))


def make(name: str, texts: Iterable[str]) -> Tokenizer:
    """A tokenizer by name. The ``texts`` are read only if it has to be trained.

    >>> make("bytes", ()).encode("hi").tolist()
    [104, 105]
    """
    # Without this, tokenizers warns about threads after a fork. The laboratory does not fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if name == "bytes":
        return Bytes()
    if name == "gpt2":
        return GPT2()
    kind, _, size = name.partition(":")
    if kind == "bpe" and size.isdecimal():
        return Trained.train(texts, int(size))
    raise LabError(
        f"There is no tokenizer {name!r}. {nearest(name, ['gpt2', 'bytes', 'bpe:1024'])}"
    )


def stored(name: str, folder: Path, digest: str | None = None) -> Tokenizer:
    """The tokenizer with which the data in ``folder`` was made. ``digest`` is the checksum of its
    file, if it is known."""
    return Trained.load(folder, digest) if name.startswith("bpe:") else make(name, ())


def digest(folder: Path) -> str | None:
    """The checksum of the file of a trained tokenizer; None if there is none in the folder."""
    path = folder / Trained.FILE
    return sha256(path) if path.exists() else None
