"""The Triton kernels that measure weights and multiply them, many tensors in one launch.

They reach tensors through tables of addresses and divide them into chunks, one program each. Sums
go through memory in a fixed order, never through atomics, so that the same step gives the same
bits. Between the two passes ``settle`` applies the law to the norms.
"""

from __future__ import annotations

from types import FunctionType

import triton
import triton.language as tl

from normcontrol.law import proportional
from normcontrol.steppers.stepper import next_scale
from normcontrol.weights.rounding_kernels import round_at_random, seed_of

# The same functions as in Python, with the names that Triton's interpreter looks for.
guess = triton.jit(FunctionType(next_scale.__code__, globals(), "next_scale"))
law = triton.jit(FunctionType(proportional.__code__, globals(), "proportional"))


@triton.jit
def pointer_at(table, index, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + index).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


LANES = tl.constexpr(16)


@triton.jit
def chunk_start(chunk, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Return the position of a chunk's first block.

    Sixteen chunks are interleaved block by block, in strides of sixteen blocks. Programs that run
    at the same time then work on neighbouring memory, which is fastest, for any length of a chunk.
    """
    chunk = chunk.to(tl.int64)
    return chunk // LANES * LANES * CHUNK + chunk % LANES * BLOCK


@triton.jit
def sum_squares(
    numels, chunks, partials, ps,
    P: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum the squares of one chunk of weights or gradients."""
    program = tl.program_id(0)
    tensor = tl.load(chunks + 2 * program)
    start = chunk_start(tl.load(chunks + 2 * program + 1), BLOCK, CHUNK)
    numel = tl.load(numels + tensor)
    p_ptr = pointer_at(ps, tensor, P, ALIGNED)
    squares = tl.zeros((BLOCK,), tl.float32)
    if start + (CHUNK - BLOCK) * LANES + BLOCK <= numel:
        for i in tl.range(0, CHUNK * LANES, BLOCK * LANES, loop_unroll_factor=4):
            p = tl.load(p_ptr + start + i + tl.arange(0, BLOCK)).to(tl.float32)
            squares += p * p
    else:
        for i in range(0, tl.minimum(numel - start, CHUNK * LANES).to(tl.int32), BLOCK * LANES):
            offsets = start + i + tl.arange(0, BLOCK)
            p = tl.load(p_ptr + offsets, offsets < numel, other=0.0).to(tl.float32)
            squares += p * p
    tl.store(partials + program, tl.sum(squares))


@triton.jit
def finish_norms(
    partials, firsts, slots, norms, factors, found_inf,
    AFTER: tl.constexpr, HAS_INF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the norm of one tensor into its slot, from the sums of its chunks, in float64.

    Where the weights were written AFTER a multiplication, it is the norm without it.
    """
    tensor = tl.program_id(0)
    slot = tl.load(slots + tensor)
    if slot >= 0:
        first, last = tl.load(firsts + tensor), tl.load(firsts + tensor + 1)
        total = tl.zeros((BLOCK,), tl.float64)
        for i in range(first, last, BLOCK):
            at = i + tl.arange(0, BLOCK)
            total += tl.load(partials + at, at < last, other=0.0).to(tl.float64)
        norm = tl.sqrt(tl.sum(total))
        if AFTER:
            factor = tl.load(factors + slot).to(tl.float64)
            if HAS_INF:
                factor = tl.where(tl.load(found_inf) == 0, factor, 1.0)
            norm = norm / factor
        tl.store(norms + slot, norm)


@triton.jit
def scale_by_law(norm, target, rate, skip, HAS_INF: tl.constexpr):
    """Return the scale that the law gives; 1 if it cannot give one, see ``groups/sets.py``."""
    scale = law(norm, target, rate)
    finite = (tl.abs(scale) < float("inf")) & (tl.abs(norm) < float("inf"))
    scale = tl.where(finite, scale, 1.0)
    if HAS_INF:
        scale = tl.where(skip == 0, scale, 1.0)
    return scale


@triton.jit
def settle(
    norms, factors, lasts, corrections, needed, tolerance, first, n, scales, targets, rate,
    found_inf, LAW: tl.constexpr, JOINT: tl.constexpr, GUESSED: tl.constexpr, HAS_INF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the factors of ``n`` parts, by the LAW from their norms, or as ``scales`` has them.

    If the weights were written with a GUESSED factor, the next pass corrects what it missed by more
    than ``tolerance``, and the factors of the next step are guessed from the last two and the rate.
    JOINT parts have one norm, target and scale.
    """
    skip = tl.load(found_inf) if HAS_INF else 0.0
    squares = tl.zeros((BLOCK,), tl.float64)
    if LAW and JOINT:
        for i in range(0, n, BLOCK):
            at = i + tl.arange(0, BLOCK)
            part = tl.load(norms + first + at, at < n, other=0.0)
            squares += part * part
    joint = tl.sqrt(tl.sum(squares))
    any_needed = 0
    for i in range(0, n, BLOCK):
        at = i + tl.arange(0, BLOCK)
        inside = at < n
        slot = first + at
        place = at * 0 if JOINT else at
        if LAW:
            norm = joint + 0.0 * at if JOINT else tl.load(norms + slot, inside, other=1.0)
            target = tl.load(targets + place, inside, other=1.0)
            asked = scale_by_law(norm, target, tl.load(rate), skip, HAS_INF)
            tl.store(scales + place, asked, inside & (at < 1) if JOINT else inside)
        else:
            asked = tl.load(scales + place, inside, other=1.0)
        missed = asked
        large = asked.to(tl.float32) != 1.0
        if GUESSED:
            factor = tl.load(factors + slot, inside, other=1.0)
            last = tl.load(lasts + slot, inside, other=1.0)
            missed = asked / factor.to(tl.float64)
            following = guess(asked, last, tl.load(rate)).to(tl.float32)
            if HAS_INF:  # nothing was written: the guess stays as it is
                missed, asked = tl.where(skip == 0, missed, 1.0), tl.where(skip == 0, asked, last)
                following = tl.where(skip == 0, following, factor)
            large = tl.abs(missed - 1.0) > tolerance
            tl.store(factors + slot, following, inside)
            tl.store(lasts + slot, asked, inside)
        tl.store(corrections + slot, tl.where(large, missed, 1.0).to(tl.float32), inside)
        any_needed = tl.maximum(any_needed, tl.max((large & inside).to(tl.int32)))
    tl.store(needed, any_needed)


@triton.jit
def scale(
    ps, numels, slots, chunks, factors, needed, n_chunks, control_step,
    DROPPED: tl.constexpr, P: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Multiply weights by their tensors' factors, if ``needed`` is set and the factor is not 1.

    The order is from the last chunk to the first, because the cache has the last ones.
    """
    if tl.load(needed) != 0:
        for done in range(tl.program_id(0), n_chunks, tl.num_programs(0)):
            program = n_chunks - 1 - done
            tensor = tl.load(chunks + 2 * program)
            slot = tl.load(slots + tensor)
            factor = tl.load(factors + slot, slot >= 0, other=1.0)
            if factor != 1.0:
                start = chunk_start(tl.load(chunks + 2 * program + 1), BLOCK, CHUNK)
                numel = tl.load(numels + tensor)
                p_ptr = pointer_at(ps, tensor, P, ALIGNED)
                seed = seed_of(control_step, slot, 0) if DROPPED > 0 else 0
                if start + (CHUNK - BLOCK) * LANES + BLOCK <= numel:
                    for i in tl.range(0, CHUNK * LANES, BLOCK * LANES, loop_unroll_factor=4):
                        offsets = start + i + tl.arange(0, BLOCK)
                        p = tl.load(p_ptr + offsets).to(tl.float32) * factor
                        if DROPPED > 0:
                            p = round_at_random(p, offsets, seed, DROPPED)
                        tl.store(p_ptr + offsets, p.to(P))
                else:
                    for i in range(
                        0, tl.minimum(numel - start, CHUNK * LANES).to(tl.int32), BLOCK * LANES
                    ):
                        offsets = start + i + tl.arange(0, BLOCK)
                        p = tl.load(p_ptr + offsets, offsets < numel).to(tl.float32) * factor
                        if DROPPED > 0:
                            p = round_at_random(p, offsets, seed, DROPPED)
                        tl.store(p_ptr + offsets, p.to(P), offsets < numel)


@triton.jit
def rows(
    ps, numels, slots, chunks, indices, norms, factors, length, n_chunks,
    scales, targets, rate, found_inf, control_step,
    MEASURE: tl.constexpr, LAW: tl.constexpr, MULTIPLY: tl.constexpr, HAS_INF: tl.constexpr,
    DROPPED: tl.constexpr, P: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """MEASURE a few rows of ``length`` elements each, apply the LAW, and MULTIPLY them.

    All at once they need one pass: what is read a second time is in the cache. Without the law, the
    rows are multiplied by ``factors``; then the order is from the last rows to the first.
    """
    program = tl.program_id(0) if MEASURE else n_chunks - 1 - tl.program_id(0)
    tensor = tl.load(chunks + 2 * program)
    row = tl.load(chunks + 2 * program + 1) + tl.arange(0, ROWS)
    exists = row < tl.load(numels + tensor) // length
    part = tl.load(slots + tensor) + row
    p_ptr = pointer_at(ps, tensor, P, ALIGNED)
    if MEASURE:
        squares = tl.zeros((ROWS, BLOCK), tl.float32)
        for i in range(0, length, BLOCK):
            column = i + tl.arange(0, BLOCK)
            offsets = row.to(tl.int64)[:, None] * length + column[None, :]
            inside = exists[:, None] & (column < length)[None, :]
            p = tl.load(p_ptr + offsets, inside, other=0.0).to(tl.float32)
            squares += p * p
        norm = tl.sqrt(tl.sum(squares, axis=1).to(tl.float64))
        tl.store(norms + part, norm, exists)
    if LAW:
        skip = tl.load(found_inf) if HAS_INF else 0.0
        target = tl.load(targets + part, exists, other=1.0)
        scale = scale_by_law(norm, target, tl.load(rate), skip, HAS_INF)
        tl.store(scales + part, scale, exists)
    if MULTIPLY:
        factor = scale.to(tl.float32) if LAW else tl.load(factors + part, exists, other=1.0)
        seed = seed_of(control_step, tl.load(indices + tensor), 0) if DROPPED > 0 else 0
        for i in range(0, length, BLOCK):
            column = i + tl.arange(0, BLOCK)
            offsets = row.to(tl.int64)[:, None] * length + column[None, :]
            inside = exists[:, None] & (column < length)[None, :]
            p = tl.load(p_ptr + offsets, inside, other=0.0).to(tl.float32) * factor[:, None]
            if DROPPED > 0:
                p = round_at_random(p, offsets, seed, DROPPED)
            tl.store(p_ptr + offsets, p.to(P), inside)
