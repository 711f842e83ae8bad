"""Passes over tensors in Triton kernels: they measure norms, apply the law, and multiply.

``Parts`` has the norms and factors of the parts of tensors on one device. The fused stepper uses it
beside Adam, and ``SetPasses`` to control the weights of any optimizer. This file does not know how
targets and rates are chosen. It is imported where its kernels are used, because it needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from normcontrol.scope import Scope
from normcontrol.steppers import pass_kernels
from normcontrol.steppers.tables import SUPPORTED, Launch, Table, why_not
from normcontrol.weights.memory import overlaps

DTYPES = {dtype: getattr(tl, str(dtype).removeprefix("torch.")) for dtype in SUPPORTED}
"""Triton's names of the dtypes."""
PROGRAMS = 2048
"""The most programs that multiply: each goes through many chunks, or finds nothing to do."""


class Parts:
    """The norms of parts of tensors, and the factors that their weights are multiplied by."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.on_device: Any = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        self.norms = torch.zeros(count, dtype=torch.float64, device=device)
        self.factors = torch.ones(count, device=device)
        """What Adam's pass multiplies by: the factors that the law chose, or a guess of them."""
        self.lasts = torch.ones_like(self.norms)
        """The last scales, from which the next factors are guessed."""
        self.corrections = torch.ones_like(self.factors)
        """What the pass after it multiplies by: the factors of the law, or what a guess missed."""
        self.needed = torch.zeros((), dtype=torch.int32, device=device)
        """Whether a pass is needed to multiply, because a factor is not 1."""
        self._rate: tuple[float | None, Tensor] = None, self.norms.new_zeros(())

    def goal(self, target: Tensor | float, rate: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return the target and the rate as tensors on the device.

        A number as rate is written there when it changes. A graph that is being captured gets its
        own, since what it would write is not there before it is replayed.
        """
        new_full, (known, stored) = self.norms.new_full, self._rate
        if not isinstance(target, Tensor):
            target = new_full((), target)
        if isinstance(rate, Tensor):
            return target, rate.to(self.norms)
        if rate != known:
            if stored.is_cuda and torch.cuda.is_current_stream_capturing():
                return target, new_full((), rate)
            self._rate = rate, stored.fill_(rate)
        return target, stored


class Passes:
    """The two passes over the tensors of a table: one that measures, one that multiplies."""

    def __init__(self, parts: Parts, t: Table) -> None:
        self.measure = partial(NormPass(t, t.dtype, t.slot_table, parts.norms), t.ps)
        self.multiply_ = Launch(
            pass_kernels.scale, min(t.programs, PROGRAMS),
            (t.ps, t.numels, t.slot_table, t.chunks, parts.corrections, parts.needed, t.programs),
            DROPPED=t.dropped, P=DTYPES[t.dtype], ALIGNED=t.aligned, BLOCK=t.block, CHUNK=t.chunk,
        )  # fmt: skip


class RowPasses:
    """The passes over tensors whose rows have norms of their own: two, or one that does all.

    ``indices`` are those of the tensors in their set, which seed the rounding of bf16 and fp16.
    """

    def __init__(self, parts: Parts, t: Table, indices: Tensor) -> None:
        self.norms = parts.norms
        fixed = (
            t.ps, t.numels, t.slot_table, t.chunks, indices, parts.norms, parts.corrections,
            t.length, t.programs,
        )  # fmt: skip
        self.launches = {
            do: Launch(
                pass_kernels.rows, t.programs, fixed,
                **dict(zip(("MEASURE", "LAW", "MULTIPLY", "HAS_INF"), do, strict=True)),
                DROPPED=t.dropped, P=DTYPES[t.dtype], ALIGNED=t.aligned, ROWS=t.chunk,
                BLOCK=t.block,
            )
            for do in (ONLY_MEASURE, ONLY_MULTIPLY, DO_ALL, DO_ALL_UNLESS_INF)
        }  # fmt: skip

    def measure(self) -> None:
        self.launches[ONLY_MEASURE](*[self.norms] * 5)  # an unused pointer may be any

    def multiply_(self, step: Tensor) -> None:
        self.launches[ONLY_MULTIPLY](*[self.norms] * 4, step)

    def control(
        self, scale: Tensor, target: Tensor, rate: Tensor, skip: Tensor | None, step: Tensor
    ) -> None:
        """Measure, apply the law and multiply; write the scale."""
        if skip is None:
            self.launches[DO_ALL](scale, target, rate, self.norms, step)
        else:
            self.launches[DO_ALL_UNLESS_INF](scale, target, rate, skip, step)


ONLY_MEASURE, ONLY_MULTIPLY = (True, False, False, False), (False, False, True, False)
DO_ALL, DO_ALL_UNLESS_INF = (True, True, True, False), (True, True, True, True)


class NormPass:
    """Writes the norms of tensors whose addresses it is given, divided as those of a table."""

    def __init__(self, t: Table, dtype: torch.dtype, slots: Tensor, norms: Tensor) -> None:
        self.sum = Launch(
            pass_kernels.sum_squares, t.programs, (t.numels, t.chunks, t.partials),
            P=DTYPES[dtype], ALIGNED=t.aligned, BLOCK=t.block, CHUNK=t.chunk,
        )  # fmt: skip
        self.finish = Launch(
            pass_kernels.finish_norms, len(t.slots), (t.partials, t.firsts, slots, norms, norms),
            AFTER=False, HAS_INF=False, BLOCK=1024,
        )  # fmt: skip
        self.unused = norms  # an unused pointer may be any

    def __call__(self, addresses: Tensor) -> None:
        self.sum(addresses)
        self.finish(self.unused)


class Choice:
    """Chooses the factors of some parts: by the law from their norms, or as they are given.

    Args:
        parts: the norms and factors.
        mine: which of the parts.
        joint: whether these have one norm, target and scale.
        into: the factors that are written: those of the next pass, or the corrections.
        tolerance: given if the weights were written with a guessed factor; the corrections are what
            the guess missed by more than this.
    """

    def __init__(
        self, parts: Parts, mine: slice, joint: bool, into: Tensor, tolerance: float | None = None
    ) -> None:
        self.parts = parts
        fixed = (parts.norms, parts.factors, parts.lasts, into, parts.needed, tolerance or 0.0)
        self.launches = {
            (law, has_inf): Launch(
                pass_kernels.settle, 1, (*fixed, mine.start, mine.stop - mine.start),
                LAW=law, JOINT=joint, GUESSED=tolerance is not None, HAS_INF=has_inf, BLOCK=1024,
            )
            for law in (True, False) for has_inf in (True, False)
        }  # fmt: skip

    def by_law(self, target: Any, rate: Any, skip: Tensor | None) -> Tensor:
        """Choose by the proportional law; return the scale. ``skip`` is GradScaler's flag."""
        target, rate = self.parts.goal(target, rate)
        scale = torch.empty_like(target)
        with self.parts.on_device:
            launch = self.launches[True, skip is not None]
            launch(scale, target, rate, self.parts.norms if skip is None else skip)
        return scale

    def take(self, scale: Any, skip: Tensor | None = None, rate: Any = 0.0) -> None:
        """Choose these factors, which were computed elsewhere; the rate serves the next guess."""
        norms = self.parts.norms
        _, rate = self.parts.goal(norms, rate)
        scale = torch.as_tensor(scale, dtype=norms.dtype, device=norms.device).contiguous()
        if scale.data_ptr() % 16:  # the kernel relies on it
            scale = scale.clone()
        with self.parts.on_device:
            launch = self.launches[False, skip is not None]
            launch(scale, norms, rate, norms if skip is None else skip)


def is_dense(p: Tensor) -> bool:
    """Return whether the elements of a tensor fill a piece of memory."""
    channels_last = p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last)
    return p.is_contiguous() or channels_last


class SetPasses:
    """Measures and multiplies tensors in a few launches: one pass that reads, one that multiplies.

    :meth:`made` returns None if the kernels cannot handle the tensors.
    """

    measures_size = False
    """Whether :meth:`measure` returns what is controlled in place of the norm."""

    def __init__(self, tensors: Sequence[Tensor], scope: Scope) -> None:
        self.tensors = tensors
        counts, device = scope.sizes(tensors), tensors[0].device
        firsts = list(accumulate(counts, initial=0))
        self.parts = Parts(firsts[-1], device)
        alike: dict[Any, list[int]] = {}
        for i, t in enumerate(tensors):
            length = 0 if scope.axes is None else t.numel() // counts[i]
            alike.setdefault((t.dtype, t.data_ptr() % 16 == 0, length), []).append(i)
        self.passes: list[Any] = []
        for (_, aligned, length), some in alike.items():
            some_tensors, slots = [tensors[i] for i in some], [firsts[i] for i in some]
            table = Table(some_tensors, slots, aligned, length)
            indices = torch.tensor(some, dtype=torch.int32, device=device)
            self.passes.append(
                RowPasses(self.parts, table, indices) if length else Passes(self.parts, table)
            )
        self.has_rows = scope.axes is not None
        self.choice = Choice(self.parts, slice(0, firsts[-1]), scope.joint, self.parts.corrections)
        self.addresses = list(map(Tensor.data_ptr, tensors))
        self.strides = list(map(Tensor.stride, tensors))

    @classmethod
    def made(cls, tensors: Sequence[Tensor], scope: Scope, *more: Any) -> SetPasses | None:
        """Return passes over these tensors; None if the kernels cannot handle them."""
        if why_not(list(tensors)) is not None or not _are_fit(tensors, scope):
            return None
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # the tables must exist before a graph is captured
        return cls(tensors, scope, *more)

    def still_fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the tensors are where they were. Shards may be other objects now."""
        self.tensors = tensors
        at = list(map(Tensor.data_ptr, tensors))
        return at == self.addresses and list(map(Tensor.stride, tensors)) == self.strides

    def begin(self, step: Tensor, may_be_one_pass: bool) -> None:
        """Begin a step, whose number seeds the rounding of bf16 and fp16.

        Rows are controlled in one pass if the kernel knows their law, and what it measures is what
        is controlled. Then :meth:`by_law` does all, and the norms are not known before it.
        """
        self.step, self.is_one_pass = step, may_be_one_pass and self.has_rows

    def measure(self) -> Tensor:
        """Return the norms of all parts."""
        if not self.is_one_pass:
            with self.parts.on_device:
                for passes in self.passes:
                    passes.measure()
        return self.parts.norms

    def by_law(self, target: Any, rate: Any, skip: Tensor | None) -> Tensor:
        """Choose the factors by the law, from the norms; return the scale."""
        if not self.is_one_pass:
            return self.choice.by_law(target, rate, skip)
        target, rate = self.parts.goal(target, rate)
        scale = torch.empty_like(target)
        with self.parts.on_device:
            for passes in self.passes:
                passes.control(scale, target, rate, skip, self.step)
        torch.autograd.graph.increment_version(self.tensors)
        return scale

    def note(self, sizes: Tensor) -> Tensor:
        """Take what is controlled in place of the norms, if it was measured in another way."""
        return self.parts.norms.copy_(sizes)

    def multiply_(self, scale: Any = None) -> None:
        """Multiply by the factors that the law chose, or by ``scale``, if another law did.

        The last tables are first, because the cache has these.
        """
        if self.is_one_pass:
            return
        if scale is not None:
            self.choice.take(scale)
        with self.parts.on_device:
            for passes in reversed(self.passes):
                passes.multiply_(self.step)
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
