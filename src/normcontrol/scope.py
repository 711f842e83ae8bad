"""Scopes: which weights share a norm, how that norm is measured, and how a factor reaches the
weights.

A scope sees a list of tensors as *parts*: whole tensors, or slices of them (rows, columns,
experts). ``measure`` gives the norm of every part in one flat float64 vector, ``join`` makes the
norms that are controlled out of them, and ``apply_`` multiplies the weights back. It knows nothing
of targets, rates or optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normcontrol.steppers.rounding import DROPPED_BITS, multiply_rounding_, seeds_of

BLOCK = 2048
"""Elements that the CPU sums in float32 before going on in float64: its own reduction of a
38M-element float32 tensor is wrong in the third digit, since it adds small squares to a large sum
one after the other."""


@dataclass(frozen=True)
class Scope:
    """``joint``: all parts share one norm. ``axes``: a part is one index of these axes; None: a
    whole tensor."""

    name: Any
    joint: bool = False
    axes: tuple[int, ...] | None = None

    def sizes(self, params: Sequence[Tensor]) -> list[int]:
        """How many parts each tensor has."""
        if self.axes is None:
            return [1] * len(params)
        return [
            math.prod([p.shape[a] for a in self.axes]) for p in params
        ]  # a list: torch 2.15 does not compile a generator here


SCOPES = {
    "global": Scope("global", joint=True),
    "group": Scope("group", joint=True),
    "tensor": Scope("tensor"),
    "row": Scope("row", axes=(0,)),
    "col": Scope("col", axes=(1,)),
}


def parse_scope(given: Any) -> Scope:
    """A scope by name, or a tuple of axes: one norm for every index of those axes.

    >>> parse_scope("row") == Scope("row", axes=(0,))
    True
    >>> parse_scope((0, 1)).sizes([torch.ones(4, 3, 2)])     # stacked experts, one norm per (expert, row)
    [12]
    """
    if isinstance(given, str) and given in SCOPES:
        return SCOPES[given]
    if isinstance(given, int) and not isinstance(given, bool):
        given = (given,)
    if isinstance(given, (tuple, list)) and given and all(isinstance(a, int) for a in given):
        return Scope(tuple(given), axes=tuple(given))
    raise ValueError(
        f"scope={given!r} is not known: give one of {', '.join(map(repr, SCOPES))}, or a tuple of "
        "axes such as (0,) for "
        "one norm per index of axis 0."
    )


def check_axes(
    scope: Scope,
    name: str,
    param: Any,
    advice: str = "Put it into a group with scope='tensor', or leave it out with controlled=False",
) -> None:
    """Refuse a tensor that does not have the axes the scope asks for, or would have a norm per
    single element."""
    axes = scope.axes
    if axes is None:
        return
    wrong = any(not -param.ndim <= a < param.ndim for a in axes)
    if wrong or len({a % param.ndim for a in axes}) == param.ndim:
        raise ValueError(
            f"scope={scope.name!r} needs a tensor with axes {axes} and at least one more to take a "
            f"norm over, but {name} has "
            f"shape {tuple(param.shape)}. {advice}."
        )


class Weights:
    """Tensors under one scope: what the controller measures and multiplies."""

    def __init__(
        self,
        params: list[Tensor],
        scope: Scope,
        size: Callable[[Sequence[Tensor], Scope], Tensor] | None = None,
    ) -> None:
        self.params = params
        self.scope = scope
        self.size = size or measure
        self.places: Sequence[Sequence[Tensor] | None] | None = (
            None  # where pieces lie in larger tensors; see rounding
        )

    def measure(self) -> Tensor:
        """The norm of every part, or another size of it."""
        return self.size(self.params, self.scope)

    def apply_(self, scale: Tensor, step: Tensor) -> None:
        """Multiply the weights by the factors of their norms, in place."""
        apply_(self.params, self.scope, scale, step, self.places)


def measure(params: Sequence[Tensor], scope: Scope) -> Tensor:
    """The norm of every part of every tensor, as one flat vector in float64 (float32 where a device
    has no float64).

    >>> measure([torch.tensor([[3.0, 4.0], [6.0, 8.0]])], parse_scope("row"))
    tensor([ 5., 10.], dtype=torch.float64)
    """
    if not params:
        return torch.zeros(0, dtype=torch.float64)
    home = params[0].device
    exact = torch.float32 if home.type == "mps" else torch.float64
    if (
        torch.is_grad_enabled()
    ):  # differentiable=True: the weights will change in place under the norm's feet
        params = [p.clone() for p in params]
    if scope.axes is None:
        return _tensor_norms(params, home, exact)
    return torch.cat([_slice_norms(p, scope.axes).to(home, exact).flatten() for p in params])


def join(parts: Tensor, scope: Scope) -> Tensor:
    """The norms under control: one for all the parts of a joint scope, else each part's own."""
    return torch.linalg.vector_norm(parts) if scope.joint else parts


def apply_(
    params: Sequence[Tensor],
    scope: Scope,
    scale: Tensor,
    step: Tensor,
    places: Sequence[Sequence[Tensor] | None] | None = None,
) -> None:
    """Multiply the weights by the factors of their norms, in place. The step seeds the rounding of
    bf16 and fp16, which also wants to know the ``places`` of weights that are pieces of larger
    tensors."""
    scales: Sequence[Tensor]
    if scope.joint:
        scales = [scale] * len(params)
    elif scope.axes is None:
        scales = scale.unbind()
    else:
        pieces = scale.split(scope.sizes(params))
        scales = [
            s.reshape(_kept_shape(p, scope.axes)) for s, p in zip(pieces, params, strict=True)
        ]

    plain: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    seeds = seeds_of(step, len(params)) if any(p.dtype in DROPPED_BITS for p in params) else ()
    for i, (p, s) in enumerate(zip(params, scales, strict=True)):
        if p.dtype in DROPPED_BITS:
            multiply_rounding_(p, s, seeds[i], places[i] if places else None)
        else:
            into = plain.setdefault((p.device, p.dtype), ([], []))
            into[0].append(p)
            into[1].append(s)
    for (device, dtype), (tensors, factors) in plain.items():
        real = dtype.to_real() if dtype.is_complex else dtype
        if torch.is_grad_enabled():
            for p, s in zip(tensors, factors, strict=True):
                p.copy_(p.clone() * s.to(device, real))
        elif scope.joint:
            torch._foreach_mul_(tensors, scale.to(device, real))
        else:
            torch._foreach_mul_(tensors, [s.to(device, real) for s in factors])


def _tensor_norms(params: Sequence[Tensor], home: torch.device, exact: torch.dtype) -> Tensor:
    """One norm a tensor, accumulated in float32 or better; tensors that are alike are measured and
    moved together."""
    alike: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
    for i, p in enumerate(params):
        large = p.is_cpu and p.numel() > BLOCK and not torch.is_grad_enabled()
        alike.setdefault((p.device, p.dtype, large), []).append(i)
    norms: list[Any] = [None] * len(params)
    for (_, dtype, large), indices in alike.items():
        some = [params[i] for i in indices]
        each = (
            [_blocked_norm(p) for p in some]
            if large
            else torch._foreach_norm(some, 2, _accumulate(dtype))
        )
        together = torch.stack(list(each)).to(home, exact)
        if len(alike) == 1:
            return together
        for i, norm in zip(indices, together.unbind(), strict=True):
            norms[i] = norm
    return torch.stack(norms)


def _blocked_norm(p: Tensor) -> Tensor:
    flat = p.reshape(-1)
    tail = flat.numel() % BLOCK
    body = flat[: flat.numel() - tail].view(-1, BLOCK)
    blocks = torch.linalg.vector_norm(body, dim=1, dtype=_accumulate(p.dtype)).double()
    if tail:
        rest = torch.linalg.vector_norm(flat[-tail:], dtype=_accumulate(p.dtype)).double()
        blocks = torch.cat([blocks, rest.reshape(1)])
    return torch.linalg.vector_norm(blocks)


def _slice_norms(p: Tensor, axes: tuple[int, ...]) -> Tensor:
    kept = {a % p.dim() for a in axes}
    dims = [d for d in range(p.dim()) if d not in kept]
    count = math.prod([p.shape[d] for d in dims])
    if not p.is_cpu or count <= BLOCK or torch.is_grad_enabled():
        return torch.linalg.vector_norm(p, dim=dims, keepdim=True, dtype=_accumulate(p.dtype))
    longest = max(
        dims, key=lambda d: p.shape[d]
    )  # summed in pieces of about BLOCK elements, and these in float64
    size, piece = p.shape[longest], max(1, BLOCK * p.shape[longest] // count)
    whole = size - size % piece
    body = p.narrow(longest, 0, whole).unflatten(longest, (-1, piece))
    norms = torch.linalg.vector_norm(
        body, dim=[d + (d >= longest) for d in dims], keepdim=True, dtype=_accumulate(p.dtype)
    )
    norms = norms.squeeze(longest + 1)
    if whole < size:
        rest = p.narrow(longest, whole, size - whole)
        norms = torch.cat(
            [
                norms,
                torch.linalg.vector_norm(rest, dim=dims, keepdim=True, dtype=_accumulate(p.dtype)),
            ],
            dim=longest,
        )
    return torch.linalg.vector_norm(norms.double(), dim=longest, keepdim=True)


def _kept_shape(p: Tensor, axes: tuple[int, ...]) -> list[int]:
    kept = {a % p.dim() for a in axes}
    return [size if d in kept else 1 for d, size in enumerate(p.shape)]


def _accumulate(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are made in: the weights' own if that is float32 or better."""
    return torch.float32 if dtype in DROPPED_BITS else dtype
