"""AdamWN: a drop-in for ``torch.optim.AdamW`` whose regulariser is weight norm control (Algorithm 1, line 13.c)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from normcontrol.control import NormControl
from normcontrol.policy import marks_of_decay
from normcontrol.schedule import Value


class AdamWN(NormControl):
    """AdamW with weight norm control in place of weight decay.

    Takes every argument of :class:`torch.optim.AdamW` and every setting of :class:`NormControl`. It never decays:
    ``weight_decay`` only marks who is regularised. Groups that set their own keep their meaning (non-zero: controlled,
    zero: left alone); otherwise tensors with two or more dimensions are controlled.

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
        ratio: Value | None = None,
        norm: Value | None = None,
        rms: Value | None = None,
        rate: Value = 1e-2,
        scope: Any = "global",
        law: str = "proportional",
        order: str = "after",
    ) -> None:
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
            fused=fused,
        )
        marks = marks_of_decay(adam.param_groups, weight_decay)
        if weight_decay != 1e-2 or True in marks:
            _say_decay_is_not_used(max(g["weight_decay"] for g in adam.param_groups))
        for group, mark in zip(adam.param_groups, marks, strict=True):
            group.setdefault("controlled", mark)
            group["weight_decay"] = 0.0
        adam.defaults["weight_decay"] = 0.0
        super().__init__(adam, ratio=ratio, norm=norm, rms=rms, rate=rate, scope=scope, law=law, order=order)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``weight_decay``, if it has one, says whether it is controlled."""
        decay = param_group.pop("weight_decay", None)
        if decay is not None:
            param_group.setdefault("controlled", bool(decay))
        super().add_param_group(param_group)


_said = False


def _say_decay_is_not_used(decay: float) -> None:
    global _said
    if decay and not _said:
        _said = True
        warnings.warn(
            f"AdamWN does not decay: weight_decay={decay:g} only marks which weights are controlled, and its value is not used. The "
            "norm is set by ratio= and rate=.",
            stacklevel=3,
        )
