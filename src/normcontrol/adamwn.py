"""AdamWN: a drop-in for ``torch.optim.AdamW`` whose regulariser is weight norm control (Algorithm
1, line 13.c)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from normcontrol.control import NormControl
from normcontrol.distributed.sharding import Gradients, is_mixed, local
from normcontrol.groups.members import marks_of_decay
from normcontrol.groups.warn import say_once
from normcontrol.schedule import Value, is_jax
from normcontrol.steppers.folded import FoldedWeights, fold, folding
from normcontrol.steppers.fused import Plan, Unfit, unfuse, why_not


class AdamWN(NormControl):
    """AdamW with weight norm control in place of weight decay.

    Takes every argument of :class:`torch.optim.AdamW` and every setting of :class:`NormControl`. It
    never decays: ``weight_decay`` only marks who is regularised. Groups that set their own keep
    their meaning (non-zero: controlled, zero: left alone); otherwise tensors with two or more
    dimensions are controlled.

    On CUDA the whole step runs in Triton kernels, unless ``fused=False``, ``foreach=True`` or
    ``differentiable=True`` ask for torch's own implementations, or the tensors do not allow it:
    ``report()`` says which one ran and why.

    Args: max_grad_norm: clip the gradients to this joint norm, as ``clip_grad_norm_`` does, within
        the step. The norm
            before clipping is then in ``opt.grad_norm``, a tensor.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    >>> opt = AdamWN(model.parameters(), lr=1e-3, ratio=2.0, rate=0.1)
    >>> for _ in range(100):
    ...     loss = (model(torch.randn(16, 8)) - 1).square().mean()
    ...     opt.zero_grad()
    ...     loss.backward()
    ...     opt.step()
    >>> round(opt.norms()["global"].ratio.item(), 1)
    2.0
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        ratio: Value | None = None,
        norm: Value | None = None,
        rms: Value | None = None,
        rate: Value = 1e-2,
        scope: Any = "global",
        law: str = "proportional",
        order: str = "after",
        start: Any = 0,
        norm_group: Any = None,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm={max_grad_norm}: gradients cannot be clipped to that norm. Give a "
                "positive one, or None."
            )
        params, reason = _look_at(params, fused, foreach, differentiable)
        adam = torch.optim.AdamW(
            params,
            lr,
            betas,  # type: ignore[arg-type]
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=True if reason is None else fused,
        )
        marks = marks_of_decay(adam.param_groups, weight_decay)
        if weight_decay != 1e-2 or True in marks:
            decay = max(g["weight_decay"] for g in adam.param_groups)
            if decay:
                say_once(
                    "decay",
                    f"AdamWN does not decay: weight_decay={decay:g} only marks which weights are "
                    "controlled, and its value is not used. "
                    "The norm is set by ratio= and rate=.",
                )
        for group, mark in zip(adam.param_groups, marks, strict=True):
            group.setdefault("controlled", mark)
            group["weight_decay"] = 0.0
            if group["foreach"] is None and group["fused"] is None and is_mixed(group["params"]):
                group["foreach"] = (
                    # torch's default on CUDA is one call for all tensors, which refuses such lists
                    False
                )
        adam.defaults["weight_decay"] = 0.0
        self._reason, self._kernels = reason, reason is None
        self._plan: Plan | None = None
        self.max_grad_norm = max_grad_norm
        self.grad_norm: Tensor | None = None
        held = {"rate": rate, "scope": scope, "law": law, "order": order, "start": start}
        super().__init__(adam, ratio=ratio, norm=norm, rms=rms, norm_group=norm_group, **held)  # type: ignore[arg-type]

    _KEPT = (*NormControl._KEPT, "_reason", "_kernels", "max_grad_norm", "grad_norm")

    @property
    def implementation(self) -> str:
        """What runs the step: the Triton kernels, or torch's own implementation and why."""
        if self._reason is None:
            return "Triton kernels"
        chosen = next((name for name in ("fused", "foreach") if self.defaults.get(name)), "default")
        return f"torch's {chosen} implementation, since {self._reason}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``weight_decay``, if it has one, says whether it is controlled."""
        decay = param_group.pop("weight_decay", None)
        if decay is not None:
            param_group.setdefault("controlled", bool(decay))
        super().add_param_group(param_group)

    def _build(self) -> None:
        self._hand_over()
        super()._build()
        if not all(s.is_plain for s in self._sets):
            raise ValueError(
                "AdamWN makes its own step, so size=, relative_step= and cautious= are not among "
                "its settings. Use them with "
                "NormControl(torch.optim.Adam(...))."
            )
        self._gradients = Gradients(self._spread)
        self._plan = None

    def _hand_over(self) -> None:
        """Leave in the groups what the next step needs, for a checkpoint or another plan."""
        if self.__dict__.get("_plan") is not None:
            self._plan.hand_over()  # type: ignore[union-attr]
        for s in self._sets:
            if isinstance(s.weights, FoldedWeights) and (
                s.weights.owes() or "pending" in s.settings
            ):
                s.settings["pending"] = s.weights.pending()

    @torch.compiler.disable
    def state_dict(self) -> dict[str, Any]:
        """As :class:`NormControl`'s, with what the fused step still owes its weights."""
        self._hand_over()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._hand_over()
        return super().__getstate__()

    def _closure_comes_first(self) -> bool:
        return True  # Adam calls it once, before anything else

    def _get_ready(self) -> None:
        """Have a plan that describes this step's tensors, or none and the reason why."""
        if not self._kernels and self.defaults["fused"] and not torch.compiler.is_compiling():
            for s in self._sets:
                fold(s)
        if not self._kernels or (
            self._plan is not None and not torch.compiler.is_compiling() and self._plan.fits()
        ):
            return
        try:
            if torch.compiler.is_compiling():
                raise Unfit("the step is compiled")
            self._hand_over()
            self._plan, self._reason = Plan(self.optimizer, self._sets), None
        except Unfit as unfit:
            if self._reason is None and not torch.compiler.is_compiling():
                warnings.warn(
                    f"AdamWN goes on with torch's fused implementation, since {unfit}.",
                    stacklevel=4,
                )
            self._plan, self._reason = None, str(unfit)
            for s in self._sets:
                unfuse(s)

    def _inner_step(self, closure: Callable[[], float] | None) -> float | None:
        grad_scale = getattr(self, "grad_scale", None)
        factor = None if self.max_grad_norm is None else self._clip(self.max_grad_norm, grad_scale)
        if self._plan is None:
            if factor is not None:
                grads = [
                    p.grad
                    for group in self.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ]
                torch._foreach_mul_([local(g) for g in grads], factor.float())
            with folding(self.optimizer, self._sets, getattr(self, "found_inf", None)):
                return super()._inner_step(closure)
        if grad_scale is not None:
            factor = grad_scale.reciprocal() if factor is None else factor / grad_scale
        self._plan.step(self._step, factor, getattr(self, "found_inf", None))
        return None

    @torch.no_grad()
    def _clip(self, to: float, grad_scale: Tensor | None) -> Tensor:
        """The factor that clips the gradients, as ``clip_grad_norm_`` computes it; GradScaler's
        scale is not theirs."""
        if self._plan is not None and not self._spread.is_shared:
            norm = self._plan.grad_norm()
        else:
            norm = self._gradients.norm(
                [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            )
        self.grad_norm = norm if grad_scale is None else norm / grad_scale
        return (to / (self.grad_norm + 1e-6)).clamp(max=1.0)


def _look_at(
    params: ParamsT, fused: bool | None, foreach: bool | None, differentiable: bool
) -> tuple[Any, str | None]:
    """The parameters, which may be given as generators, and why they do not go through the Triton
    kernels, if so."""
    if isinstance(params, dict):
        _refuse_jax(params.values())
    if isinstance(params, (Tensor, dict)):
        return params, "this is not a list of parameters"  # which torch refuses better
    groups: Any = [
        dict(g, params=_listed(g["params"])) if isinstance(g, dict) and "params" in g else g
        for g in _listed(params)
    ]
    if isinstance(params, UNORDERED):
        groups = params
    if fused is False or foreach or differentiable:
        return groups, "fused=False, foreach=True or differentiable=True asked for it"
    given = [
        item
        for g in groups
        for item in (g["params"] if isinstance(g, dict) and "params" in g else [g])
    ]
    tensors = [item[1] if isinstance(item, tuple) else item for item in given]
    _refuse_jax(tensors)
    return groups, why_not([t for t in tensors if isinstance(t, Tensor)])


def _refuse_jax(params: Iterable[Any]) -> None:
    if any(is_jax(p) for p in params):
        raise TypeError(
            "The params hold a JAX array, and AdamWN is for torch: use normcontrol.optax.adamwn."
        )


UNORDERED = (set, frozenset)
"""Passed on as they are: what torch has to say about them depends on its version."""


def _listed(params: Any) -> Any:
    if isinstance(params, Tensor):
        return [params]
    return params if isinstance(params, UNORDERED) else list(params)
