"""The Triton kernels of the fused stepper: Adam over many tensors in one launch.

They reach tensors through tables of addresses and divide them into chunks, one program each. Sums
go through memory in a fixed order, never through atomics, so that the same step gives the same
bits. Targets and laws are not known here: ``fused.py`` passes the factors.
"""

from __future__ import annotations

from types import FunctionType

import triton
import triton.language as tl

from normcontrol.steppers.stepper import next_scale
from normcontrol.weights.rounding_kernels import round_at_random, seed_of

# The same function as in Python, with the names that Triton's interpreter looks for.
guess = triton.jit(FunctionType(next_scale.__code__, globals(), "next_scale"))


@triton.jit
def _at(table, index, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + index).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


LANES = tl.constexpr(16)


@triton.jit
def _start(chunk, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Return the position of a chunk's first block.

    Sixteen chunks are interleaved block by block, in strides of sixteen blocks. Programs that run
    at the same time then work on neighbouring memory, which is fastest, for any length of a chunk.
    """
    chunk = chunk.to(tl.int64)
    return chunk // LANES * LANES * CHUNK + chunk % LANES * BLOCK


@triton.jit
def prepare(
    steps,
    bias,
    found_inf,
    n,
    LOG2_BETA1: tl.constexpr,
    LOG2_BETA2: tl.constexpr,
    HAS_INF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the step of every tensor and write its bias corrections.

    They are ``1 - beta1^t`` and ``sqrt(1 - beta2^t)``.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    counted = 1.0
    if HAS_INF:
        counted = (tl.load(found_inf) == 0).to(tl.float32)
    step = tl.load(steps + i, inside, other=1.0) + counted
    tl.store(steps + i, step, inside)
    t = step.to(tl.float64)
    tl.store(bias + 2 * i, (1.0 - tl.exp2(t * LOG2_BETA1)).to(tl.float32), inside)
    tl.store(bias + 2 * i + 1, tl.sqrt(1.0 - tl.exp2(t * LOG2_BETA2)).to(tl.float32), inside)


@triton.jit
def _adam_block(
    p_ptr, g_ptr, m_ptr, v_ptr, x_ptr, offsets, mask, factor, g_factor, step_size, bias2, seed,
    skip, ONE_MINUS_BETA1: tl.constexpr, ONE_MINUS_BETA2: tl.constexpr, EPS: tl.constexpr,
    AMSGRAD: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, HAS_INF: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    """Make an Adam step of one block; return the weights as written, in float32.

    Where the mask is off, the returned values are arbitrary.
    """
    g = tl.load(g_ptr + offsets, mask).to(tl.float32) * g_factor
    p = tl.load(p_ptr + offsets, mask).to(tl.float32)
    m = tl.load(m_ptr + offsets, mask).to(tl.float32)
    v = tl.load(v_ptr + offsets, mask).to(tl.float32)
    new_p = p * factor if BEFORE else p
    new_m = m + ONE_MINUS_BETA1 * (g - m)
    new_v = v + ONE_MINUS_BETA2 * (g * g - v)
    top = new_v
    if AMSGRAD:
        old_top = tl.load(x_ptr + offsets, mask).to(tl.float32)
        top = tl.maximum(old_top, new_v)
    new_p = new_p - step_size * new_m / (tl.sqrt(top) / bias2 + EPS)
    if AFTER:
        new_p = new_p * factor
    if DROPPED > 0:
        new_p = round_at_random(new_p, offsets, seed, DROPPED)
    if HAS_INF:  # an overflow: everything stays as it was
        new_p, new_m, new_v = (
            tl.where(skip == 0, new_p, p),
            tl.where(skip == 0, new_m, m),
            tl.where(skip == 0, new_v, v),
        )
        if AMSGRAD:
            top = tl.where(skip == 0, top, old_top)
    tl.store(p_ptr + offsets, new_p.to(p_ptr.dtype.element_ty), mask)
    tl.store(m_ptr + offsets, new_m.to(m_ptr.dtype.element_ty), mask)
    tl.store(v_ptr + offsets, new_v.to(v_ptr.dtype.element_ty), mask)
    if AMSGRAD:
        tl.store(x_ptr + offsets, top.to(x_ptr.dtype.element_ty), mask)
    return new_p


@triton.jit
def adam(
    ps, gs, ms, vs, xs, numels, slots, chunks, bias, lr, factors, partials, g_factor, found_inf,
    control_step,
    ONE_MINUS_BETA1: tl.constexpr, ONE_MINUS_BETA2: tl.constexpr, EPS: tl.constexpr,
    AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, HAS_INF: tl.constexpr,
    HAS_FACTOR: tl.constexpr, LR_AT: tl.constexpr,
    DROPPED: tl.constexpr, P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Make an Adam step of one chunk.

    The weights are multiplied by their tensor's factor BEFORE or AFTER the update. AFTER it, the
    squares of the weights that are written are summed.
    """
    program = tl.program_id(0)
    tensor = tl.load(chunks + 2 * program)
    start = _start(tl.load(chunks + 2 * program + 1), BLOCK, CHUNK)
    numel = tl.load(numels + tensor)
    slot = tl.load(slots + tensor)
    p_ptr, g_ptr = _at(ps, tensor, P, ALIGNED), _at(gs, tensor, G, ALIGNED)
    m_ptr, v_ptr = _at(ms, tensor, S, ALIGNED), _at(vs, tensor, S, ALIGNED)
    x_ptr = _at(xs, tensor, S, ALIGNED) if AMSGRAD else v_ptr
    rate = tl.load(lr).to(tl.float32) if LR_AT else lr
    step_size = rate / tl.load(bias + 2 * tensor)
    bias2 = tl.load(bias + 2 * tensor + 1)
    factor = tl.load(factors + slot, slot >= 0, other=1.0) if BEFORE or AFTER else 1.0
    g_scale = tl.load(g_factor).to(tl.float32) if HAS_FACTOR else 1.0
    if MAXIMIZE:
        g_scale = -g_scale
    skip = tl.load(found_inf) if HAS_INF else 0.0
    seed = seed_of(control_step, slot, 0x9E3779B9) if DROPPED > 0 else 0
    squares = tl.zeros((BLOCK,), tl.float32)
    if start + (CHUNK - BLOCK) * LANES + BLOCK <= numel:
        for i in range(0, CHUNK * LANES, BLOCK * LANES):
            offsets = start + i + tl.arange(0, BLOCK)
            p = _adam_block(
                p_ptr, g_ptr, m_ptr, v_ptr, x_ptr, offsets, None, factor, g_scale, step_size,
                bias2, seed, skip,
                ONE_MINUS_BETA1, ONE_MINUS_BETA2, EPS, AMSGRAD, BEFORE, AFTER, HAS_INF, DROPPED,
            )  # fmt: skip
            squares += p * p
    else:
        for i in range(0, tl.minimum(numel - start, CHUNK * LANES).to(tl.int32), BLOCK * LANES):
            offsets = start + i + tl.arange(0, BLOCK)
            p = _adam_block(
                p_ptr, g_ptr, m_ptr, v_ptr, x_ptr, offsets, offsets < numel, factor, g_scale,
                step_size, bias2, seed, skip,
                ONE_MINUS_BETA1, ONE_MINUS_BETA2, EPS, AMSGRAD, BEFORE, AFTER, HAS_INF, DROPPED,
            )  # fmt: skip
            squares += tl.where(offsets < numel, p * p, 0.0)
    if AFTER:
        tl.store(partials + program, tl.sum(squares))


@triton.jit
def sum_squares(
    ps,
    numels,
    chunks,
    partials,
    P: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sum the squares of one chunk of weights or gradients."""
    program = tl.program_id(0)
    tensor = tl.load(chunks + 2 * program)
    start = _start(tl.load(chunks + 2 * program + 1), BLOCK, CHUNK)
    numel = tl.load(numels + tensor)
    p_ptr = _at(ps, tensor, P, ALIGNED)
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
def settle(
    scales, factors, lasts, corrections, needed, tolerance, found_inf, first, n,
    STRIDE: tl.constexpr, HAS_INF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compare the factors that the weights were written with to those that the controller chose.

    A difference above ``tolerance`` is corrected by the next launch. The factors of the next step
    are guessed from the last two."""
    any_needed = 0
    for i in range(0, n, BLOCK):
        at = i + tl.arange(0, BLOCK)
        inside = at < n
        slot = first + at
        asked = tl.load(scales + at * STRIDE, inside, other=1.0)
        factor = tl.load(factors + slot, inside, other=1.0)
        last = tl.load(lasts + slot, inside, other=1.0)
        missed = asked / factor.to(tl.float64)
        following = guess(asked, last).to(tl.float32)
        if HAS_INF:  # nothing was written: the guess stays as it is
            skip = tl.load(found_inf) != 0
            missed, asked = tl.where(skip, 1.0, missed), tl.where(skip, last, asked)
            following = tl.where(skip, factor, following)
        large = tl.abs(missed - 1.0) > tolerance
        tl.store(corrections + slot, tl.where(large, missed, 1.0).to(tl.float32), inside)
        tl.store(factors + slot, following, inside)
        tl.store(lasts + slot, asked, inside)
        any_needed = tl.maximum(any_needed, tl.max((large & inside).to(tl.int32)))
    tl.store(needed, any_needed)


@triton.jit
def scale(
    ps, numels, slots, chunks, factors, needed, control_step, n_chunks,
    DROPPED: tl.constexpr, P: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Multiply weights by their tensors' factors, if ``needed`` is set.

    The order is from the last chunk to the first, because the cache has the last ones.
    """
    if tl.load(needed) != 0:
        for done in range(tl.program_id(0), n_chunks, tl.num_programs(0)):
            program = n_chunks - 1 - done
            tensor = tl.load(chunks + 2 * program)
            slot = tl.load(slots + tensor)
            if slot >= 0:
                start = _start(tl.load(chunks + 2 * program + 1), BLOCK, CHUNK)
                numel = tl.load(numels + tensor)
                p_ptr = _at(ps, tensor, P, ALIGNED)
                factor = tl.load(factors + slot)
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
