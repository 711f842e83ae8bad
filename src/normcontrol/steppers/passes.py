"""Passes over tensors in Triton kernels: they measure norms, apply the law, and multiply.

``Parts`` has the norms and factors of the parts of tensors on one device. The fused stepper uses it
beside Adam, and ``SetPasses`` to control the weights of any optimizer. This file does not know how
targets and rates are chosen. It is imported where its kernels are used, because it needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from normcontrol.scope import Scope
from normcontrol.steppers import pass_kernels
from normcontrol.steppers.tables import SUPPORTED, Table, why_not
from normcontrol.weights.memory import overlaps

DTYPES = {dtype: getattr(tl, str(dtype).removeprefix("torch.")) for dtype in SUPPORTED}
"""Triton's names of the dtypes."""


class Parts:
    """The norms of parts of tensors, and the factors that their weights are multiplied by."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.on_device: Any = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        self.norms = torch.zeros(count, dtype=torch.float64, device=device)
        self.factors = torch.ones(count, device=device)
        """What a pass multiplies by, or was guessed to have to multiply by."""
        self.lasts = torch.ones_like(self.norms)
        """The last scales, from which the next factors are guessed."""
        self.corrections = torch.ones_like(self.factors)
        """What a guess missed."""
        self.needed = torch.zeros((), dtype=torch.int32, device=device)
        """Whether a pass is needed to multiply, because a factor is not 1."""
        self._rate: tuple[float | None, Tensor] = None, self.norms.new_zeros(())

    def measure(self, t: Table) -> None:
        """Write the norms of the parts of a table, in one pass over its tensors."""
        if not t.length:
            norms_into(t, t.ps, t.dtype, t.slot_table, self.norms)
            return
        t.launch(
            pass_kernels.sum_rows, t.programs,
            (t.ps, t.numels, t.slot_table, t.chunks, self.norms, t.length),
            P=DTYPES[t.dtype], ALIGNED=t.aligned, ROWS=t.chunk, BLOCK=t.block,
        )  # fmt: skip

    def settle(
        self,
        t: Table,
        mine: slice,
        scale: Tensor | None,
        goal: tuple[Any, Any],
        found_inf: Tensor | None,
        tolerance: float | None,
        into: Tensor,
        joint: bool,
    ) -> Tensor:
        """Choose the factors of some parts: by the law, or as ``scale`` says. Return the scale.

        ``goal`` are the target and the rate. A ``tolerance`` is given if the weights were written
        with a guessed factor.
        """
        target, rate = goal
        given = scale
        if scale is None:
            target = target if isinstance(target, Tensor) else self.norms.new_full((), target)
            scale, rate = torch.empty_like(target), self._on_device(rate)
        else:
            target = rate = scale  # an unused pointer may be any
        t.launch(
            pass_kernels.settle, 1,
            (
                scale, self.norms, target, rate, self.factors, self.lasts, into, self.needed,
                tolerance or 0.0, self.norms if found_inf is None else found_inf, mine.start,
                mine.stop - mine.start,
            ),
            LAW=given is None, JOINT=joint, GUESSED=tolerance is not None,
            HAS_INF=found_inf is not None, BLOCK=1024,
        )  # fmt: skip
        return scale

    def multiply_(self, t: Table, step: Tensor, indices: Tensor | None = None) -> None:
        """Multiply the tensors of a table by the corrections of their parts, in one pass.

        ``step`` seeds the rounding of bf16 and fp16, with the ``indices`` of the tensors.
        """
        P = DTYPES[t.dtype]
        if t.length:
            t.launch(
                pass_kernels.scale_rows, t.programs,
                (
                    t.ps, t.numels, t.slot_table, t.chunks, self.corrections, self.needed, step,
                    t.length, indices, t.programs,
                ),
                DROPPED=t.dropped, P=P, ALIGNED=t.aligned, ROWS=t.chunk, BLOCK=t.block,
            )  # fmt: skip
        else:
            t.launch(
                pass_kernels.scale, min(t.programs, 2048),
                (
                    t.ps, t.numels, t.slot_table, t.chunks, self.corrections, self.needed, step,
                    t.programs,
                ),
                DROPPED=t.dropped, P=P, ALIGNED=t.aligned, BLOCK=t.block, CHUNK=t.chunk,
            )  # fmt: skip

    def _on_device(self, rate: Tensor | float) -> Tensor:
        """Return a rate as a tensor; a number is written to the device when it changes."""
        if isinstance(rate, Tensor):
            return rate.to(self.norms)
        known, tensor = self._rate
        if rate != known:
            self._rate = rate, tensor.fill_(rate)
        return tensor


def norms_into(
    t: Table, addresses: Tensor, dtype: torch.dtype, slots: Tensor, norms: Tensor
) -> None:
    """Write the norms of tensors at these addresses, which are divided as those of the table."""
    t.launch(
        pass_kernels.sum_squares, t.programs, (addresses, t.numels, t.chunks, t.partials),
        P=DTYPES[dtype], ALIGNED=t.aligned, BLOCK=t.block, CHUNK=t.chunk,
    )  # fmt: skip
    t.launch(
        pass_kernels.finish_norms, len(t.slots),
        (t.partials, t.firsts, slots, norms, norms, norms),
        AFTER=False, HAS_INF=False, BLOCK=1024,
    )  # fmt: skip


def is_dense(p: Tensor) -> bool:
    """Return whether the elements of a tensor fill a piece of memory."""
    channels_last = p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last)
    return p.is_contiguous() or channels_last


class SetPasses:
    """Measures and multiplies tensors in a few launches: one pass that reads, one that multiplies.

    :meth:`made` returns None if the kernels cannot handle the tensors.
    """

    def __init__(self, tensors: Sequence[Tensor], scope: Scope) -> None:
        self.tensors, self.joint = tensors, scope.joint
        counts, device = scope.sizes(tensors), tensors[0].device
        firsts = list(accumulate(counts, initial=0))
        self.parts, self.mine = Parts(firsts[-1], device), slice(0, firsts[-1])
        alike: dict[Any, list[int]] = {}
        for i, t in enumerate(tensors):
            length = 0 if scope.axes is None else t.numel() // counts[i]
            alike.setdefault((t.dtype, t.data_ptr() % 16 == 0, length), []).append(i)
        self.tables = [
            (
                Table([tensors[i] for i in some], [firsts[i] for i in some], aligned, length),
                torch.tensor(some, dtype=torch.int32, device=device),
            )
            for (_, aligned, length), some in alike.items()
        ]
        self.addresses = list(map(Tensor.data_ptr, tensors))
        self.strides = list(map(Tensor.stride, tensors))

    @staticmethod
    def made(tensors: Sequence[Tensor], scope: Scope) -> SetPasses | None:
        """Return passes over these tensors; None if the kernels cannot handle them."""
        if why_not(list(tensors)) is not None or not _are_fit(tensors, scope):
            return None
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # the tables must exist before a graph is captured
        return SetPasses(tensors, scope)

    def still_fits(self) -> bool:
        """Return whether the tensors are where they were."""
        at = list(map(Tensor.data_ptr, self.tensors))
        return at == self.addresses and list(map(Tensor.stride, self.tensors)) == self.strides

    def measure(self) -> Tensor:
        """Return the norms of all parts."""
        with self.parts.on_device:
            for table, _ in self.tables:
                self.parts.measure(table)
        return self.parts.norms

    def apply_law(self, target: Any, rate: Any, skip: Tensor | None) -> Tensor:
        """Choose the factors by the law, from the norms that were measured; return the scale."""
        return self._settle(None, (target, rate), skip)

    def take(self, scale: Any) -> None:
        """Take the factors as they are."""
        norms = self.parts.norms
        self._settle(torch.as_tensor(scale, dtype=norms.dtype, device=norms.device))

    def _settle(
        self, scale: Tensor | None, goal: tuple[Any, Any] = (None, None), skip: Tensor | None = None
    ) -> Tensor:
        parts, first = self.parts, self.tables[0][0]
        with parts.on_device:
            return parts.settle(
                first, self.mine, scale, goal, skip, None, parts.corrections, self.joint
            )

    def multiply_(self, step: Tensor) -> None:
        """Multiply by the factors; the last tables first, because the cache has these."""
        with self.parts.on_device:
            for table, indices in reversed(self.tables):
                self.parts.multiply_(table, step, indices)
        torch.autograd.graph.increment_version(self.tensors)


def _are_fit(tensors: Sequence[Tensor], scope: Scope) -> bool:
    """Return whether the tensors are dense, on one device, and have rows as scope divides them."""
    for p in tensors:
        if p.device != tensors[0].device or p.numel() == 0 or p.layout != torch.strided:
            return False
        if not (is_dense(p) if scope.axes is None else p.is_contiguous()):
            return False
        axes = [] if scope.axes is None else sorted(a % p.dim() for a in scope.axes)
        if axes != list(range(len(axes))):  # only leading axes divide memory into rows
            return False
    return not overlaps(tensors)
