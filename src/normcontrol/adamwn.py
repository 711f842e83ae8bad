"""AdamWN: a drop-in for ``torch.optim.AdamW`` whose regulariser is weight norm control.

It is Algorithm 1 with line 13.c. This file has AdamW's arguments and the choice of a stepper;
everything else is :class:`NormControl` around torch's own AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from normcontrol.control import NormControl
from normcontrol.distributed.ranks import is_mixed
from normcontrol.groups.clock import Clock
from normcontrol.groups.members import Controlled, marks_of_decay
from normcontrol.law import Law
from normcontrol.numbers import is_jax
from normcontrol.schedule import Value
from normcontrol.steppers.clip import Clip
from normcontrol.steppers.folded import FoldedStepper
from normcontrol.steppers.stepper import PlainStepper, Stepper
from normcontrol.steppers.tables import why_not
from normcontrol.warn import warn_once
from normcontrol.wrapper import not_compiled


class AdamWN(NormControl):
    """AdamW with weight norm control in place of weight decay.

    Takes every argument of :class:`torch.optim.AdamW` and the settings of :class:`NormControl`. It
    never decays: ``weight_decay`` only marks which weights are controlled. If some groups have a
    decay and others have zero, all tensors of the groups with a decay are controlled, and no
    others. Otherwise the tensors with two or more dimensions are controlled. ``controlled``
    overrides this rule. A warning says once that a decay is not used, unless it is 0.01 everywhere,
    which is also what AdamW has if none is given. Without a target, the norm is held
    (``hold=1.0``).

    On CUDA the whole step runs in Triton kernels, unless ``fused=False``, ``foreach=True`` or
    ``differentiable=True`` selects an implementation of torch, or the kernels do not support the
    tensors. This is decided at the first step, since the model may be moved after construction.
    ``report()`` says which implementation runs, and why.

    Args:
        max_grad_norm: clip the gradients to this joint norm, as ``clip_grad_norm_`` does, within
            the step. The norm before clipping is then in ``opt.grad_norm``, a tensor.

    >>> layers = torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    >>> model = torch.nn.Sequential(*layers)
    >>> opt = AdamWN(model.parameters(), lr=1e-3, ratio=2.0, rate=0.1)
    >>> for _ in range(100):
    ...     loss = (model(torch.randn(16, 8)) - 1).square().mean()
    ...     opt.zero_grad()
    ...     loss.backward()
    ...     opt.step()
    >>> round(opt.norms()["global"].ratio.item(), 1)
    2.0
    """

    @not_compiled
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
        gain: Value | None = None,
        hold: Value | None = None,
        rate: Value = 0.1,
        scope: Any = "global",
        law: str | Law = "proportional",
        order: str = "after",
        start: Any = 0,
        controlled: Controlled | None = None,
        outputs: Any = None,
        norm_group: Any = None,
    ) -> None:
        self.clip = clip = Clip(max_grad_norm)
        params, tensors = as_lists(params)
        asked = fused is False or foreach or differentiable
        own = "fused=False, foreach=True or differentiable=True was given" if asked else None
        choose = partial(choose_stepper, clip=clip, own=own, folded=bool(fused))
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
            fused=fused if own or why_not_kernels(tensors) else True,
        )
        marks = marks_of_decay(adam.param_groups)
        replace_decay(adam)
        if controlled is None:
            for group, mark in zip(adam.param_groups, marks, strict=True):
                group.setdefault("controlled", mark)
        super().__init__(
            adam,
            ratio=ratio,
            norm=norm,
            rms=rms,
            gain=gain,
            hold=hold,
            rate=rate,
            scope=scope,
            law=law,
            order=order,
            start=start,
            controlled="matrices" if controlled is None else controlled,
            outputs=outputs,
            norm_group=norm_group,
            stepper=choose,
        )

    @property
    def max_grad_norm(self) -> float | None:
        """The joint norm that gradients are clipped to; None for no clipping."""
        return self.clip.max_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self.clip.set_limit(value)

    @property
    def grad_norm(self) -> Tensor | None:
        """The joint norm of the gradients at the last step before clipping, if they are clipped."""
        return self.clip.norm

    @property
    def implementation(self) -> str:
        """The implementation of the step: the Triton kernels, or torch's own with the reason."""
        if self.stepper.reason is None:
            return "Triton kernels"
        groups = [group for group in self.param_groups if group["params"]]  # as they were loaded
        kinds = [next((k for k in ("fused", "foreach") if g.get(k)), "default") for g in groups]
        chosen = " and ".join(dict.fromkeys(kinds)) or "default"
        return f"torch's {chosen} implementation, since {self.stepper.reason}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        If its ``weight_decay`` is zero, it is not controlled. If it has a decay, and the groups
        before it were marked by theirs, all of its tensors are. Otherwise its matrices are.
        """
        is_dict = isinstance(param_group, dict)  # torch refuses others
        decay = param_group.pop("weight_decay", None) if is_dict else None
        if decay is not None:
            if decay:
                warn_of_decay(decay)
            marked = any(group["control"]["controlled"] is True for group in self.param_groups)
            if not decay or marked:
                param_group.setdefault("controlled", bool(decay))
        super().add_param_group(param_group)


def choose_stepper(
    optimizer: Optimizer, clock: Clock, clip: Clip, own: str | None, folded: bool
) -> Stepper:
    """Return what carries out the steps: the Triton kernels if the tensors are fit for them now.

    The model may have been moved since construction, as Accelerate does it. ``own`` says why
    torch's own implementation was asked for, if it was.
    """
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    reason = own or why_not_kernels(tensors)
    if reason is None:
        from normcontrol.steppers.fused import FusedStepper  # needs Triton

        return FusedStepper(optimizer, clock, clip)
    return (FoldedStepper if folded else PlainStepper)(optimizer, clock, clip, reason)


def why_not_kernels(tensors: list[Tensor]) -> str | None:
    """Return why the Triton kernels cannot carry out steps of these tensors; None if they can."""
    return why_not(tensors) if tensors else "it has no tensors"


def warn_of_decay(decay: float) -> None:
    """Say once that the value of a decay is not used."""
    warn_once(
        "decay",
        f"AdamWN does not decay: weight_decay={decay:g} only marks which weights are controlled, "
        "and its value is not used. The norm is set by gain=, ratio=, norm= or rms=; without one "
        "of them it is held.",
    )


def replace_decay(adam: torch.optim.AdamW) -> None:
    """Set the decay of every group to zero. A decay that was given is warned of.

    One of 0.01 in all groups may be torch's default.
    """
    groups = adam.param_groups
    decays = [group["weight_decay"] for group in groups]
    if any(decays) and any(decay != 1e-2 for decay in decays):
        warn_of_decay(max(decays))
    for group in groups:
        group["weight_decay"] = 0.0
        unspecified = group["foreach"] is None and group["fused"] is None
        if unspecified and is_mixed(group["params"]):
            group["foreach"] = False  # torch's default on CUDA refuses mixed lists
    adam.defaults["weight_decay"] = 0.0


UNORDERED = (set, frozenset)
"""Passed on as they are: torch refuses them, in words that depend on its version."""


def as_lists(params: Any) -> tuple[Any, list[Tensor]]:
    """Return the parameters with generators made into lists, and all their tensors."""
    if isinstance(params, nn.Module) or not isinstance(params, Iterable):
        raise TypeError(
            f"AdamWN got a {type(params).__name__}, which is no list of tensors. Give the "
            "parameters of the model: AdamWN(model.parameters())."
        )
    if isinstance(params, dict):
        refuse_jax(params.values())
    if isinstance(params, (Tensor, dict)):
        return params, []  # torch refuses these
    groups: Any = [
        dict(g, params=_listed(g["params"])) if isinstance(g, dict) and "params" in g else g
        for g in _listed(params)
    ]
    if isinstance(params, UNORDERED):
        groups = params
    given = [
        item
        for g in groups
        for item in (g["params"] if isinstance(g, dict) and "params" in g else [g])
    ]
    tensors = [item[1] if isinstance(item, tuple) else item for item in given]
    refuse_jax(tensors)
    return groups, [t for t in tensors if isinstance(t, Tensor)]


def refuse_jax(params: Iterable[Any]) -> None:
    """Refuse JAX arrays."""
    if any(is_jax(p) for p in params):
        raise TypeError(
            "The params contain a JAX array, and AdamWN is for torch: use normcontrol.optax.adamwn."
        )


def _listed(params: Any) -> Any:
    if isinstance(params, Tensor):
        return [params]
    return params if isinstance(params, UNORDERED) else list(params)
