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
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normcontrol.distributed.ranks import local_tensors
from normcontrol.distributed.sharing import Sharing
from normcontrol.groups.sets import WeightSet
from normcontrol.groups.settings import USE_UPDATES
from normcontrol.groups.state import state_of
from normcontrol.law import proportional
from normcontrol.steppers import kernels, pass_kernels
from normcontrol.steppers.passes import DTYPES, Parts, is_dense, norms_into
from normcontrol.steppers.stepper import TOLERANCE, Closure, PlainStepper, Scaler
from normcontrol.steppers.tables import Bucket
from normcontrol.weights.memory import overlaps

LOW_PRECISION_TOLERANCE = 2.0**-14
"""The tolerance of a guess for bf16 and fp16 weights."""


class Unfit(Exception):
    """The tensors of this step cannot go through the kernels; the message says why."""


class Slots(NamedTuple):
    """Where the norms of a set lie among all that the kernels compute, and its buckets."""

    mine: slice
    buckets: list[Bucket]
    apply_law: Any
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
                warnings.warn(
                    f"AdamWN continues with torch's fused implementation, since {unfit}.",
                    stacklevel=5,
                )
            self.plan, self.reason = None, str(unfit)

    def step(self, closure: Closure | None, scaler: Scaler) -> float | None:
        if self.plan is None:
            return super().step(closure, scaler)
        factor = None
        if self.clip is not None and self.clip.max_norm is not None:
            factor = self.clip.factor(self._gradient_norm(), scaler.grad_scale)
        if scaler.grad_scale is not None:
            unscale = scaler.grad_scale.reciprocal()
            factor = unscale if factor is None else factor / scaler.grad_scale
        self.plan.step(self.clock.step, factor, scaler.found_inf)
        return None

    def measure(self, s: WeightSet) -> Tensor:
        if self.plan is None or s not in self.plan.slots or s.shards is not None:
            return super().measure(s)
        s.law_on_device = self.plan.slots[s].apply_law
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
        for used in (name for s in sets for name in s.mechanisms & USE_UPDATES):
            raise Unfit(f"{used}= needs the weights before the step")
        planned = [s for s in sets if s.scope.axes is None and "size" not in s.mechanisms]
        slots = {p: i for i, p in enumerate(p for s in planned for p in s.params)}
        self.adam, self.state = adam, adam.state
        self.buckets: list[Bucket] = []
        for group in adam.param_groups:
            self._add_buckets(group, slots)
        if len({b.device for b in self.buckets}) > 1:
            raise Unfit("the parameters are on several devices")
        without_gradient = [p for g in adam.param_groups for p in g["params"] if p.grad is None]
        self.without_gradient = without_gradient
        stepped = [p for b in self.buckets for p in b.params]
        self.params = local_tensors(stepped)
        if overlaps(self.params):
            raise Unfit("two parameters share memory")
        device = self.buckets[0].device if self.buckets else torch.device("cpu")
        self.parts = Parts(len(slots), device)
        self.needed = self.parts.needed
        self.found_inf: Tensor | None = None
        groups = adam.param_groups
        self.group_ids = list(map(id, groups))
        self.groups = [(g, [slots[p] for p in g["params"] if p in slots]) for g in groups]
        self._take_over()
        self.slots: dict[WeightSet, Slots] = {}
        found = set(stepped)
        for s in planned:
            if s.params and all(p in found for p in s.params):
                mine = [
                    b
                    for b in self.buckets
                    if b.has_controlled and any(b.group is g for g in s.groups)
                ]
                for b in mine:
                    b.multiplies = True
                first = slots[s.params[0]]
                known = s.law is proportional and s.shards is None
                law = partial(self.apply_law, s) if known else None
                self.slots[s] = Slots(slice(first, first + len(s.params)), mine, law)

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
            together = torch.stack([steps[i] for i in indices]).to(key[0])
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
        group, n = b.group, len(b.params)
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        skip = b.bias if found_inf is None else found_inf  # an unused pointer may be any
        multiplies = b.has_controlled and b.multiplies
        before = multiplies and group["control"]["order"] == "before"
        after = multiplies and not before
        b.launch(
            kernels.prepare, -(-n // 128), (b.steps, b.bias, skip, n),
            LOG2_BETA1=math.log2(beta1) if beta1 > 0 else -1e9,  # 0 ** t is 0
            LOG2_BETA2=math.log2(beta2) if beta2 > 0 else -1e9,
            HAS_INF=found_inf is not None, BLOCK=128,
        )  # fmt: skip
        b.launch(
            kernels.adam, b.programs,
            (
                b.ps, b.gs, b.ms, b.vs, b.xs, b.numels, b.slot_table, b.chunks, b.bias,
                lr.to(b.device) if isinstance(lr, Tensor) else lr, self.parts.factors, b.partials,
                b.bias if factor is None else factor, skip, clock,
            ),
            ONE_MINUS_BETA1=1 - beta1, ONE_MINUS_BETA2=1 - beta2, EPS=group["eps"],
            AMSGRAD=bool(group["amsgrad"]), MAXIMIZE=bool(group["maximize"]), BEFORE=before,
            AFTER=after, HAS_INF=found_inf is not None,
            HAS_FACTOR=factor is not None, LR_AT=isinstance(lr, Tensor), DROPPED=b.dropped,
            P=DTYPES[b.dtype], G=DTYPES[b.grad_dtype], S=DTYPES[b.state_dtype],
            ALIGNED=b.aligned, BLOCK=b.block, CHUNK=b.chunk,
        )  # fmt: skip
        if after:
            b.launch(
                pass_kernels.finish_norms, n,
                (
                    b.partials, b.firsts, b.slot_table, self.parts.norms, self.parts.factors, skip,
                ),
                AFTER=True, HAS_INF=found_inf is not None, BLOCK=1024,
            )  # fmt: skip

    def norms_of(self, s: WeightSet) -> Tensor:
        """Return the norms of a set: from the Adam pass of this step, or measured before it."""
        mine, buckets, _ = self.slots[s]
        if s.settings["order"] == "before":
            with self.parts.on_device:
                for b in buckets:
                    self.parts.measure(b)
        return self.parts.norms[mine]

    def apply_law(self, s: WeightSet, target: Any, rate: Any, skip: Tensor | None) -> Tensor:
        """Choose the factors of a set by the law, from its norms; return the scale."""
        return self._settle(s, None, (target, rate), skip)

    def multiply_(self, s: WeightSet, scale: Tensor, clock: Tensor) -> None:
        """Multiply a set: in the Adam pass that follows, or by correcting the guess of the last."""
        buckets = self.slots[s].buckets
        if s.law_on_device is None:
            self._settle(s, scale, (None, None), self.found_inf)
        if s.settings["order"] == "after":
            with self.parts.on_device:
                for b in reversed(buckets):
                    self.parts.multiply_(b, clock)

    def _settle(
        self, s: WeightSet, scale: Tensor | None, goal: tuple[Any, Any], skip: Tensor | None
    ) -> Tensor:
        mine, buckets, _ = self.slots[s]
        tolerance, into = None, self.parts.factors
        if s.settings["order"] == "after":
            tolerance = LOW_PRECISION_TOLERANCE if buckets[0].dropped else TOLERANCE
            into = self.parts.corrections
        with self.parts.on_device:
            return self.parts.settle(
                buckets[0], mine, scale, goal, skip, tolerance, into, s.scope.joint
            )

    def gradient_norm(self) -> Tensor:
        """Return the joint norm of all gradients, in one pass over them."""
        norms = self.parts.norms.new_empty(len(self.params))
        done = 0
        with self.parts.on_device:
            for b in self.buckets:
                norms_into(b, b.gs, b.grad_dtype, b.everyone, norms[done:])
                done += len(b.params)
        return torch.linalg.vector_norm(norms)

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
