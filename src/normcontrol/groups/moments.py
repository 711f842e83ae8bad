"""Adam's moments have the shapes of their weights. Moments that are left from weights of another
shape are refused with advice: kernels would read and write past their end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from normcontrol.groups.settings import Group

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def check_moments(optimizer: Optimizer) -> None:
    """Raise an error if a gradient, or a moment of Adam, has another shape than its weights."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        _check(p, "its gradient", p.grad, "Call zero_grad() after the change.")
    advice = (
        "Drop them, opt.state.pop(p), and Adam starts them at zero; or write moments of the new "
        "shape into opt.state[p]."
    )
    _check_moments(optimizer, ((p, optimizer.state.get(p, {})) for p in params), advice)


def check_saved_moments(
    state: Mapping[Any, Any], groups: list[Group], optimizer: Optimizer
) -> None:
    """Raise an error if a saved state with these groups has moments for weights of another shape
    than the optimizer's."""
    keys = [key for group in groups for key in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    advice = (
        "The state was saved before the tensor was resized, or by another model. Load the state "
        "first and resize the tensor after that, or start without this state."
    )
    pairs = ((p, state.get(key, {})) for p, key in zip(params, keys, strict=True))
    _check_moments(optimizer, pairs, advice)


def _check_moments(
    optimizer: Optimizer, pairs: Iterable[tuple[Tensor, Mapping[str, Any]]], advice: str
) -> None:
    if isinstance(optimizer, (Adam, AdamW)):
        for p, state in pairs:
            for name in MOMENTS:
                _check(p, f"its moments ({name})", state.get(name), advice)


def _check(p: Tensor, what: str, other: Tensor | None, advice: str) -> None:
    if other is not None and other.shape != p.shape:
        raise ValueError(
            f"A tensor has the shape {tuple(p.shape)}, but {what} the shape "
            f"{tuple(other.shape)}. {advice}"
        )
