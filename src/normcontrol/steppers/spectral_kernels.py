"""The Triton kernels of a round of power iteration, for many matrices in a few launches.

For a matrix W and its vector v, ``left_products`` writes u = W v, and ``right_partials`` what the
rows of each tile add to W^T u; ``add_partials`` sums the tiles. The norm of u is divided out at the
end, in ``finish_round``, which writes the singular value ``||W^T u|| / ||u||`` and the next v. All
sums are in a fixed order, as in ``pass_kernels``. How often and for what a round is made is not
known here.

``shapes`` has the fields below of every matrix, in int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normcontrol.steppers.pass_kernels import pointer_at

HEIGHT, LENGTH = tl.constexpr(0), tl.constexpr(1)
"""How many rows a matrix has, and how many columns."""
FIRST_ROW, FIRST_COLUMN = tl.constexpr(2), tl.constexpr(3)
"""Where its u and its v begin, among those of all matrices."""
FIRST_TILE, FIRST_PARTIAL, FIRST_BLOCK = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
"""Where its tiles, their sums of columns, and its blocks of columns begin."""
FIELDS = tl.constexpr(7)
EVEN = tl.constexpr(8)
"""Aligned rows begin at multiples of this many elements: 16 bytes of the smallest dtype."""


@triton.jit
def length_of(shape, ALIGNED: tl.constexpr):
    length = tl.load(shape + LENGTH).to(tl.int32)
    if ALIGNED:
        length = tl.multiple_of(length, EVEN)
    return length


@triton.jit
def left_products(
    ps, shapes, chunks, vectors, lefts,
    P: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply a few rows of a matrix by its vector."""
    program = tl.program_id(0)
    matrix = tl.load(chunks + 2 * program)
    shape = shapes + FIELDS * matrix
    length = length_of(shape, ALIGNED)
    row = tl.load(chunks + 2 * program + 1) * ROWS + tl.arange(0, ROWS)
    exists = row < tl.load(shape + HEIGHT)
    p_rows = pointer_at(ps, matrix, P, ALIGNED) + row.to(tl.int64)[:, None] * length
    vector = vectors + tl.load(shape + FIRST_COLUMN)
    products = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in range(0, length, BLOCK):
        column = i + tl.arange(0, BLOCK)
        inside = column < length
        p = tl.load(p_rows + column[None, :], exists[:, None] & inside[None, :], other=0.0)
        products += p.to(tl.float32) * tl.load(vector + column, inside, other=0.0)[None, :]
    left = lefts + tl.load(shape + FIRST_ROW)
    tl.store(left + row, tl.sum(products, axis=1), exists)


@triton.jit
def right_partials(
    ps, shapes, chunks, lefts, partials, left_squares, n_chunks,
    P: tl.constexpr, ALIGNED: tl.constexpr, TALL: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the TALL rows of a tile, each times its element of u, in one block of columns.

    The order is from the last chunk to the first, because the cache has the last ones.
    """
    program = n_chunks - 1 - tl.program_id(0)
    matrix = tl.load(chunks + 2 * program)
    index = tl.load(chunks + 2 * program + 1)
    shape = shapes + FIELDS * matrix
    length = length_of(shape, ALIGNED)
    blocks = tl.cdiv(length, BLOCK)
    tile, block = index // blocks, index % blocks
    first = tile.to(tl.int64) * TALL
    last = tl.minimum(tl.load(shape + HEIGHT), first + TALL)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < length
    p_ptr = pointer_at(ps, matrix, P, ALIGNED)
    left = lefts + tl.load(shape + FIRST_ROW)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for i in tl.range(first, last, ROWS, loop_unroll_factor=4):
        row = i + tl.arange(0, ROWS)
        exists = row < last
        u = tl.load(left + row, exists, other=0.0)
        offsets = row[:, None] * length + column[None, :]
        p = tl.load(p_ptr + offsets, exists[:, None] & inside[None, :], other=0.0)
        sums += p.to(tl.float32) * u[:, None]
        squares += u * u
    partial = partials + tl.load(shape + FIRST_PARTIAL) + tile.to(tl.int64) * length
    tl.store(partial + column, tl.sum(sums, axis=0), inside)
    if block == 0:
        tl.store(left_squares + tl.load(shape + FIRST_TILE) + tile, tl.sum(squares))


@triton.jit
def add_partials(
    shapes, chunks, partials, rights, right_squares,
    TALL: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum what the tiles add to one block of columns, in float64."""
    program = tl.program_id(0)
    shape = shapes + FIELDS * tl.load(chunks + 2 * program)
    length = tl.load(shape + LENGTH)
    tiles = tl.cdiv(tl.load(shape + HEIGHT), TALL)
    column = tl.load(chunks + 2 * program + 1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < length
    partial = partials + tl.load(shape + FIRST_PARTIAL)
    total = tl.zeros((TILES, COLUMNS), tl.float64)
    for i in range(0, tiles, TILES):
        tile = i + tl.arange(0, TILES)
        offsets = tile[:, None] * length + column[None, :]
        exists = (tile < tiles)[:, None] & inside[None, :]
        total += tl.load(partial + offsets, exists, other=0.0).to(tl.float64)
    right = tl.sum(total, axis=0)
    tl.store(rights + tl.load(shape + FIRST_COLUMN) + column, right.to(tl.float32), inside)
    tl.store(right_squares + program, tl.sum(right * right))


@triton.jit
def root_of_sum(squares, count, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    for i in range(0, count, BLOCK):
        at = i + tl.arange(0, BLOCK)
        total += tl.load(squares + at, at < count, other=0.0).to(tl.float64)
    return tl.sqrt(tl.sum(total))


@triton.jit
def finish_round(
    shapes, left_squares, right_squares, rights, others, vectors, values,
    TALL: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the singular value of one matrix and its next vector.

    A matrix of zeros, or not finite, has none: its weights are left alone at this step, and the
    next one begins with another vector.
    """
    matrix = tl.program_id(0)
    shape = shapes + FIELDS * matrix
    length, first = tl.load(shape + LENGTH), tl.load(shape + FIRST_COLUMN)
    tiles, blocks = tl.cdiv(tl.load(shape + HEIGHT), TALL), tl.cdiv(length, COLUMNS)
    left = root_of_sum(left_squares + tl.load(shape + FIRST_TILE), tiles, BLOCK)
    right = root_of_sum(right_squares + tl.load(shape + FIRST_BLOCK), blocks, BLOCK)
    value = right / left
    tl.store(values + matrix, value)
    found = (value > 0) & (value < float("inf"))
    for i in range(0, length, BLOCK):
        column = i + tl.arange(0, BLOCK)
        inside = column < length
        unit = tl.load(rights + first + column, inside, other=0.0).to(tl.float64) / right
        other = tl.load(others + first + column, inside, other=0.0)
        vector = tl.where(found, unit.to(tl.float32), other)
        tl.store(vectors + first + column, vector, inside)
