"""The fused stepper: Adam and norm control of a whole model in a few Triton launches.

With ``order="after"`` the Adam pass writes the weights multiplied by a guess of the scale, and sums
their squares, so no pass is needed to measure; a second pass corrects a guess that missed by more
than a rounding error. With ``order="before"`` a pass measures the weights, and the Adam pass
multiplies them. No norm is kept from one step to the next: an edit through ``.data`` cannot be
noticed in any other way than by reading the weights. This file knows nothing about targets, rates
or laws. It is imported where its kernels are used, because it needs Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normcontrol.distributed.ranks import local_tensors
from normcontrol.distributed.sharing import Sharing
from normcontrol.groups.moments import check_moments
from normcontrol.groups.sets import WeightSet
from normcontrol.groups.settings import USE_UPDATES
from normcontrol.groups.state import state_of
from normcontrol.steppers import kernels, pass_kernels
from normcontrol.steppers.folded import in_float32
from normcontrol.steppers.passes import DTYPES, Choice, NormPass, Parts, Passes, is_dense
from normcontrol.steppers.stepper import TOLERANCE, Closure, PlainStepper, Scaler
from normcontrol.steppers.tables import Bucket, Launch, why_not
from normcontrol.warn import warn
from normcontrol.weights.memory import overlaps

LOW_PRECISION_TOLERANCE = 2.0**-14
"""The tolerance of a guess for bf16 and fp16 weights."""


class Unfit(Exception):
    """The tensors of this step cannot go through the kernels; the message says why."""


class Slots(NamedTuple):
    """What the kernels have of a set: its norms, passes, and how its factors are chosen."""

    norms: Tensor
    passes: list[Passes]
    choice: Choice
    law: Any
    """What applies the law of the set on the device; None if a kernel cannot."""


class FusedStepper(PlainStepper):
    """Steps of AdamW in Triton kernels.

    If the tensors of a step cannot go through the kernels, the step is torch's own, and ``reason``
    says why.
    """

    needs_gradients = True

    plan: Plan | None = None

    def prepare(self, sets: Sequence[WeightSet], sharing: Sharing) -> None:
        self.hand_over()
        super().prepare(sets, sharing)
        self.plan = None

    def hand_over(self) -> None:
        if self.plan is not None:
            self.plan.hand_over()

    def begin(self) -> None:
        """Build or reuse the plan. If the kernels cannot handle the tensors, store the reason."""
        compiling = torch.compiler.is_compiling()
        if self.plan is not None and not compiling and self.plan.fits():
            return
        try:
            if compiling:
                raise Unfit("the step is compiled")
            self.hand_over()
            self.plan, self.reason = Plan(self.optimizer, self.sets), None
        except Unfit as unfit:
            if self.reason is None and not compiling:
                own = "fused" if self.optimizer.param_groups[0]["fused"] else "own"
                warn(f"AdamWN continues with torch's {own} implementation, since {unfit}.")
            self.plan, self.reason = None, str(unfit)

    def step(self, closure: Closure | None, scaler: Scaler) -> float | None:
        if self.plan is None:
            return super().step(closure, scaler)
        factor = None
        if self.clip.max_norm is not None:
            factor = self.clip.factor(self._gradient_norm(), scaler.grad_scale)
        if scaler.grad_scale is not None:
            unscale = scaler.grad_scale.reciprocal()
            factor = unscale if factor is None else factor / scaler.grad_scale
        self.plan.step(self.clock.step, factor, scaler.found_inf)
        return None

    def measure(self, s: WeightSet) -> Tensor:
        if self.plan is None or s not in self.plan.slots or s.shards is not None:
            return super().measure(s)
        s.law_on_device = self.plan.slots[s].law
        s.parts = self.plan.norms_of(s)
        return s.join(s.parts)

    def multiply_(self, s: WeightSet, scale: Tensor) -> None:
        if self.plan is None or s not in self.plan.slots or s.shards is not None:
            super().multiply_(s, scale)
        else:
            self.plan.multiply_(s, scale, self.clock.step)

    def local_norms(self, s: WeightSet) -> Tensor:
        if self.plan is not None and s in self.plan.slots:
            return self.plan.norms_of(s)
        return super().local_norms(s)

    def multiply_local_(self, s: WeightSet, scale: Tensor) -> None:
        if self.plan is not None and s in self.plan.slots:
            self.plan.multiply_(s, scale, self.clock.step)
        else:
            super().multiply_local_(s, scale)

    @torch.no_grad()
    def _gradient_norm(self) -> Tensor:
        assert self.plan is not None
        if not self.gradient_norm.sharing.is_shared:
            return self.plan.gradient_norm()
        groups = self.optimizer.param_groups
        return self.gradient_norm([p for g in groups for p in g["params"] if p.grad is not None])


class Plan:
    """What the kernels need to know about an AdamW and its sets, and the norms that they compute.

    It is built once and checked at every step.
    """

    def __init__(self, adam: Any, sets: Sequence[WeightSet]) -> None:
        moved = why_not([p for group in adam.param_groups for p in group["params"]])
        if moved is not None:
            raise Unfit(moved)
        used = next((name for s in sets for name in s.mechanisms & USE_UPDATES), None)
        if used is not None:
            raise Unfit(f"{used}= needs the weights before the step")
        planned = [s for s in sets if s.scope.axes is None and "size" not in s.mechanisms]
        slots = {p: i for i, p in enumerate(p for s in planned for p in s.params)}
        check_moments(adam)
        self.adam, self.state = adam, adam.state
        self.buckets: list[Bucket] = []
        for group in adam.param_groups:
            self._add_buckets(group, slots)
        if len({b.device for b in self.buckets}) > 1:
            raise Unfit("the parameters are on several devices")
        groups = adam.param_groups
        self.without_gradient = [p for g in groups for p in g["params"] if p.grad is None]
        stepped = [p for b in self.buckets for p in b.params]
        self.params = local_tensors(stepped)
        if overlaps(self.params):
            raise Unfit("two parameters share memory")
        device = self.buckets[0].device if self.buckets else torch.device("cpu")
        self.parts = Parts(len(slots), device)
        self.found_inf: Tensor | None = None
        self.gradient_norms: Tensor | None = None
        self.gradient_passes: list[NormPass] = []
        self.group_ids = list(map(id, groups))
        self.groups = [(g, [slots[p] for p in g["params"] if p in slots]) for g in groups]
        self.are_tensors = [isinstance(key, Tensor) for key in self.state]
        self.entries = [*compress(self.state.values(), self.are_tensors)]
        """The states of all tensors; other optimizers' code may store more under other keys."""
        self._take_over()
        self.slots: dict[WeightSet, Slots] = {}
        found = set(stepped)
        for s in planned:
            if s.params and found.issuperset(s.params):
                controlled = [b for b in self.buckets if b.has_controlled]
                mine = [b for b in controlled if any(b.group is g for g in s.groups)]
                for b in mine:
                    b.multiplies = True
                first = slots[s.params[0]]
                self.slots[s] = self._slots(s, slice(first, first + len(s.params)), mine)

    def _slots(self, s: WeightSet, mine: slice, buckets: list[Bucket]) -> Slots:
        into, tolerance = self.parts.factors, None
        if s.order == "after":
            into = self.parts.corrections
            tolerance = LOW_PRECISION_TOLERANCE if buckets[0].dropped else TOLERANCE
        choice = Choice(self.parts, mine, s.scope.joint, into, tolerance)
        law = choice.by_law if s.has_plain_law and s.shards is None else None
        passes = [Passes(self.parts, b) for b in buckets]
        return Slots(self.parts.norms[mine], passes, choice, law)

    def _add_buckets(self, group: dict[str, Any], slots: dict[Tensor, int]) -> None:
        """Sort the tensors of a group into buckets."""
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            raise Unfit("the betas are tensors")
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        self.adam._init_group(group, *lists)  # torch's own state, created where it is missing
        params, grads, exp_avgs, exp_avg_sqs, maxima, steps = lists
        keys: dict[Any, list[int]] = {}
        for i, (param, grad, moment) in enumerate(zip(params, grads, exp_avgs, strict=True)):
            mine = [t[i] for t in (params, grads, exp_avgs, exp_avg_sqs, maxima) if t]
            tensors = local_tensors(mine)
            if any(t.device != tensors[0].device for t in tensors):
                raise Unfit("a parameter and its moments are on different devices")
            if grad.dtype not in DTYPES or moment.dtype not in DTYPES:
                raise Unfit(f"a gradient is {grad.dtype} or its moments are {moment.dtype}")
            if not is_dense(tensors[0]) or any(t.stride() != tensors[0].stride() for t in tensors):
                raise Unfit(
                    "a parameter, its gradient and its moments have different memory layouts"
                )
            aligned = all(t.data_ptr() % 16 == 0 for t in tensors)
            key = (param.device, param.dtype, grad.dtype, moment.dtype, aligned)
            keys.setdefault(key, []).append(i)
        for key, indices in keys.items():
            together = torch.stack([steps[i] for i in indices]).to(key[0], torch.float32)
            for step, i in zip(together.unbind(), indices, strict=True):
                self.state[params[i]]["step"] = step  # a view: one addition counts them all
            p, g, m, v, x = (
                [t[i] for i in indices] if t else []
                for t in (params, grads, exp_avgs, exp_avg_sqs, maxima)
            )
            mine_slots = [slots.get(t, -1) for t in p]
            bucket = Bucket(group, p, g, m, v, x, together, mine_slots, key[-1], self.state)
            self.buckets.append(bucket)

    def fits(self) -> bool:
        """Return whether the plan still describes the optimizer. Gradients may be new tensors."""
        if self.state is not self.adam.state:
            return False
        entries = compress(self.state.values(), self.are_tensors)
        if len(self.state) != len(self.are_tensors) or not all(map(is_, entries, self.entries)):
            return False
        if list(map(id, self.adam.param_groups)) != self.group_ids:
            return False
        for p in self.without_gradient:
            if p.grad is not None:
                return False
        for b in self.buckets:  # noqa: SIM110
            if not b.still_fits():
                return False
        return True

    def step(self, clock: Tensor, factor: Tensor | None, found_inf: Tensor | None) -> None:
        """Make an Adam step of all tensors; ``factor`` multiplies the gradients."""
        self.found_inf = found_inf
        with self.parts.on_device:
            for b in self.buckets:
                self._launch(b, clock, factor, found_inf)
        torch.autograd.graph.increment_version(self.params)

    def _launch(
        self, b: Bucket, clock: Tensor, factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        group, lr = b.group, b.group["lr"]
        options = group["amsgrad"], group["maximize"], group["control"]["order"]
        given = found_inf is not None, factor is not None, isinstance(lr, Tensor)
        launches = b.launches.get((options, given))
        if launches is None:
            launches = b.launches[options, given] = self._bind(b, *options, *given)
        prepare, adam, *finish = launches
        beta1, beta2 = group["betas"]
        if (beta1, beta2) != b.betas:
            b.betas, b.logarithms = (beta1, beta2), (*log2_of(beta1), *log2_of(beta2))
        skip = b.bias if found_inf is None else found_inf  # an unused pointer may be any
        prepare(*b.logarithms, skip)
        adam(
            b.gs, lr.to(b.device) if isinstance(lr, Tensor) else lr, 1 - beta1, 1 - beta2,
            group["eps"], b.bias if factor is None else factor, skip, clock,
        )  # fmt: skip
        for launch in finish:
            launch(skip)

    def _bind(
        self, b: Bucket, amsgrad: bool, maximize: bool, order: str, *given: bool
    ) -> tuple[Launch, ...]:
        """Return the kernels of a step of a bucket, with these options of Adam."""
        has_inf, has_factor, lr_at = given
        n, parts = len(b.params), self.parts
        multiplies = b.has_controlled and b.multiplies
        after = multiplies and order == "after"
        prepare = Launch(
            kernels.prepare, -(-n // 128), (b.steps, b.bias, n), HAS_INF=has_inf, BLOCK=128
        )
        adam = Launch(
            kernels.adam, b.programs,
            (
                b.ps, b.ms, b.vs, b.xs, b.numels, b.slot_table, b.chunks, b.bias, parts.factors,
                b.partials,
            ),
            AMSGRAD=bool(amsgrad), MAXIMIZE=bool(maximize), BEFORE=multiplies and not after,
            AFTER=after, HAS_INF=has_inf, HAS_FACTOR=has_factor, LR_AT=lr_at, DROPPED=b.dropped,
            P=DTYPES[b.dtype], G=DTYPES[b.grad_dtype], S=DTYPES[b.state_dtype],
            ALIGNED=b.aligned, BLOCK=b.block, CHUNK=b.chunk,
        )  # fmt: skip
        if not after:
            return prepare, adam
        finish = Launch(
            pass_kernels.finish_norms, n,
            (b.partials, b.firsts, b.slot_table, parts.norms, parts.factors),
            AFTER=True, HAS_INF=has_inf, BLOCK=1024,
        )  # fmt: skip
        return prepare, adam, finish

    def norms_of(self, s: WeightSet) -> Tensor:
        """Return the norms of a set: from the Adam pass of this step, or measured before it."""
        slots = self.slots[s]
        if s.settings["order"] == "before":
            with self.parts.on_device:
                for passes in slots.passes:
                    passes.measure()
        return slots.norms

    def multiply_(self, s: WeightSet, scale: Tensor, clock: Tensor) -> None:
        """Multiply a set: in the Adam pass that follows, or by correcting the guess of the last."""
        slots = self.slots[s]
        if s.law_on_device is None:
            slots.choice.take(scale, self.found_inf, s.goal[1])
        if s.settings["order"] == "after":
            with self.parts.on_device:
                for passes in reversed(slots.passes):
                    passes.multiply_(clock)

    def gradient_norm(self) -> Tensor:
        """Return the joint norm of all gradients, in one pass over them."""
        if self.gradient_norms is None:
            self.gradient_norms = self.parts.norms.new_zeros(len(self.params))
            done = 0
            for b in self.buckets:
                norms = self.gradient_norms[done : done + len(b.params)]
                self.gradient_passes.append(NormPass(b, b.grad_dtype, b.everyone, norms))
                done += len(b.params)
        with self.parts.on_device:
            for b, norm_pass in zip(self.buckets, self.gradient_passes, strict=True):
                norm_pass(b.gs)
        return torch.linalg.vector_norm(self.gradient_norms)

    def hand_over(self) -> None:
        """Store the last scales and the guesses in the groups, for a checkpoint or another plan."""
        for group, slots in self.groups:
            if slots:
                pair = [self.parts.lasts[slots], self.parts.factors[slots].double()]
                state_of(group)["scales"] = torch.stack(pair)

    def _take_over(self) -> None:
        for group, slots in self.groups:
            scales = state_of(group).get("scales")
            if scales is not None and scales.shape == (2, len(slots)):
                lasts, factors = scales.to(self.parts.norms.device)
                self.parts.lasts[slots], self.parts.factors[slots] = lasts, factors.float()


def log2_of(beta: float) -> tuple[float, float]:
    """Return the logarithm as the sum of two numbers that float32 can hold.

    >>> math.isclose(sum(log2_of(0.999)), math.log2(0.999), rel_tol=1e-14)
    True
    """
    exact = math.log2(beta) if beta > 0 else -1e9  # 0 ** t is 0
    single = in_float32(exact)
    return single, in_float32(exact - single)
