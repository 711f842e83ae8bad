"""Multiplying low-precision weights by factors close to one.

A bf16 weight times ``1 - 3e-4`` is itself again, since the change is below half a unit in its last
place: rounded to nearest, control would silently do nothing near its target. Here the product is
rounded up or down at random, with the probability that makes it right on average. The random bits
are a hash of (step, tensor size, position), not a generator's stream: the same step rounds the same
way after a resume, and nobody else's randomness is disturbed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""How many of float32's 23 mantissa bits the format does not have."""

CHUNK = 1 << 20
"""Elements rounded at a time, so that temporaries stay small beside the model."""


def multiply_rounding_(
    weight: Tensor, scale: Tensor, seed: Tensor, places: Sequence[Tensor] | None = None
) -> None:
    """``weight *= scale`` for a bf16 or fp16 weight, rounded up or down so that the mean is exact.

    A piece of a larger tensor rounds as it would there, given its ``places``: along each axis, what
    an index adds to the position in the larger tensor.

    >>> w = torch.ones(100_000, dtype=torch.bfloat16)
    >>> multiply_rounding_(w, torch.tensor(1 - 3e-4), seed=torch.tensor(1))
    >>> abs(w.double().mean().item() - (1 - 3e-4)) < 2e-5     # w * (1 - 3e-4) alone would have left 1.0
    True
    """
    factor, seed = scale.to(weight.device, torch.float32), seed.to(weight.device, torch.int32)
    if places is None and _in_one_launch_(weight, factor, seed):
        return
    dropped = (1 << DROPPED_BITS[weight.dtype]) - 1
    by_row = factor.dim() > 0 and factor.size(0) > 1
    chunk = CHUNK if weight.is_cpu else 64 * CHUNK  # an accelerator wants few large launches
    rows = max(1, chunk // max(math.prod(weight.shape[1:]), 1))
    done = 0
    for i, piece in enumerate(weight.split(rows) if weight.dim() else (weight,)):
        part = factor.narrow(0, i * rows, piece.size(0)) if by_row else factor
        if places is None:
            index = torch.arange(
                done, done + piece.numel(), dtype=torch.int32, device=weight.device
            ).view(piece.shape)
        else:
            index = _positions([places[0].narrow(0, i * rows, piece.size(0)), *places[1:]])
        bits = (piece.float() * part).view(torch.int32)
        bits = (bits + (_hash(index + seed) & dropped)) & ~dropped
        piece.copy_(bits.view(torch.float32))
        done += piece.numel()


def _in_one_launch_(weight: Tensor, factor: Tensor, seed: Tensor) -> bool:
    """One factor for a whole tensor on a GPU, through a Triton kernel if there is one: the plain
    operations are some twenty passes."""
    whole = weight.is_cuda and weight.is_contiguous() and weight.numel() > 0 and factor.numel() == 1
    if not whole or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    try:
        from normcontrol.steppers import kernels
    except ImportError:  # no Triton
        return False
    with torch.cuda.device(weight.device):
        grid = (-(-weight.numel() // 1024),)
        kernels.multiply_rounding[grid](
            weight, factor, seed, weight.numel(), DROPPED=DROPPED_BITS[weight.dtype], BLOCK=1024
        )
    torch.autograd.graph.increment_version([weight])
    return True


def _positions(places: Sequence[Tensor]) -> Tensor:
    index = places[0]
    for along in places[1:]:
        index = index.unsqueeze(-1) + along
    return index


def seeds_of(step: Tensor, count: int) -> Sequence[Tensor]:
    """A seed for each of so many tensors at ``step``: well mixed, so that no two tensors or steps
    share their bits."""
    return _hash(
        _hash(step.to(torch.int32)) + torch.arange(count, dtype=torch.int32, device=step.device)
    ).unbind()


def _hash(x: Tensor) -> Tensor:
    """murmur3's 32-bit finaliser (Appleby), on int32: the masks make its arithmetic shifts logical
    ones."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * -2048144789
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)
