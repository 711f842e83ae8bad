"""The two passes over the weights: one measures the norm of every part, one multiplies.

Both work on a list of tensors and a scope. ``measure`` returns one flat float64 vector with a norm
for every part; ``multiply_`` applies factors in place. Which weights these are, and why they are
multiplied, is not known here.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normcontrol.scope import Scope
from normcontrol.weights.rounding import DROPPED_BITS, multiply_rounding_, seeds_of

BLOCK = 2048
"""Elements that the CPU sums in float32 before it continues in float64. Its own reduction of a
float32 tensor of 38M elements is wrong in the third digit, because it adds small squares to a large
sum one after the other."""

SMALL = 1 << 14
"""A CPU tensor of at most so many elements is summed in float64: one call for all such tensors, and
nothing to sort if there are no others."""

Positions = Sequence[Sequence[Tensor] | None]
"""For every shard: where its elements lie in the whole tensor; see ``rounding``."""


class Factor(threading.local):
    """A float as a 0-d tensor of float32, written without a tensor operation.

    torch multiplies a list of small tensors by it in half the time that it takes by a float.
    """

    def __init__(self) -> None:
        self.memory = array("f", [1.0])
        self.view = torch.frombuffer(self.memory, dtype=torch.float32)[0]

    def tensor(self, value: float) -> Tensor:
        """Return the tensor with this value. The next call in this thread changes it."""
        self.memory[0] = value
        return self.view


FACTOR = Factor()


def measure(params: Sequence[Tensor], scope: Scope) -> Tensor:
    """Return the norm of every part of every tensor, as one flat float64 vector.

    The dtype is float32 on devices that have no float64.

    >>> from normcontrol.scope import parse_scope
    >>> measure([torch.tensor([[3.0, 4.0], [6.0, 8.0]])], parse_scope("row"))
    tensor([ 5., 10.], dtype=torch.float64)
    """
    if not params:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    if scope.axes is None and not torch.is_grad_enabled() and all(map(_is_small, params)):
        return torch.stack(_norms(list(params), torch.float64))
    home = params[0].device
    exact = torch.float32 if home.type == "mps" else torch.float64
    if torch.is_grad_enabled():  # differentiable=True: the weights change in place afterwards
        params = [p.clone() for p in params]
    if scope.axes is None:
        return _tensor_norms(params, home, exact)
    return torch.cat([_slice_norms(p, scope.axes).to(home, exact).flatten() for p in params])


def multiply_(
    params: Sequence[Tensor],
    scope: Scope,
    scale: Tensor | float,
    step: Tensor,
    positions: Positions | None = None,
) -> None:
    """Multiply the weights by the factors of their norms, in place.

    A common factor may be a float. ``step`` seeds the rounding of bf16 and fp16. ``positions`` lets
    shards round as the whole tensor would.
    """
    if isinstance(scale, float):
        dtypes = {p.dtype for p in params}
        if dtypes.isdisjoint(DROPPED_BITS):
            factor = FACTOR.tensor(scale) if dtypes == {torch.float32} else scale
            torch._foreach_mul_(list(params), factor)
            return
        scale = torch.tensor(scale, dtype=torch.float64, device="cpu")
    scales = _scale_for_each(params, scope, scale)
    exact: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    seeds: Sequence[Tensor] = ()
    for i, p in enumerate(params):
        if p.dtype in DROPPED_BITS:
            seeds = seeds or seeds_of(step, len(params))
            multiply_rounding_(p, scales[i], seeds[i], positions[i] if positions else None)
        else:
            exact.setdefault((p.device, p.dtype), []).append(i)
    for (device, dtype), indices in exact.items():
        real = dtype.to_real() if dtype.is_complex else dtype
        alike = list(params) if len(indices) == len(params) else [params[i] for i in indices]
        if torch.is_grad_enabled():
            for i in indices:
                params[i].copy_(params[i].clone() * scales[i].to(device, real))
        elif scope.joint:
            torch._foreach_mul_(alike, scale.to(device, real))
        else:
            torch._foreach_mul_(alike, [scales[i].to(device, real) for i in indices])


def _scale_for_each(params: Sequence[Tensor], scope: Scope, scale: Tensor) -> Sequence[Tensor]:
    """Return one factor for every tensor, in a shape that broadcasts to it."""
    if scope.joint:
        return [scale] * len(params)
    if scope.axes is None:
        return scale.unbind()
    pieces = scale.split(scope.sizes(params))
    return [s.reshape(_part_shape(p, scope.axes)) for s, p in zip(pieces, params, strict=True)]


def _is_small(p: Tensor) -> bool:
    return p.is_cpu and p.numel() <= SMALL and not p.is_complex()


def _tensor_norms(params: Sequence[Tensor], home: torch.device, exact: torch.dtype) -> Tensor:
    """Return one norm for every tensor, accumulated in float32 or better.

    Tensors of the same device and dtype are measured and moved together.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, p in enumerate(params):
        alike.setdefault((p.device, p.dtype), []).append(i)
    norms: list[Any] = [None] * len(params)
    for (device, dtype), indices in alike.items():
        some = list(params) if len(alike) == 1 else [params[i] for i in indices]
        sums = ACCUMULATED_IN.get(dtype, dtype)
        if device.type == "cpu" and not torch.is_grad_enabled():
            longest = -1 if dtype.is_complex else SMALL  # the norms of blocks are real
            some = [p if p.numel() <= longest else _block_norms(p, sums) for p in some]
            sums = exact
        together = torch.stack(_norms(some, sums)).to(home, exact)
        if len(alike) == 1:
            return together
        for i, norm in zip(indices, together.unbind(), strict=True):
            norms[i] = norm
    return torch.stack(norms)


def _norms(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if torch.compiler.is_compiling() and tensors[0].is_cpu:  # joined with what comes before
        return [torch.linalg.vector_norm(t, dtype=dtype) for t in tensors]
    return list(torch._foreach_norm(tensors, 2, dtype))


def _block_norms(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norms of the blocks of a CPU tensor."""
    block = min(BLOCK, max(p.numel(), 1))
    tail = p.numel() % block
    if not tail:
        return torch.linalg.vector_norm(p.reshape(-1, block), dim=1, dtype=dtype)
    flat = p.reshape(-1)
    blocks = torch.linalg.vector_norm(flat[:-tail].view(-1, block), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[-tail:], dtype=dtype)
    return torch.cat([blocks, rest.reshape(1)])


def _slice_norms(p: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the norm of every index of ``axes``, with the other dimensions kept at size 1."""
    dtype = ACCUMULATED_IN.get(p.dtype, p.dtype)
    part_axes = {a % p.dim() for a in axes}
    dims = [d for d in range(p.dim()) if d not in part_axes]
    count = math.prod([p.shape[d] for d in dims])
    if not p.is_cpu or count <= BLOCK or torch.is_grad_enabled():
        return torch.linalg.vector_norm(p, dim=dims, keepdim=True, dtype=dtype)
    # As in _block_norms: pieces of about BLOCK elements, and their norms in float64.
    longest = max(dims, key=lambda d: p.shape[d])
    size, piece = p.shape[longest], max(1, BLOCK * p.shape[longest] // count)
    whole = size - size % piece
    body = p.narrow(longest, 0, whole).unflatten(longest, (-1, piece))
    inner = [d + (d >= longest) for d in dims]
    norms = torch.linalg.vector_norm(body, dim=inner, keepdim=True, dtype=dtype)
    norms = norms.squeeze(longest + 1)
    if whole < size:
        rest = p.narrow(longest, whole, size - whole)
        tail = torch.linalg.vector_norm(rest, dim=dims, keepdim=True, dtype=dtype)
        norms = torch.cat([norms, tail], dim=longest)
    return torch.linalg.vector_norm(norms.double(), dim=longest, keepdim=True)


def _part_shape(p: Tensor, axes: tuple[int, ...]) -> list[int]:
    part_axes = {a % p.dim() for a in axes}
    return [size if d in part_axes else 1 for d, size in enumerate(p.shape)]


ACCUMULATED_IN = dict.fromkeys(DROPPED_BITS, torch.float32)
"""The dtype that sums are made in, where it is not the dtype of the weights."""
