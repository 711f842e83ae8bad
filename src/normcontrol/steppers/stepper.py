"""The stepper: how one step is carried out, and how a set of weights is measured and multiplied.

``Stepper`` is the interface. ``PlainStepper`` implements it around any optimizer, with passes over
the weights of their own; ``folded`` and ``fused`` save passes for AdamW. A stepper knows tensors,
sets and the wrapped optimizer. It knows nothing about targets, rates and laws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from normcontrol.distributed.ranks import local, local_tensors
from normcontrol.distributed.shards import GradientNorm, measure_shards
from normcontrol.distributed.sharing import Sharing
from normcontrol.groups.clock import Clock
from normcontrol.groups.sets import WeightSet
from normcontrol.groups.settings import STEP_LENGTHS, USE_UPDATES
from normcontrol.mechanisms.update import multiply_cautiously_
from normcontrol.steppers.clip import Clip
from normcontrol.steppers.split_weights import refuse_split_weights
from normcontrol.steppers.stored_weights import StoredWeights
from normcontrol.steppers.tables import why_not
from normcontrol.weights.passes import multiply_
from normcontrol.weights.rounding import DROPPED_BITS

Closure = Callable[[], float]

TOLERANCE = 2.0**-23
"""Largest relative error of a guessed scale that is left uncorrected: one unit in the last place of
float32. The norm is measured at every step, so the error does not accumulate."""


def next_scale(scale, last, rate):  # type: ignore[no-untyped-def]
    """Guess the next scale from the last two; 1 if that would be outside (0.5, 2).

    A step covers the fraction ``rate`` of the distance to the target, so if the optimizer and the
    schedule go on as they did, the scale changes by 1 - rate of its last change. It works on
    floats, and a Triton kernel compiles it: hence a sum in place of a condition.

    >>> next_scale(0.998, 0.996, 0.5)
    0.999
    """
    guess = scale + (1.0 - rate) * (scale - last)
    return 1.0 + ((guess > 0.5) & (guess < 2.0)) * (guess - 1.0)


def _example(optimizer: Optimizer) -> None: ...


CALLS_HOOKS: Any = Optimizer.profile_hook_step(_example)
"""An example of the function that torch puts around every ``step``, to call hooks."""
OWN_HOOKS_ALONE = CALLS_HOOKS.__globals__.copy()
OWN_HOOKS_ALONE.update(_global_optimizer_pre_hooks={}, _global_optimizer_post_hooks={})
del OWN_HOOKS_ALONE["__name__"]  # or the compiler looks names up in torch's module


HOOKS_OF_STEP = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def without_global_hooks(optimizer: Optimizer) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the step of an optimizer's class, without hooks and with those of the optimizer alone.

    Hooks on all optimizers see the controller, and the wrapped optimizer must not call them too.
    The second function is torch's own with other globals, in which those hooks do not exist.
    Torch's own globals are left as they are: other threads use them.
    """
    step: Any = type(optimizer).step
    if getattr(step, "__code__", None) is not CALLS_HOOKS.__code__:
        return step, step
    hooked = FunctionType(step.__code__, OWN_HOOKS_ALONE, step.__name__, closure=step.__closure__)
    return step.__wrapped__, hooked


class Scaler(NamedTuple):
    """What GradScaler sets on an optimizer: the scale of the gradients, and the overflow flag."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


NO_SCALER = Scaler()


def evaluated(closure: Closure) -> tuple[float, Closure]:
    """Call a closure before the step. Return the loss, and a closure for the optimizer's step.

    The gradients are there then, so that an optimizer that calls the closure at the beginning gets
    what it needs. One that calls it again, with other weights, would need other gradients.
    """
    with torch.enable_grad():
        loss = closure()
    calls: list[None] = []

    def known() -> float:
        calls.append(None)
        if len(calls) > 1:
            raise RuntimeError(
                "The optimizer calls the closure several times in a step, but with order='before' "
                "it is evaluated once, before the weights are scaled. Use order='after'."
            )
        return loss

    return loss, known


class Stepper(ABC):
    """Carries out steps for an optimizer, and measures and multiplies its sets of weights.

    The controller calls :meth:`check` and :meth:`prepare` once for new sets. In every step it calls
    :meth:`begin`, then :meth:`step`, and for every set :meth:`measure` and :meth:`multiply_`:
    before :meth:`step` with ``order="before"``, after it with ``order="after"``.

    The contract: :meth:`measure` returns the norm of the weights without the multiplication that
    follows, and after :meth:`multiply_` the weights are those weights times the scale. A stepper
    may multiply by a guess of the scale within :meth:`step`. Then :meth:`measure` divides the guess
    out, and :meth:`multiply_` applies what the guess missed, unless it is below one unit in the
    last place of float32.
    """

    optimizer: Optimizer
    sets: Sequence[WeightSet] = ()
    needs_gradients = False
    """Whether :meth:`begin` must be called when the gradients are known, before anything else."""
    arguments: Mapping[str, Any] = {}
    """What ``step`` was given beside the closure, for the wrapped optimizer."""
    reason: str | None = None
    """Why the Triton kernels do not carry out the steps; None if they do."""

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped within the step."""
        return False

    def check(self, sets: Sequence[WeightSet]) -> None:  # noqa: B027
        """Raise an error if steps with these sets cannot be right, and change nothing."""

    def prepare(self, sets: Sequence[WeightSet], sharing: Sharing) -> None:
        """Take over new sets: at construction, and after groups or trained tensors changed."""
        self.sets = sets
        self._bare_step, self._hooked_step = without_global_hooks(self.optimizer)

    def begin(self) -> None:  # noqa: B027
        """Look at the gradients of this step."""

    @abstractmethod
    def step(self, closure: Closure | None, scaler: Scaler) -> float | None:
        """Make one step of the optimizer."""

    @abstractmethod
    def local_norms(self, s: WeightSet) -> Tensor:
        """Return the norms of the parts of a set, from what this process stores of them."""

    @abstractmethod
    def multiply_local_(self, s: WeightSet, scale: Any) -> None:
        """Multiply what this process stores of a set."""

    def sum_over_ranks(self, sets: Sequence[WeightSet]) -> None:
        """Sum the norms of sharded sets over the ranks, with one collective for all of them."""
        sharded = [s for s in sets if s.shards is not None]
        shards = [s.shards for s in sharded if s.shards is not None]
        measure_shards(shards, [self.local_norms(s) for s in sharded])

    def measure(self, s: WeightSet) -> Any:
        """Return the norm of a set, or the norms of its parts if they do not share one.

        They are a tensor, or a float if the host may read it: see :attr:`WeightSet.on_host`.
        """
        s.parts = self.local_norms(s) if s.shards is None else s.shards.parts
        return s.join(s.parts)

    def multiply_(self, s: WeightSet, scale: Any) -> None:
        """Multiply the weights of a set."""
        self.multiply_local_(s, scale if s.shards is None else s.shards.local_scale(scale))

    def take_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Pass these on to the wrapped optimizer, if its ``step`` takes them."""
        try:
            signature(self.optimizer.step).bind_partial(None, **arguments)
        except TypeError as error:
            raise TypeError(
                f"step() was given {', '.join(arguments)}, but {type(self.optimizer).__name__}"
                f".step does not take that: {error}. Leave it out."
            ) from None
        self.arguments = arguments

    def optimizer_step(self, closure: Closure | None, scaler: Scaler) -> float | None:
        """Call the wrapped optimizer's step, and pass GradScaler's values on to it."""
        given: dict[str, Any] = {}
        if scaler is not NO_SCALER:
            given = {name: value for name, value in scaler._asdict().items() if value is not None}
        optimizer, closures = self.optimizer, () if closure is None else (closure,)
        optimizer.__dict__.update(given)
        patched: Any = optimizer.__dict__.get("step")
        by_scheduler = hasattr(patched, "_wrapped_by_lr_sched")
        if by_scheduler and patched.__wrapped__ is type(optimizer).step:
            # A scheduler of the wrapped optimizer: it only asks whether a step was made.
            optimizer._opt_called, patched = True, None  # type: ignore[attr-defined]
        try:
            if patched is not None:
                return patched(*closures, **self.arguments)
            before, after = HOOKS_OF_STEP
            has_hooks = getattr(optimizer, before, None) or getattr(optimizer, after, None)
            step = self._hooked_step if has_hooks else self._bare_step
            return step(optimizer, *closures, **self.arguments)
        finally:
            for name in given:
                del optimizer.__dict__[name]

    def hand_over(self) -> None:  # noqa: B027
        """Store in the groups what the next step needs, for a checkpoint or another stepper."""


class PlainStepper(Stepper):
    """Steps of any optimizer; the weights are measured and multiplied in passes of their own.

    The passes are torch's operations, or Triton kernels on a GPU.
    """

    on_gpu: frozenset[WeightSet] = frozenset()
    """The sets whose passes may be Triton kernels."""

    def __init__(
        self,
        optimizer: Optimizer,
        clock: Clock,
        clip: Clip | None = None,
        reason: str | None = None,
    ) -> None:
        self.optimizer, self.clock, self.reason = optimizer, clock, reason
        self.clip = clip or Clip(None)
        self.stored = StoredWeights(optimizer)
        self.passes: dict[WeightSet, Any] = {}
        """The Triton kernels that measured a set at this step; None where torch did."""

    @property
    def clips(self) -> bool:
        return self.clip.max_norm is not None

    def check(self, sets: Sequence[WeightSet]) -> None:
        if self.optimizer.defaults.get("differentiable"):
            refuse_starts(sets)
        refuse_split_weights(self.optimizer, sets)
        self.stored.check(sets)

    def prepare(self, sets: Sequence[WeightSet], sharing: Sharing) -> None:
        super().prepare(sets, sharing)
        self.gradient_norm = GradientNorm(sharing)
        self.watched = [s for s in sets if s.mechanisms & USE_UPDATES]
        self.differentiable = bool(self.optimizer.defaults.get("differentiable", False))
        self.on_gpu = frozenset(s for s in sets if can_be_in_kernels(s))
        self.passes = {}

    def step(self, closure: Closure | None, scaler: Scaler) -> float | None:
        for s in self.watched:
            with torch.set_grad_enabled(self.differentiable):
                s.before = [local(p).clone() for p in s.params]
        loss = None
        if self.clip.max_norm is not None:
            if closure is not None:  # the gradients that are clipped are those that it computes
                with torch.enable_grad():
                    loss, closure = closure(), None
            self.clip_gradients_(scaler)
        stepped = self.optimizer_step(closure, scaler)
        if self.clock.calls == 1 and not torch.compiler.is_compiling():  # the state exists now
            refuse_split_weights(self.optimizer, self.sets)
            self.stored.warn_of_others(self.sets)
        for s in self.watched:
            if not s.mechanisms.isdisjoint(STEP_LENGTHS):
                with torch.set_grad_enabled(self.differentiable):
                    s.resize_update_(self.clock)
        return stepped if loss is None else loss

    def local_norms(self, s: WeightSet) -> Tensor:
        s.law_on_device, passes = None, None
        if not torch.compiler.is_compiling() and s in self.on_gpu:
            passes = self._find_passes(s)
        if passes is not None and (passes.measures_size or "size" not in s.mechanisms):
            return passes.measure()
        params = s.params if s.shards is None else [local(p) for p in s.params]
        size = s.size(params, s.scope) if s.power_iteration is None else s.power_iteration(params)
        return size if passes is None else passes.note(size)

    def multiply_local_(self, s: WeightSet, scale: Any) -> None:
        step = self.clock.step
        params = s.params if s.shards is None else [local(p) for p in s.params]
        if not params:
            return
        if not torch.compiler.is_compiling() and self.passes.get(s) is not None:
            self.passes[s].multiply_(scale if s.law_on_device is None else None)
        elif "cautious" in s.mechanisms:
            multiply_cautiously_(params, s.before, s.scope, scale, step)
        else:
            positions = None if s.shards is None else s.shards.positions
            multiply_(params, s.scope, scale, step, positions)
        if self.stored.keys:
            self.stored.multiply_(s, scale, step)

    def _find_passes(self, s: WeightSet) -> Any:
        """Return the kernels for a set; None if its tensors are not fit for them now."""
        known = self.passes.get(s)
        if torch.is_grad_enabled():
            known = None
        elif known is None or not known.still_fits(local_tensors(s.params)):
            from normcontrol.steppers.spectral import passes_over  # needs Triton

            known = passes_over(local_tensors(s.params), s.scope, s.power_iteration)
        self.passes[s] = known
        if known is not None:
            knows_law = s.shards is None and s.has_plain_law
            known.begin(self.clock.step, knows_law and "size" not in s.mechanisms)
            s.law_on_device = known.by_law if knows_law else None
        return known

    @torch.no_grad()
    def clip_gradients_(self, scaler: Scaler) -> None:
        """Multiply the gradients by the factor that clips them."""
        if self.differentiable:
            raise ValueError(
                "max_grad_norm was given, but no derivative is passed through the clipping, which "
                "differentiable=True asks for. Clip the gradients yourself before the step."
            )
        params = [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        if not params:
            self.clip.norm = torch.zeros((), device="cpu")
            return
        if any(p.grad.is_sparse for p in params):
            raise ValueError(
                "max_grad_norm was given, but a gradient is sparse, and AdamW has no sparse steps. "
                "Use dense gradients (sparse=False in nn.Embedding), or "
                "NormControl(torch.optim.SparseAdam(...)) for these weights."
            )
        factor = self.clip.factor(self.gradient_norm(params), scaler.grad_scale)
        torch._foreach_mul_([local(p.grad) for p in params], factor.float())


def refuse_starts(sets: Sequence[WeightSet]) -> None:
    """Refuse references that are measured in training, if the step is differentiable."""
    for s in sets:
        if s.start is not None:
            raise ValueError(
                f"start={s.settings['start']!r} measures the reference in training, and no "
                "derivative is passed through it, which differentiable=True asks for. Leave out "
                "start, or give the target itself, such as norm=."
            )


def can_be_in_kernels(s: WeightSet) -> bool:
    """Return whether Triton kernels can measure and multiply a set, if its tensors allow it.

    They do not know where the elements of a shard lie in the whole tensor, which the rounding of
    bf16 and fp16 depends on.
    """
    rounded = any(p.dtype in DROPPED_BITS for p in s.params)
    if "cautious" in s.mechanisms or (rounded and s.shards is not None):
        return False
    return bool(s.params) and why_not(s.params) is None
