"""Tables through which the Triton kernels reach the tensors of a model, and cached launches.

A bucket has the tensors that one launch can handle: one group, one device, one choice of dtypes. It
knows where its tensors are and whether they are still there. It knows nothing about control.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import reduce
from itertools import repeat
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
"""Elements that a program handles at a time, its warps, and the blocks that it goes through: the
fastest of those tried by ``benchmarks/step_gpu.py --tune`` on an H200."""


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


class Launches:
    """Compiled kernels of one bucket, launched without Triton's checks of their arguments.

    The types of the arguments are the same at every step, and Triton's checks would take longer
    than many a step.
    """

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self, kernel: Any, programs: int, arguments: tuple[Any, ...], **constants: Any
    ) -> None:
        """Launch a kernel; ``constants`` are its constexpr arguments, in its order."""
        key = (kernel, *constants.values())
        known = self._compiled.get(key)
        if known is None:
            self._compiled[key] = kernel[(programs,)](*arguments, **constants, num_warps=WARPS)
        else:
            known[(programs, 1, 1)](*arguments, *constants.values())


@dataclass
class Bucket:
    """Tensors that one launch can handle, and the tables of their addresses.

    ``slots`` are the indices of the tensors among the controlled ones, -1 if not controlled.
    """

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    steps: Tensor
    slots: list[int]
    aligned: bool
    adam_state: Any

    def __post_init__(self) -> None:
        p = self.params[0]
        self.device, self.dropped = p.device, DROPPED_BITS.get(p.dtype, 0)
        local = local_tensors(self.params)
        self.is_sharded = any(map(is_not, local, self.params))
        sizes = [t.numel() for t in local]
        self.chunk = BLOCK * BLOCKS_A_CHUNK
        while sum(sizes) > self.chunk << 16:  # tables of less than a megabyte for any model
            self.chunk *= 2
        counts = [chunk_count(n, self.chunk) for n in sizes]
        tensor = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        firsts = torch.tensor([0, *counts]).cumsum(0)
        within = torch.arange(len(tensor)) - firsts[tensor]
        on: Any = {"device": self.device}
        self.chunks = torch.stack([tensor, within], 1).to(self.device, torch.int32)
        self.firsts = firsts.to(self.device, torch.int32)
        self.numels = torch.tensor(sizes, **on)
        self.everyone = torch.arange(len(sizes), dtype=torch.int32, **on)
        self.slot_table = torch.tensor(self.slots, dtype=torch.int32, **on)
        self.partials = torch.zeros(len(tensor), **on)
        self.bias = torch.zeros(2 * len(sizes), **on)
        self.ps, self.ms, self.vs, self.gs = (
            torch.tensor([t.data_ptr() for t in local_tensors(tensors)], dtype=torch.int64, **on)
            for tensors in (self.params, self.exp_avgs, self.exp_avg_sqs, self.grads)
        )
        self.xs = self.vs
        if self.max_exp_avg_sqs:
            maxima = [t.data_ptr() for t in local_tensors(self.max_exp_avg_sqs)]
            self.xs = torch.tensor(maxima, dtype=torch.int64, **on)
        self.states = [self.adam_state[t] for t in self.params]
        self.addresses = [t.data_ptr() for t in local]
        self.strides = [t.stride() for t in local]
        self.grad_addresses = [t.data_ptr() for t in local_tensors(self.grads)]
        # Used only while a graph is captured, and then read at every replay.
        pinned = self.device.type == "cuda"
        self.host = torch.zeros(len(sizes), dtype=torch.int64, pin_memory=pinned)
        self.has_controlled = any(slot >= 0 for slot in self.slots)
        self.launch = Launches()
        self.multiplies = False
        """Whether the kernels multiply the controlled tensors of this bucket."""

    def still_fits(self) -> bool:
        """Return whether the addresses of weights and moments are unchanged.

        Gradients are usually new tensors at every step: their addresses are updated.
        """
        moments = all(map(is_, map(itemgetter("exp_avg"), self.states), self.exp_avgs))
        squares = all(map(is_, map(itemgetter("exp_avg_sq"), self.states), self.exp_avg_sqs))
        local = local_tensors(self.params) if self.is_sharded else self.params
        if not moments or not squares or list(map(Tensor.data_ptr, local)) != self.addresses:
            return False
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        grads: list[Any] = [p.grad for p in self.params]
        if not capturing and all(map(is_, grads, self.grads)):
            return True
        if any(map(is_, grads, repeat(None))):
            return False
        if set(map(attrgetter("dtype"), grads)) != {self.grads[0].dtype}:
            return False
        local = local_tensors(grads) if self.is_sharded else grads
        if list(map(Tensor.stride, local)) != self.strides:
            return False
        at = list(map(Tensor.data_ptr, local))
        if self.aligned and reduce(or_, at) % 16:
            return False
        if at != self.grad_addresses or capturing:
            self.point_at(at, capturing)
        self.grads = grads
        return True

    def point_at(self, grads: list[int], capturing: bool) -> None:
        """Send the addresses of new gradients to the device without waiting for it."""
        self.grad_addresses = grads
        if capturing:
            self.host.copy_(torch.tensor(grads))  # unchanged for as long as the graph is replayed
            self.gs.copy_(self.host, non_blocking=True)
        else:
            fresh = torch.tensor(grads, pin_memory=self.device.type == "cuda")
            self.gs.copy_(fresh, non_blocking=True)


def chunk_count(numel: int, chunk: int) -> int:
    """Return how many chunks a tensor has.

    There are whole rounds of interleaved chunks; the last round has one chunk for every block.
    """
    whole, rest = divmod(numel, LANES * chunk)
    return whole * LANES + min(LANES, -(-rest // BLOCK))
