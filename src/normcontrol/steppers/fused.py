"""The fused step: Adam and norm control of a whole model in a handful of launches, chosen by AdamWN
on CUDA.

A plan holds the tables that the kernels reach the tensors through, built once and checked at every
step. What it sums while it writes is the norm that the controller would otherwise make a pass for,
and what the controller asks for needs no pass either. Order "before" multiplies in the same pass.
Order "after" learns the factor only when the pass is over: it writes the weights multiplied by a
guess, which the last two factors give to within a rounding error in most steps. What the guess
misses is owed to the next step when it is below one unit in float32's last place, and corrected by
a second pass at once when it is not; so the weights are never further than that from Algorithm 1,
and do not drift.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from normcontrol.distributed.sharding import held
from normcontrol.groups.sets import WeightSet
from normcontrol.scope import Scope, Weights
from normcontrol.steppers.rounding import DROPPED_BITS

try:
    import triton
    import triton.language as tl

    from normcontrol.steppers import kernels

    DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
except ImportError:  # no Triton: AdamWN goes on with torch's own implementations
    triton = None

LANES = 16  # as the kernels interleave
BLOCK, WARPS, BLOCKS_A_CHUNK = 512, 4, 4
"""Elements that a program handles at a time, the warps it has, and the blocks it goes through: the
fastest of those tried by ``benchmarks/step_gpu.py --tune`` on an H200."""


def interpreted() -> bool:
    """Whether Triton runs on the CPU, for testing."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not(params: list[Tensor]) -> str | None:
    """The reason these tensors cannot go through the kernels, or None if they can."""
    if triton is None:
        return "Triton is not installed"
    for p in params:
        if not p.is_cuda and not (interpreted() and p.is_cpu):
            return f"a parameter is on {p.device.type}"
        if p.dtype not in DTYPES:
            return f"a parameter is {p.dtype}"
    return None


class Unfit(Exception):
    """The tensors of this step cannot go through the kernels; the message says why."""


class Launches:
    """Compiled kernels for one bucket, called without looking at their arguments again: these are
    the same at every step but for their values, and Triton's own look at them would cost more than
    many a step's work."""

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self, kernel: Any, programs: int, arguments: tuple[Any, ...], **constants: Any
    ) -> None:
        """Launch; ``constants`` are the kernel's constexpr arguments, in its order."""
        key = (kernel, *constants.values())
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = kernel[(programs,)](*arguments, **constants, num_warps=WARPS)
        else:
            compiled[(programs, 1, 1)](*arguments, *constants.values())


@dataclass
class Bucket:
    """Tensors that one launch can treat alike: one group, one device, one choice of dtypes."""

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
        sizes = [t.numel() for t in held(self.params)]
        self.chunk = BLOCK * BLOCKS_A_CHUNK
        while sum(sizes) > self.chunk << 16:  # tables of under a megabyte, however large the model
            self.chunk *= 2
        counts = [_chunks(n, self.chunk) for n in sizes]
        tensor = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        firsts = torch.tensor([0, *counts]).cumsum(0)
        within = torch.arange(len(tensor)) - firsts[tensor]
        self.chunks = torch.stack([tensor, within], 1).to(self.device, torch.int32)
        self.firsts = firsts.to(self.device, torch.int32)
        self.numels = torch.tensor(sizes, device=self.device)
        self.everyone = torch.arange(len(sizes), dtype=torch.int32, device=self.device)
        self.slot_table = torch.tensor(self.slots, dtype=torch.int32, device=self.device)
        self.partials = torch.zeros(len(tensor), device=self.device)
        self.bias = torch.zeros(2 * len(sizes), device=self.device)
        self.ps, self.ms, self.vs = (
            _addresses(t, self.device) for t in (self.params, self.exp_avgs, self.exp_avg_sqs)
        )
        self.xs = _addresses(self.max_exp_avg_sqs, self.device) if self.max_exp_avg_sqs else self.vs
        self.states = [self.adam_state[t] for t in self.params]
        self.p_at = [t.data_ptr() for t in held(self.params)]
        self.strides = [t.stride() for t in held(self.params)]
        self.at = [t.data_ptr() for t in held(self.grads)]
        self.gs = _addresses(self.grads, self.device)
        self.host = torch.zeros(
            len(sizes), dtype=torch.int64, pin_memory=self.device.type == "cuda"
        )  # for graph capture alone
        self.controlled = any(slot >= 0 for slot in self.slots)
        self.launch = Launches()
        self.fused = False  # whether its set is controlled through the plan

    def still_fits(self) -> bool:
        """Whether weights and moments are where they were. Gradients are new tensors at every step;
        they may move."""
        moments = all(map(is_, map(itemgetter("exp_avg"), self.states), self.exp_avgs))
        squares = all(map(is_, map(itemgetter("exp_avg_sq"), self.states), self.exp_avg_sqs))
        if not moments or not squares or list(map(Tensor.data_ptr, held(self.params))) != self.p_at:
            return False
        grads: list[Any] = [p.grad for p in self.params]
        if all(map(is_, grads, self.grads)) and not _capturing(self.device):
            return True
        dtype = self.grads[0].dtype
        if any(g is None or g.dtype != dtype for g in grads):
            return False
        here = held(grads)
        if list(map(Tensor.stride, here)) != self.strides:
            return False
        at = list(map(Tensor.data_ptr, here))
        if self.aligned and any(address % 16 for address in at):
            return False
        if at != self.at or _capturing(self.device):
            self._point_at(at)
        self.grads = grads
        return True

    def _point_at(self, grads: list[int]) -> None:
        """New gradients in place of the old: their addresses go to the device without waiting for
        it."""
        self.at = grads
        if _capturing(self.device):
            self.host.copy_(
                torch.tensor(grads)
            )  # stays as it is for as long as the graph is replayed
            self.gs.copy_(self.host, non_blocking=True)
        else:
            fresh = torch.tensor(grads, pin_memory=self.device.type == "cuda")
            self.gs.copy_(fresh, non_blocking=True)


class Plan:
    """Everything the kernels need to know of an AdamW, and the norms they have summed."""

    def __init__(self, adam: Any, sets: list[WeightSet]) -> None:
        slots = {
            p: i
            for i, p in enumerate(
                p for s in sets if s.is_plain and s.scope.axes is None for p in s.params
            )
        }
        self.adam, self.state = adam, adam.state
        self.buckets: list[Bucket] = []
        for group in adam.param_groups:
            self._fill(group, slots)
        if len({b.device for b in self.buckets}) > 1:
            raise Unfit("the parameters are on several devices")
        self.idle = [p for group in adam.param_groups for p in group["params"] if p.grad is None]
        planned = {p for b in self.buckets for p in b.params}
        self.params = held([p for b in self.buckets for p in b.params])
        device = self.buckets[0].device if self.buckets else torch.device("cpu")
        self.norms = torch.zeros(len(slots), dtype=torch.float64, device=device)
        self.factors = torch.ones(len(slots), device=device)  # what the next pass multiplies by
        self.debts = torch.ones_like(
            self.norms
        )  # what the weights as they are still have to be multiplied by
        self.lasts = torch.ones_like(self.norms)  # the last factors
        self.corrections = torch.ones_like(self.factors)
        self.needed = torch.zeros((), dtype=torch.int32, device=device)
        self.found_inf: Tensor | None = None
        self.versions: list[int] | None = None  # of the weights whose norms we hold
        self.groups = [
            (g, [slots[p] for p in g["params"] if p in slots]) for g in adam.param_groups
        ]
        self._take_over()
        for s in sets:
            unfuse(s)
            if (
                s.is_plain
                and s.scope.axes is None
                and s.params
                and all(p in planned for p in s.params)
            ):
                mine = [
                    b for b in self.buckets if any(b.group is g for g in s.groups) and b.controlled
                ]
                first = slots[s.params[0]]
                for b in mine:
                    b.fused = True
                weights = FusedWeights(
                    self, s.params, s.scope, mine, first, before=s.settings["order"] == "before"
                )
                if s.shards is None:
                    s.weights = weights
                else:
                    s.shards.pieces = weights

    def _fill(self, group: dict[str, Any], slots: dict[Tensor, int]) -> None:
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        self.adam._init_group(group, *lists)  # torch's own state, made where it is missing
        params, grads, exp_avgs, exp_avg_sqs, maxima, steps = lists
        keys: dict[Any, list[int]] = {}
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            raise Unfit("the betas are tensors")
        for i, (param, grad, moment) in enumerate(zip(params, grads, exp_avgs, strict=True)):
            tensors = held(
                [t[i] for t in (params, grads, exp_avgs, exp_avg_sqs)]
                + ([maxima[i]] if maxima else [])
            )
            if grad.dtype not in DTYPES or moment.dtype not in DTYPES:
                raise Unfit(f"a gradient is {grad.dtype} or its moments are {moment.dtype}")
            if not _is_dense(tensors[0]) or any(t.stride() != tensors[0].stride() for t in tensors):
                raise Unfit(
                    "a parameter, its gradient and its moments are not laid out alike in memory"
                )
            aligned = all(t.data_ptr() % 16 == 0 for t in tensors)
            keys.setdefault(
                (param.device, param.dtype, grad.dtype, moment.dtype, aligned), []
            ).append(i)
        for key, indices in keys.items():
            together = torch.stack([steps[i] for i in indices]).to(key[0])
            for step, i in zip(together.unbind(), indices, strict=True):
                self.state[params[i]]["step"] = step  # a view: one addition counts them all
            p, g, m, v, x = (
                [t[i] for i in indices] if t else []
                for t in (params, grads, exp_avgs, exp_avg_sqs, maxima)
            )
            mine = [slots.get(t, -1) for t in p]
            self.buckets.append(
                Bucket(group, p, g, m, v, x, together, mine, aligned=key[-1], adam_state=self.state)
            )

    def fits(self) -> bool:
        """Whether the plan still describes the optimizer; new gradients are taken over."""
        groups = self.adam.param_groups
        if not self.holds():
            self.debts.fill_(1.0)  # weights that someone else has written owe us nothing
        if self.state is not self.adam.state or any(p.grad is not None for p in self.idle):
            return False
        return all(any(b.group is g for g in groups) and b.still_fits() for b in self.buckets)

    def holds(self) -> bool:
        """Whether the summed norms are still those of the weights, or someone else has written to
        them since."""
        return self.versions == list(map(attrgetter("_version"), self.params))

    def step(self, control_step: Tensor, factor: Tensor | None, found_inf: Tensor | None) -> None:
        """One Adam step of everything; ``factor`` multiplies the gradients."""
        self.found_inf = found_inf
        for b in self.buckets:
            with _on(b.device):
                self._launch(b, control_step, factor, found_inf)
        torch.autograd.graph.increment_version(self.params)
        self.versions = list(map(attrgetter("_version"), self.params))

    def _launch(
        self, b: Bucket, control_step: Tensor, factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        group, n = b.group, len(b.params)
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        skip = b.bias if found_inf is None else found_inf  # any pointer will do where none is used
        before, after = (
            b.controlled and b.fused and group["order"] == order for order in ("before", "after")
        )
        b.launch(
            kernels.prepare, -(-n // 128), (b.steps, b.bias, skip, n),
            LOG2_BETA1=_log2(beta1), LOG2_BETA2=_log2(beta2), HAS_INF=found_inf is not None, BLOCK=128,
        )  # fmt: skip
        b.launch(
            kernels.adam, len(b.chunks),
            (
                b.ps, b.gs, b.ms, b.vs, b.xs, b.numels, b.slot_table, b.chunks, b.bias, lr.to(b.device) if isinstance(lr, Tensor) else lr,
                self.factors, b.partials, b.bias if factor is None else factor, skip, control_step,
            ),
            ONE_MINUS_BETA1=1 - beta1, ONE_MINUS_BETA2=1 - beta2, EPS=group["eps"], AMSGRAD=bool(group["amsgrad"]),
            MAXIMIZE=bool(group["maximize"]), BEFORE=before, AFTER=after, SUM=b.controlled, HAS_INF=found_inf is not None,
            HAS_FACTOR=factor is not None, LR_AT=isinstance(lr, Tensor), DROPPED=b.dropped,
            P=DTYPES[b.params[0].dtype], G=DTYPES[b.grads[0].dtype], S=DTYPES[b.exp_avgs[0].dtype], ALIGNED=b.aligned,
            BLOCK=BLOCK, CHUNK=b.chunk,
        )  # fmt: skip
        if b.controlled:
            arguments = (
                b.partials,
                b.firsts,
                b.slot_table,
                self.norms,
                self.factors,
                self.debts,
                skip,
            )
            b.launch(
                kernels.finish_norms,
                n,
                arguments,
                AFTER=after,
                HAS_INF=found_inf is not None,
                BLOCK=1024,
            )

    def settle(
        self, scale: Tensor, first: int, n: int, buckets: list[Bucket], control_step: Tensor
    ) -> None:
        """Make good what the guessed factors missed, now or in the next step, and guess the next
        ones."""
        tolerance = 2.0**-14 if buckets[0].dropped else 2.0**-23
        skip = self.factors if self.found_inf is None else self.found_inf
        with _on(self.norms.device):
            buckets[0].launch(
                kernels.settle, 1,
                (
                    scale, self.factors, self.debts, self.lasts, self.corrections, self.needed, tolerance, skip, first, n,
                ),
                STRIDE=scale.dim(), HAS_INF=self.found_inf is not None, BLOCK=1024,
            )  # fmt: skip
            for b in buckets:
                arguments = (
                    b.ps,
                    b.numels,
                    b.slot_table,
                    b.chunks,
                    self.corrections,
                    self.needed,
                    control_step,
                    len(b.chunks),
                )
                b.launch(
                    kernels.scale, min(len(b.chunks), 2048), arguments,
                    DROPPED=b.dropped, P=DTYPES[b.params[0].dtype], ALIGNED=b.aligned, BLOCK=BLOCK, CHUNK=b.chunk,
                )  # fmt: skip

    def measure(self) -> None:
        """The norms of weights that someone else has written, summed as the Adam pass would
        have."""
        for b in self.buckets:
            if b.controlled:
                self._norms_of(b, b.ps, b.params[0].dtype, b.slot_table, self.norms)
        self.versions = list(map(attrgetter("_version"), self.params))

    def grad_norm(self) -> Tensor:
        """The joint norm of all gradients, in one pass over them."""
        norms = self.norms.new_empty(len(self.params))
        done = 0
        for b in self.buckets:
            self._norms_of(b, b.gs, b.grads[0].dtype, b.everyone, norms[done:])
            done += len(b.params)
        return torch.linalg.vector_norm(norms)

    def _norms_of(
        self, b: Bucket, addresses: Tensor, dtype: torch.dtype, slots: Tensor, into: Tensor
    ) -> None:
        with _on(b.device):
            sums = (addresses, b.numels, b.chunks, b.partials)
            b.launch(
                kernels.sum_squares,
                len(b.chunks),
                sums,
                P=DTYPES[dtype],
                ALIGNED=b.aligned,
                BLOCK=BLOCK,
                CHUNK=b.chunk,
            )
            arguments = (b.partials, b.firsts, slots, into, into, into, into)
            b.launch(
                kernels.finish_norms,
                len(b.params),
                arguments,
                AFTER=False,
                HAS_INF=False,
                BLOCK=1024,
            )

    def hand_over(self) -> None:
        """Leave what the next step needs in the groups, for a checkpoint or another plan."""
        for group, slots in self.groups:
            if slots:
                group["pending"] = torch.stack(
                    [self.debts[slots], self.lasts[slots], self.factors[slots].double()]
                )

    def _take_over(self) -> None:
        for group, slots in self.groups:
            pending = group.get("pending")
            if pending is not None and pending.shape == (3, len(slots)):
                debts, lasts, factors = pending.to(self.norms.device)
                self.debts[slots], self.lasts[slots], self.factors[slots] = (
                    debts,
                    lasts,
                    factors.float(),
                )


def unfuse(s: WeightSet) -> None:
    """Measure and multiply the set's weights in passes of their own again."""
    if s.shards is None:
        s.weights = s.own_weights()
    else:
        s.shards.unfuse()


class FusedWeights(Weights):
    """Weights whose norms the plan has summed while writing them."""

    def __init__(
        self,
        plan: Plan,
        params: list[Tensor],
        scope: Scope,
        buckets: list[Bucket],
        first: int,
        before: bool,
    ) -> None:
        super().__init__(params, scope)
        self.plan, self.buckets, self.before = plan, buckets, before
        self.mine = slice(first, first + len(params))

    def measure(self) -> Tensor:
        if not self.plan.holds():
            self.plan.measure()
        norms = self.plan.norms[self.mine]
        return (
            norms.clone() if self.before else norms
        )  # the Adam pass that follows will write over them, and norms() still tell of these

    def apply_(self, scale: Tensor, step: Tensor) -> None:
        if self.before:  # the Adam pass that follows will multiply
            self.plan.factors[self.mine].copy_(scale)
        else:
            self.plan.settle(scale, self.mine.start, len(self.params), self.buckets, step)


def _chunks(numel: int, chunk: int) -> int:
    """How many chunks a tensor has: whole rounds of interleaved ones, and in the last round one for
    every block."""
    whole, rest = divmod(numel, LANES * chunk)
    return whole * LANES + min(LANES, -(-rest // BLOCK))


def _is_dense(p: Tensor) -> bool:
    return p.is_contiguous() or (
        p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last)
    )


def _addresses(tensors: list[Tensor], device: torch.device) -> Tensor:
    return torch.tensor([t.data_ptr() for t in held(tensors)], dtype=torch.int64, device=device)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _log2(beta: float) -> float:
    return math.log2(beta) if beta > 0 else -1e9  # 0 ** t is 0


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()
