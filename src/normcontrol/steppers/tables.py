"""Tables through which the Triton kernels reach the tensors of a model, and cached launches.

A table has the tensors that one launch can handle: one device, one dtype. A bucket is a table of
one group, with the gradients and moments of Adam. Both know where their tensors are and whether
they are still there. They know nothing about control.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import reduce
from importlib import import_module
from itertools import chain, repeat
from operator import attrgetter, is_, is_not, itemgetter, or_
from typing import Any

import torch
from torch import Tensor

from normcontrol.distributed.ranks import local_tensors
from normcontrol.weights.rounding import DROPPED_BITS

SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kernels can handle."""
LANES = 16  # chunks that the kernels interleave
BLOCK, WARPS, BLOCKS_A_CHUNK = 512, 4, 4
"""Elements of float32 that a program handles at a time, its warps, and the blocks that it goes
through: the fastest of those tried by ``benchmarks/step_gpu.py --tune`` on an H200."""
ELEMENTS = 2048
"""About how many elements the rows have that a program handles at a time."""
KEPT = 8
"""How many tables of the addresses of gradients are kept."""


def is_interpreted() -> bool:
    """Return whether Triton runs on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not(params: list[Tensor]) -> str | None:
    """Return why these tensors cannot go through the kernels, or None if they can."""
    for p in params:
        if not p.is_cuda and not (is_interpreted() and p.is_cpu):
            return f"a parameter is on {p.device.type}"
        if p.dtype not in SUPPORTED:
            return f"a parameter is {p.dtype}"
    try:
        import triton  # noqa: F401  # last, because it takes a while
    except ImportError:
        return "Triton is not installed"
    return None


KNOWN = (3, 6), (3, 9)
"""The oldest and the newest Triton whose compiled kernels are launched directly: the one was run,
of the other the source was read."""


class Launch:
    """A kernel with its constants. After the first call it is launched without Triton's checks.

    The types of the arguments are the same at every call, and Triton's checks would take longer
    than many a step. With a Triton that is not :data:`KNOWN` they are made.

    Args:
        kernel: the kernel.
        programs: how many programs are launched.
        fixed: its first arguments, the same at every call.
        constants: its constexpr arguments, in its order.
    """

    def __init__(self, kernel: Any, programs: int, fixed: tuple[Any, ...], **constants: Any):
        self.kernel, self.programs, self.fixed, self.constants = kernel, programs, fixed, constants
        self._run: Any = None
        self._stream: Any = None
        self._device = 0
        self._compiled: tuple[Any, ...] = ()
        self._constants = tuple(constants.values())

    def __call__(self, *arguments: Any) -> None:
        """Launch the kernel, on the current device and stream."""
        if self._run is not None:
            stream = self._stream(self._device)
            self._run(self.programs, 1, 1, stream, *self._compiled, *arguments, *self._constants)
            return
        given = (*self.fixed, *arguments)
        compiled = self.kernel[(self.programs,)](*given, **self.constants, num_warps=WARPS)
        if compiled is None:  # the interpreter compiles nothing
            return
        version = import_module("triton").__version__.split(".")
        if not KNOWN[0] <= (int(version[0]), int(version[1])) <= KNOWN[1]:
            return
        driver = import_module("triton.runtime").driver.active
        self._device, self._stream = driver.get_current_device(), driver.get_current_stream
        addresses = [a.data_ptr() if isinstance(a, Tensor) else a for a in self.fixed]
        no_hooks = (None, None, None)
        self._compiled = compiled.function, compiled.packed_metadata, *no_hooks, *addresses
        self._run = compiled.run


class Table:
    """Tensors that one launch can handle, their addresses, and the chunks they are divided into.

    ``slots`` are the indices of the tensors among the controlled ones, -1 if not controlled. If
    the tensors have rows of a ``length``, a chunk is a few rows, and ``slots`` are the indices of
    the first rows.
    """

    def __init__(
        self, tensors: Sequence[Tensor], slots: list[int], aligned: bool, length: int = 0
    ) -> None:
        first = tensors[0]
        self.device, self.dtype, self.aligned = first.device, first.dtype, aligned
        self.dropped, self.length = DROPPED_BITS.get(first.dtype, 0), length
        on: Any = {"device": self.device}
        sizes = [t.numel() for t in tensors]
        if length:
            self.block = block_of(length)
            self.chunk = max(1, ELEMENTS // self.block)
            counts = [-(-n // length // self.chunk) for n in sizes]
        else:
            self.block = BLOCK * 4 // first.element_size()  # of 16 bytes for every thread
            self.chunk = self.block * BLOCKS_A_CHUNK
            while sum(sizes) > self.chunk << 16:  # tables of less than a megabyte for any model
                self.chunk *= 2
            counts = [chunk_count(n, self.block, self.chunk) for n in sizes]
        repeats = torch.tensor(counts, device="cpu")
        tensor = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), repeats)
        firsts = torch.tensor([0, *counts], device="cpu").cumsum(0)
        within = torch.arange(len(tensor), device="cpu") - firsts[tensor]
        within *= self.chunk if length else 1
        self.programs = len(tensor)
        self.chunks = torch.stack([tensor, within], 1).to(self.device, torch.int32)
        self.firsts = firsts.to(self.device, torch.int32)
        self.numels = torch.tensor(sizes, **on)
        self.slots = slots
        self.slot_table = torch.tensor(slots, dtype=torch.int32, **on)
        self.partials = torch.zeros(0 if length else len(tensor), **on)
        self.addresses = [t.data_ptr() for t in tensors]
        self.strides = [t.stride() for t in tensors]
        self.ps = torch.tensor(self.addresses, dtype=torch.int64, **on)


class Bucket(Table):
    """The tensors of one group that one launch of Adam can handle."""

    def __init__(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        steps: Tensor,
        slots: list[int],
        aligned: bool,
        adam_state: Any,
    ) -> None:
        local = local_tensors(params)
        super().__init__(local, slots, aligned)
        self.group, self.params, self.steps = group, params, steps
        self.is_sharded = any(map(is_not, local, params))
        self.grad_dtype, self.state_dtype = grads[0].dtype, exp_avgs[0].dtype
        on: Any = {"device": self.device}
        self.everyone = torch.arange(len(params), dtype=torch.int32, **on)
        self.bias = torch.zeros(2 * len(params), **on)
        self.ms, self.vs, self.xs = (
            torch.tensor([t.data_ptr() for t in local_tensors(tensors)], dtype=torch.int64, **on)
            for tensors in (exp_avgs, exp_avg_sqs, max_exp_avg_sqs or exp_avg_sqs)
        )
        self.states = [adam_state[t] for t in params]
        self.amsgrad = group["amsgrad"]
        maxima = ("max_exp_avg_sq",) if self.amsgrad else ()
        self.stored_in = itemgetter("step", "exp_avg", "exp_avg_sq", *maxima)
        self.stored = [*chain.from_iterable(map(self.stored_in, self.states))]
        """What Adam stores of these tensors."""
        self.is_contiguous = all(map(Tensor.is_contiguous, local))
        self.gradients: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        """Tables of the addresses of gradients, on the device and on the host, by the addresses."""
        self.captured: list[tuple[Tensor, Tensor]] = []
        """Those that graphs read."""
        self.spare: Tensor | None = None
        """A table on the host for a captured graph: none can be allocated during a capture."""
        self.gs = self.table_of(tuple(t.data_ptr() for t in local_tensors(grads)))
        self.betas: tuple[float, ...] = ()
        self.logarithms: tuple[float, ...] = ()
        """The betas of the last step, and their logarithms."""
        self.launches: dict[Any, tuple[Launch, ...]] = {}
        """The kernels of a step, by the options of Adam."""
        self.has_controlled = any(slot >= 0 for slot in slots)
        self.multiplies = False
        """Whether the kernels multiply the controlled tensors of this bucket."""

    def still_fits(self) -> bool:
        """Return whether the addresses of weights are unchanged, and the tensors of Adam's state.

        Gradients are usually new tensors at every step: their addresses are updated. They are not
        kept: their memory is needed after ``zero_grad``.
        """
        stored = chain.from_iterable(map(self.stored_in, self.states))
        local = local_tensors(self.params) if self.is_sharded else self.params
        if not all(map(is_, stored, self.stored)) or self.group["amsgrad"] != self.amsgrad:
            return False
        if list(map(Tensor.data_ptr, local)) != self.addresses:
            return False
        grads: list[Any] = [p.grad for p in self.params]
        if any(map(is_, grads, repeat(None))):
            return False
        if set(map(attrgetter("dtype"), grads)) != {self.grad_dtype}:
            return False
        local = local_tensors(grads) if self.is_sharded else grads
        alike = self.is_contiguous and all(map(Tensor.is_contiguous, local))  # the faster check
        if not alike and list(map(Tensor.stride, local)) != self.strides:
            return False
        at = tuple(map(Tensor.data_ptr, local))
        if at not in self.gradients and self.aligned and reduce(or_, at) % 16:
            return False
        self.gs = self.table_of(at)
        return True

    def table_of(self, grads: tuple[int, ...]) -> Tensor:
        """Return a table of the addresses of gradients, without waiting for the device.

        The last few are kept, for gradients that are at the same addresses again. A graph that is
        being captured reads its own at every replay: a known one, or one that it copies itself.
        """
        is_cuda = self.device.type == "cuda"
        is_captured = is_cuda and torch.cuda.is_current_stream_capturing()
        found = self.gradients.get(grads)
        if found is not None and not is_captured:
            return found[0]
        if found is None and is_captured and self.spare is not None:
            host, self.spare = self.spare.copy_(torch.tensor(grads, device="cpu")), None
            found = host.to(self.device, non_blocking=True), host
        elif found is None:
            host = torch.tensor(grads, device="cpu", pin_memory=is_cuda)
            found = host.to(self.device, non_blocking=True), host
        if is_captured:
            self.captured.append(found)
            return found[0]
        if self.spare is None:
            self.spare = torch.empty_like(found[1], pin_memory=is_cuda)
        if len(self.gradients) >= KEPT:
            self.gradients.pop(next(iter(self.gradients)))
        self.gradients[grads] = found
        return found[0]


def block_of(length: int) -> int:
    """Return how many elements of a row a program reads at a time: few of them beyond its end.

    >>> [block_of(length) for length in (5, 64, 768, 1000, 3072, 5000)]
    [8, 64, 256, 1024, 1024, 1024]
    """
    powers = [1 << i for i in range(min(10, (length - 1).bit_length()), 6, -1)]
    fit = [p for p in powers if -length % p <= length // 8]
    return fit[0] if fit else min(1024, 1 << (length - 1).bit_length())


def chunk_count(numel: int, block: int, chunk: int) -> int:
    """Return how many chunks a tensor has.

    There are whole rounds of interleaved chunks; the last round has one chunk for every block.
    """
    whole, rest = divmod(numel, LANES * chunk)
    return whole * LANES + min(LANES, -(-rest // block))
