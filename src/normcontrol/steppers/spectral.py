"""Passes that follow the largest singular values of matrices in Triton kernels, and multiply them.

They make the rounds of ``mechanisms/power_iteration.py``, with its vectors, for all matrices of a
set in four launches. It is imported where its kernels are used, because it needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from normcontrol.mechanisms.power_iteration import PowerIteration
from normcontrol.scope import Scope
from normcontrol.steppers import spectral_kernels
from normcontrol.steppers.passes import DTYPES, SetPasses
from normcontrol.steppers.tables import Launch

EVEN = spectral_kernels.EVEN.value

ROWS, BLOCK = 8, 256
"""Rows and columns that a program multiplies at a time: 16 elements for every thread."""
TALL = 128
"""Rows of a tile, whose sums of columns go through memory: 1/128 of the elements."""
TILES, COLUMNS = 16, 64
"""Tiles and columns that a program adds at a time."""
AT_ONCE = 1024
"""Elements of a vector that a program divides by its norm at a time."""


def passes_over(
    tensors: Sequence[Tensor], scope: Scope, iteration: PowerIteration | None
) -> SetPasses | None:
    """Return kernels for these tensors; None if there are none for them.

    If ``iteration`` is given, they measure its singular values, provided that the matrices have
    their rows one after the other in memory. Otherwise they multiply what it measures.
    """
    if iteration is not None and all(map(Tensor.is_contiguous, [*tensors, iteration.vectors])):
        return SpectralPasses.made(tensors, scope, iteration)
    return SetPasses.made(tensors, scope)


class SpectralPasses(SetPasses):
    """Measures the largest singular value of every matrix, by a round of power iteration."""

    measures_size = True

    def __init__(self, tensors: Sequence[Tensor], scope: Scope, iteration: PowerIteration) -> None:
        super().__init__(tensors, scope)
        heights = [t.shape[0] for t in tensors]
        lengths = [t.numel() // n for t, n in zip(tensors, heights, strict=True)]
        tiles, blocks = ceil_div(heights, TALL), ceil_div(lengths, COLUMNS)
        partial_sums = [n * length for n, length in zip(tiles, lengths, strict=True)]
        counts = heights, lengths, tiles, partial_sums, blocks
        firsts = [list(accumulate(count, initial=0)) for count in counts]
        fields = heights, lengths, *(first[:-1] for first in firsts)
        on: Any = {"device": self.parts.norms.device}
        shapes = torch.tensor(fields, **on).T.contiguous()
        new_zeros = iteration.vectors.new_zeros
        lefts, rights, left_squares, partials = (new_zeros(first[-1]) for first in firsts[:4])
        right_squares = self.parts.norms.new_zeros(firsts[4][-1])
        ps = torch.tensor(self.addresses, **on)
        alike: dict[Any, list[int]] = {}
        for i, t in enumerate(tensors):
            even = t.data_ptr() % 16 == 0 and lengths[i] % EVEN == 0
            alike.setdefault((t.dtype, even), []).append(i)
        left, right = [], []
        for (dtype, even), some in alike.items():
            constants: Any = {"P": DTYPES[dtype], "ALIGNED": even}
            rows = chunks_of(some, ceil_div(heights, ROWS)).to(**on)
            left.append(
                Launch(
                    spectral_kernels.left_products, len(rows),
                    (ps, shapes, rows, iteration.vectors, lefts),
                    **constants, ROWS=ROWS, BLOCK=BLOCK,
                )
            )  # fmt: skip
            across = ceil_div(lengths, BLOCK)
            of_tiles = [n * m for n, m in zip(tiles, across, strict=True)]
            parts = chunks_of(some, of_tiles).to(**on)
            right.append(
                Launch(
                    spectral_kernels.right_partials, len(parts),
                    (ps, shapes, parts, lefts, partials, left_squares, len(parts)),
                    **constants, TALL=TALL, ROWS=ROWS, BLOCK=BLOCK,
                )
            )  # fmt: skip
        everyone = chunks_of(list(range(len(tensors))), blocks).to(**on)
        add = Launch(
            spectral_kernels.add_partials, len(everyone),
            (shapes, everyone, partials, rights, right_squares),
            TALL=TALL, TILES=TILES, COLUMNS=COLUMNS,
        )  # fmt: skip
        finish = Launch(
            spectral_kernels.finish_round, len(tensors),
            (
                shapes, left_squares, right_squares, rights, iteration.others, iteration.vectors,
                self.parts.norms,
            ),
            TALL=TALL, COLUMNS=COLUMNS, BLOCK=AT_ONCE,
        )  # fmt: skip
        self.round = *left, *reversed(right), add, finish
        """The launches of a round, in their order."""

    def measure(self) -> Tensor:
        """Make one round for every matrix; return the singular values."""
        with self.parts.on_device:
            for launch in self.round:
                launch()
        return self.parts.norms


def ceil_div(counts: Sequence[int], by: int) -> list[int]:
    """Return how many pieces of a length each count has.

    >>> ceil_div([1, 8, 9], 8)
    [1, 1, 2]
    """
    return [-(-n // by) for n in counts]


def chunks_of(matrices: list[int], counts: Sequence[int]) -> Tensor:
    """Return a row for every chunk of these matrices: the matrix, and the chunk's index in it.

    >>> chunks_of([0, 2], [1, 5, 2]).tolist()
    [[0, 0], [2, 0], [2, 1]]
    """
    pairs = [(i, chunk) for i in matrices for chunk in range(counts[i])]
    return torch.tensor(pairs, dtype=torch.int32, device="cpu")
