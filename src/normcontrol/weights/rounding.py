"""Multiplication of bf16 and fp16 weights by factors close to one, with stochastic rounding.

A bf16 weight times ``1 - 3e-4`` is the same weight again, because the change is below half a unit
in its last place. Rounded to nearest, control would do nothing near its target. Here the product
is rounded up or down at random, with the probability that makes it exact on average. The random
bits are a hash of (step, tensor, position), not a generator's stream: the same step rounds the same
way after a resume, and the global random state is not touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""How many of float32's 23 mantissa bits the format does not have. Below 2^-14, fp16 has fewer: its
numbers are the multiples of 2^-24 there."""

CHUNK = 1 << 20
"""Elements rounded at a time, so that temporaries stay small compared with the model."""


def multiply_rounding_(
    weight: Tensor, scale: Tensor, seed: Tensor, positions: Sequence[Tensor] | None = None
) -> None:
    """Compute ``weight *= scale`` for a bf16 or fp16 weight, rounded so that the mean is exact.

    A shard rounds as the whole tensor would if its ``positions`` are given: for every axis, what
    an index adds to the position in the whole tensor.

    >>> w = torch.ones(100_000, dtype=torch.bfloat16)
    >>> multiply_rounding_(w, torch.tensor(1 - 3e-4), seed=torch.tensor(1))
    >>> abs(w.double().mean().item() - (1 - 3e-4)) < 2e-5  # rounding to nearest would leave 1.0
    True
    """
    factor, seed = scale.to(weight.device, torch.float32), seed.to(weight.device, torch.int32)
    if positions is None and _multiply_in_one_launch_(weight, factor, seed):
        return
    dropped = (1 << DROPPED_BITS[weight.dtype]) - 1
    by_row = factor.dim() > 0 and factor.size(0) > 1
    chunk = CHUNK if weight.is_cpu else 64 * CHUNK  # few large launches on an accelerator
    rows = max(1, chunk // max(math.prod(weight.shape[1:]), 1))
    done = 0
    for i, piece in enumerate(weight.split(rows) if weight.dim() else (weight,)):
        part = factor.narrow(0, i * rows, piece.size(0)) if by_row else factor
        if positions is None:
            end = done + piece.numel()
            index = torch.arange(done, end, dtype=torch.int32, device=weight.device)
            index = index.view(piece.shape)
        else:
            index = _outer_sum([positions[0].narrow(0, i * rows, piece.size(0)), *positions[1:]])
        product, noise = piece.float() * part, _hash(index + seed)
        bits = (product.view(torch.int32) + (noise & dropped)) & ~dropped
        rounded = bits.view(torch.float32)
        if weight.dtype == torch.float16:
            rounded = _round_below_normal(product, rounded, noise)
        piece.copy_(torch.where(product.isnan(), product, rounded))  # a carry would make it zero
        done += piece.numel()


def _round_below_normal(product: Tensor, rounded: Tensor, noise: Tensor) -> Tensor:
    """Return ``rounded``, with the products below fp16's normal numbers rounded to multiples of
    2^-24 instead, which fp16 has there."""
    small = product.abs() < 2.0**-14
    fine = (torch.where(small, product.abs(), 0.0) * 2.0**44).to(torch.int32)  # of 2^-44
    multiple = ((fine + (noise & 0xFFFFF)) >> 20).float() * 2.0**-24
    return torch.where(small, torch.copysign(multiple, product), rounded)


def _multiply_in_one_launch_(weight: Tensor, factor: Tensor, seed: Tensor) -> bool:
    """Multiply with a Triton kernel if the tensor allows it; return whether it did.

    The kernel handles one factor for a whole tensor on a GPU. The torch operations above make about
    twenty passes.
    """
    whole = weight.is_cuda and weight.is_contiguous() and weight.numel() > 0 and factor.numel() == 1
    if not whole or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    try:
        from normcontrol.weights.rounding_kernels import multiply_rounding
    except ImportError:  # no Triton
        return False
    with torch.cuda.device(weight.device):
        n = weight.numel()
        multiply_rounding[(-(-n // 1024),)](
            weight, factor, seed, n, DROPPED=DROPPED_BITS[weight.dtype], BLOCK=1024
        )
    torch.autograd.graph.increment_version([weight])
    return True


def _outer_sum(positions: Sequence[Tensor]) -> Tensor:
    """Return the position of every element, from what each axis adds to it."""
    index = positions[0]
    for along in positions[1:]:
        index = index.unsqueeze(-1) + along
    return index


def seeds_of(step: Tensor, count: int) -> Sequence[Tensor]:
    """Return a seed for each of ``count`` tensors at ``step``; no two of them are related."""
    tensors = torch.arange(count, dtype=torch.int32, device=step.device)
    return _hash(_hash(step.to(torch.int32)) + tensors).unbind()


def _hash(x: Tensor) -> Tensor:
    """Apply murmur3's 32-bit finaliser (Appleby) to int32.

    The masks make the arithmetic shifts logical ones.
    """
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * -2048144789
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)
