"""Tokenizers: GPT-2's BPE (tiktoken), plain bytes, or a BPE trained on the corpus (tokenizers).

Each turns texts into numpy arrays of ids, has one id that ends a document, and is stored with the
data it made, so that a sample can be read back without knowing how the data was prepared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from normcontrol.lab.errors import LabError, nearest

Ids = npt.NDArray[Any]


class Tokenizer(Protocol):
    """What the laboratory needs of a tokenizer."""

    name: str
    size: int
    end: int

    def encode(self, text: str) -> Ids: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, folder: Path) -> None: ...


class Bytes:
    """Every byte of UTF-8 is a token; 256 ends a document."""

    name, size, end = "bytes", 257, 256

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        """Its name says all."""


class GPT2:
    """GPT-2's own BPE, of 50,257 tokens. tiktoken fetches it once, or reads it from
    ``TIKTOKEN_CACHE_DIR``."""

    name, size, end = "gpt2", 50257, 50256

    def __init__(self) -> None:
        import tiktoken

        try:
            self._bpe = tiktoken.get_encoding("gpt2")
        except Exception as error:  # requests' errors are many, and tiktoken lets them through
            raise LabError(
                f"GPT-2's BPE could not be loaded ({type(error).__name__}): tiktoken fetches it "
                "from the network once. Go online, point "
                "TIKTOKEN_CACHE_DIR at a folder that holds it, or use the tokenizer bytes or "
                "bpe:1024."
            ) from None

    def encode(self, text: str) -> Ids:
        # Straight to an array: lists of Python integers, as encode_ordinary makes them, cost more
        # than the encoding.
        return self._bpe.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        return self._bpe.decode([i for i in ids if i < self.size])

    def save(self, folder: Path) -> None:
        """Its name says all."""


class Trained:
    """A byte-level BPE trained on the corpus itself; no text is outside its vocabulary."""

    FILE = "tokenizer.json"
    END = "<|endoftext|>"

    def __init__(self, bpe: Any) -> None:
        self._bpe = bpe
        self.size = bpe.get_vocab_size()
        self.end = bpe.token_to_id(self.END)
        self.name = f"bpe:{self.size}"

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> Trained:
        """Learn ``size`` tokens from texts."""
        import tokenizers

        if not 257 <= size <= 1 << 20:
            raise LabError(
                f"tokenizer=bpe:{size}: a byte-level BPE holds the 256 bytes and an end of "
                "document at least. Give 257 or more."
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
    def load(cls, folder: Path) -> Trained:
        import tokenizers

        path = folder / cls.FILE
        if not path.exists():
            raise LabError(
                f"{folder} was made with a trained BPE, but its {cls.FILE} is gone: restore it, or "
                "prepare the data again."
            )
        return cls(tokenizers.Tokenizer.from_file(str(path)))

    def encode(self, text: str) -> Ids:
        return np.asarray(self._bpe.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return self._bpe.decode([i for i in ids if i < self.size])

    def save(self, folder: Path) -> None:
        self._bpe.save(str(folder / self.FILE))


def make(name: str, texts: Iterable[str]) -> Tokenizer:
    """A tokenizer by name; ``texts`` are only read if one is to be trained.

    >>> make("bytes", ()).encode("hi").tolist()
    [104, 105]
    """
    # tokenizers warns about threads after a fork; we never fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if name == "bytes":
        return Bytes()
    if name == "gpt2":
        return GPT2()
    kind, _, size = name.partition(":")
    if kind == "bpe" and size.isdigit():
        return Trained.train(texts, int(size))
    raise LabError(
        f"There is no tokenizer {name!r}. {nearest(name, ['gpt2', 'bytes', 'bpe:1024'])}"
    )


def stored(name: str, folder: Path) -> Tokenizer:
    """The tokenizer that data in ``folder`` was made with."""
    return Trained.load(folder) if name.startswith("bpe:") else make(name, ())
