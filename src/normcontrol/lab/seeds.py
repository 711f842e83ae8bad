"""Random generators from seeds. Every integer is a seed, and no two give the same numbers.

The generators take fewer seeds than there are integers. torch's generator for CPUs uses the low 32
bits of a seed alone, and a word of Philox's key has 64 bits. So a seed of 32 bits is used as it is,
and any other, a negative one for example, through a hash that is long enough.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

PLAIN = 1 << 32
"""Seeds from 0 up to this one, without it, are used as they are."""

WORDS = slice(24, 24 + 8 * 624)
"""Where the 624 words of the Mersenne Twister are in the bytes of torch's state: after the seed and
the counters, 8 bytes for each."""


def for_numpy(seed: int, stream: int) -> np.random.Generator:
    """The generator of one of the streams of a seed."""
    low, high = (seed, 0) if _plain(seed) else _hashed(seed, "<u8")[:2]
    key = np.array([low, high ^ stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def for_torch(seed: int) -> torch.Generator:
    """torch's generator of a seed, on the CPU."""
    generator = torch.Generator().manual_seed(seed % PLAIN)
    if not _plain(seed):
        # manual_seed knows 2^32 states. NumPy makes one of the others from a longer seed.
        words = np.random.MT19937(_hashed(seed, "<u4")).state["state"]["key"]
        state = generator.get_state()
        state[WORDS].view(torch.int64).copy_(torch.from_numpy(words.astype(np.int64)))
        generator.set_state(state)
    return generator


def mixed(seed: int, *numbers: int) -> int:
    """A seed for ``torch.manual_seed`` that depends on a seed and on other numbers."""
    return hash((seed if _plain(seed) else _hashed(seed, "<u8")[0], *numbers)) % (1 << 63)


def _plain(seed: int) -> bool:
    return 0 <= seed < PLAIN


def _hashed(seed: int, words: str) -> list[int]:
    """The 256 bits of a hash of a seed, as words of the given type."""
    found: list[int] = np.frombuffer(
        hashlib.sha256(hex(seed).encode()).digest(), dtype=words
    ).tolist()
    return found
