"""Stochastic rounding in Triton: the same bits as ``rounding``, on a GPU.

The kernels in ``steppers`` use ``seed_of`` and ``round_at_random``; ``multiply_rounding`` is a
kernel of its own. This file knows bits, and nothing about norms.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hash_bits(x):
    """The hash of ``rounding``, on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def seed_of(step_ptr, index, salt):
    """``rounding.seeds_of``: the seed of tensor ``index`` at the step in ``step_ptr``."""
    step = tl.load(step_ptr).to(tl.uint32)
    return hash_bits(hash_bits(step) + index.to(tl.uint32)) ^ salt


@triton.jit
def round_at_random(x, offsets, seed, DROPPED: tl.constexpr):
    """Round float32 at random to the format that lacks its last DROPPED bits."""
    noise = hash_bits(offsets.to(tl.uint32) + seed)
    bits = x.to(tl.uint32, bitcast=True) + (noise & ((1 << DROPPED) - 1))
    rounded = (bits & (0xFFFFFFFF ^ ((1 << DROPPED) - 1))).to(tl.float32, bitcast=True)
    if DROPPED == 13:  # fp16: its numbers below 2^-14 are the multiples of 2^-24
        small = tl.abs(x) < 0.00006103515625
        fine = (tl.where(small, tl.abs(x), 0.0) * 17592186044416.0).to(tl.int32)  # of 2^-44
        multiple = ((fine + (noise & 0xFFFFF).to(tl.int32)) >> 20).to(tl.float32)
        multiple = multiple * 5.9604644775390625e-08
        rounded = tl.where(small, tl.where(x < 0, -multiple, multiple), rounded)
    return tl.where(x == x, rounded, x)  # a carry would make a NaN zero


@triton.jit
def multiply_rounding(p, scale, seed, n, DROPPED: tl.constexpr, BLOCK: tl.constexpr):
    """``rounding.multiply_rounding_`` of one block of one tensor by one factor, bit for bit."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p + offsets, offsets < n).to(tl.float32) * tl.load(scale).to(tl.float32)
    x = round_at_random(x, offsets, tl.load(seed).to(tl.uint32), DROPPED)
    tl.store(p + offsets, x.to(p.dtype.element_ty), offsets < n)
