"""The Triton kernels of Adam, over many tensors in one launch.

They reach tensors through tables of addresses and divide them into chunks, one program each, as
``pass_kernels`` does. Targets and laws are not known here: ``fused.py`` passes the factors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normcontrol.steppers.pass_kernels import LANES, chunk_start, pointer_at
from normcontrol.weights.rounding_kernels import round_at_random, seed_of


@triton.jit
def prepare(
    steps, bias, n, log2_beta1, rest1, log2_beta2, rest2, found_inf,
    HAS_INF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the step of every tensor and write its bias corrections.

    They are ``1 - beta1^t`` and ``sqrt(1 - beta2^t)``. A logarithm is the sum of two float32.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    counted = 1.0
    if HAS_INF:
        counted = (tl.load(found_inf) == 0).to(tl.float32)
    step = tl.load(steps + i, inside, other=1.0) + counted
    tl.store(steps + i, step, inside)
    t = step.to(tl.float64)
    power1 = tl.exp2(t * log2_beta1 + t * rest1)
    power2 = tl.exp2(t * log2_beta2 + t * rest2)
    tl.store(bias + 2 * i, (1.0 - power1).to(tl.float32), inside)
    tl.store(bias + 2 * i + 1, tl.sqrt(1.0 - power2).to(tl.float32), inside)


@triton.jit
def _adam_block(
    p_ptr, g_ptr, m_ptr, v_ptr, x_ptr, offsets, mask, factor, g_factor, step_size, bias2, seed,
    skip, one_minus_beta1, one_minus_beta2, eps, AMSGRAD: tl.constexpr, BEFORE: tl.constexpr,
    AFTER: tl.constexpr, HAS_INF: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    """Make an Adam step of one block; return the weights as written, in float32.

    Where the mask is off, the returned values are arbitrary.
    """
    g = tl.load(g_ptr + offsets, mask).to(tl.float32) * g_factor
    p = tl.load(p_ptr + offsets, mask).to(tl.float32)
    m = tl.load(m_ptr + offsets, mask).to(tl.float32)
    v = tl.load(v_ptr + offsets, mask).to(tl.float32)
    new_p = p * factor if BEFORE else p
    new_m = m + one_minus_beta1 * (g - m)
    new_v = v + one_minus_beta2 * (g * g - v)
    top = new_v
    if AMSGRAD:
        old_top = tl.load(x_ptr + offsets, mask).to(tl.float32)
        top = tl.maximum(old_top, new_v)
    new_p = new_p - step_size * new_m / (tl.sqrt(top) / bias2 + eps)
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
    ps, ms, vs, xs, numels, slots, chunks, bias, factors, partials,
    gs, lr, one_minus_beta1, one_minus_beta2, eps, g_factor, found_inf, control_step,
    AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    HAS_INF: tl.constexpr, HAS_FACTOR: tl.constexpr, LR_AT: tl.constexpr, DROPPED: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Make an Adam step of one chunk.

    The weights are multiplied by their tensor's factor BEFORE or AFTER the update. AFTER it, the
    squares of the weights that are written are summed.
    """
    program = tl.program_id(0)
    tensor = tl.load(chunks + 2 * program)
    start = chunk_start(tl.load(chunks + 2 * program + 1), BLOCK, CHUNK)
    numel = tl.load(numels + tensor)
    slot = tl.load(slots + tensor)
    p_ptr, g_ptr = pointer_at(ps, tensor, P, ALIGNED), pointer_at(gs, tensor, G, ALIGNED)
    m_ptr, v_ptr = pointer_at(ms, tensor, S, ALIGNED), pointer_at(vs, tensor, S, ALIGNED)
    x_ptr = pointer_at(xs, tensor, S, ALIGNED) if AMSGRAD else v_ptr
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
                one_minus_beta1, one_minus_beta2, eps, AMSGRAD, BEFORE, AFTER, HAS_INF, DROPPED,
            )  # fmt: skip
            squares += p * p
    else:
        for i in range(0, tl.minimum(numel - start, CHUNK * LANES).to(tl.int32), BLOCK * LANES):
            offsets = start + i + tl.arange(0, BLOCK)
            p = _adam_block(
                p_ptr, g_ptr, m_ptr, v_ptr, x_ptr, offsets, offsets < numel, factor, g_scale,
                step_size, bias2, seed, skip,
                one_minus_beta1, one_minus_beta2, eps, AMSGRAD, BEFORE, AFTER, HAS_INF, DROPPED,
            )  # fmt: skip
            squares += tl.where(offsets < numel, p * p, 0.0)
    if AFTER:
        tl.store(partials + program, tl.sum(squares))
