"""Builds the optimizers of a run from its config, and computes the learning rate of every step.

An optimizer is chosen by name: one of torch.optim, a published method, or a control of a study. It
gets nanoGPT's two parameter groups: matrices, which are regularised, and the rest, which is not.
Methods whose authors exclude the embeddings too get the groups of their authors. This file may not
know about data, the training loop or devices.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from normcontrol import AdamWN, NormControl, linear, predict, trace
from normcontrol.lab.errors import LabError, nearest
from normcontrol.lab.training.config import Config, Optim
from normcontrol.lab.training.controls import CONTROLS
from normcontrol.methods import METHODS, hidden

DEFAULT_RATIO = 2.0
"""The ratio of the paper's best run, Figure 3."""

RELATIVE = 8.0
"""The length of a Hyperball step of a hidden matrix, relative to its norm, in multiples of the
learning rate. The other weights take Adam's steps. Adam's own steps have about this length, 0.23 lr
for each weight, if the weights have an rms of 0.03."""

# These optimizers need a closure or sparse gradients, which the training loop does not provide.
UNFIT = {"LBFGS", "SparseAdam", "Optimizer"}
TORCH: dict[str, type[Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and name not in UNFIT
}
# Some methods change the model. QK-Clip needs attention logits, which the model does not return.
NEED_MORE = [name for name, found in METHODS.items() if found.takes_model or name == "QK-Clip"]
OURS = [name for name in METHODS if name not in NEED_MORE]


def known_name(given: str) -> str:
    """The name of an optimizer in its usual spelling, whatever the case of the given one.

    >>> known_name("adamwn"), known_name("sgd")
    ('AdamWN', 'SGD')
    """
    names = [*OURS, *CONTROLS, *sorted(TORCH)]
    for name in names:
        if name.lower() == given.lower():
            return name
    if given.lower() in {name.lower() for name in UNFIT}:
        raise LabError(
            f"{given} needs a closure or sparse gradients, which the training loop does not "
            "provide. Choose another optimizer."
        )
    if given.lower() in {name.lower() for name in NEED_MORE}:
        raise LabError(
            f"{given} is a method of the library that needs more than an optimizer is given by "
            "the training loop: the model, or its attention logits. Choose another optimizer."
        )
    raise LabError(f"There is no optimizer {given!r}. {nearest(given, names)}")


@functools.lru_cache(maxsize=8)
def ratio_schedule(config: Config) -> float | linear | trace:
    """The ratio r_t to the norm of the initial weights without init_scale: the paper's ramp, then
    constant; or a random walk with the learning rates of the run."""
    o, steps = config.optim, config.run.steps
    ratio = DEFAULT_RATIO if o.ratio is None else o.ratio
    if o.growth == "walk":
        return predict.growth(ratio, [lr_at(config, step) for step in range(1, steps + 1)])
    return linear(o.ratio_start, ratio, steps=o.ramp) if o.ramp else ratio


def is_controlled(o: Optim) -> bool:
    """True if the norm is controlled, to a ratio or to a gain."""
    name = known_name(o.optimizer)
    given = o.ratio is not None or o.gain is not None
    return name == "AdamWN" or (given and name in TORCH)


def target_at(config: Config, step: int, initial_gain: float | None = None) -> float | None:
    """The target ratio of the joint norm at a step; None if that norm is not controlled (Muon has
    the hidden matrices alone), or controlled to a gain and the gain of the initial weights is not
    known."""
    o, gain = config.optim, target_gain(config)
    initial_gain = initial_gain or config.model.init_gain
    if not is_controlled(o) or o.hidden_only or known_name(o.optimizer) == "Muon":
        return None
    if gain is not None:
        return None if initial_gain is None else gain / initial_gain
    schedule = ratio_schedule(config)
    return schedule(step) if callable(schedule) else schedule


def target_gain(config: Config) -> float | None:
    """The gain that is the target: the one that was given, or the one that the weights start from;
    None if a ratio was given, or nothing: then the target is the paper's ratio."""
    o = config.optim
    return config.model.init_gain if o.gain is None and o.ratio is None else o.gain


def lr_at(config: Config, step: int) -> float:
    """The learning rate of a step, counted from 1: linear warm-up, then cosine or wsd.

    >>> c = Config().with_(lr=1.0, warmup=10, steps=100)
    >>> lr_at(c, 5), lr_at(c, 10), round(lr_at(c, 55), 3), round(lr_at(c, 100), 3)
    (0.5, 1.0, 0.55, 0.1)
    """
    o, steps = config.optim, config.run.steps
    if step < o.warmup:
        return o.lr * step / o.warmup
    if o.schedule == "wsd":
        left = min((steps - step) / max(o.decay * steps, 1), 1.0)
        return o.lr * (o.min_lr + (1 - o.min_lr) * left)
    done = (step - o.warmup) / max(steps - o.warmup, 1)
    return o.lr * (o.min_lr + (1 - o.min_lr) * 0.5 * (1 + math.cos(math.pi * done)))


def build(config: Config, model: nn.Module) -> list[Optimizer]:
    """The optimizers of a run: one, or two if the first accepts only hidden matrices (Muon)."""
    o, name = config.optim, known_name(config.optim.optimizer)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    try:
        if name == "Muon":
            inside, rest = (group["params"] for group in hidden(model))
            return [
                _one(config, "Muon", inside),
                _one(config.with_(optimizer="AdamW", ratio=None, gain=None), "AdamW", rest),
            ]
        if name in CONTROLS:
            return [CONTROLS[name](config, named, _options(o, TORCH["AdamW"], named))]
        if name == "AdamWN" and o.hidden_only:
            return [_adamwn(config, hidden(model), _options(o, TORCH["AdamW"], named))]
        return (
            [_one(config, name, named)]
            if name in TORCH or name == "AdamWN"
            else _method(config, name, model)
        )
    except ValueError as error:
        raise LabError(f"{o.optimizer} does not accept these settings. {error}") from error


def _method(config: Config, name: str, model: nn.Module) -> list[Optimizer]:
    """A published method with the settings of the config that it takes. A method whose control
    starts or switches at a step does so after twice the warm-up."""
    o, method = config.optim, METHODS[name]
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [
        {"params": [(n, p) for n, p in named if (p.dim() >= 2) == are], "controlled": are}
        for are in (True, False)
    ]
    settings: dict[str, Any] = {
        "lr": o.lr,
        "betas": o.betas,
        "weight_decay": o.weight_decay,
        "lr_max": o.lr,
        "adam_lr": o.lr,
    }
    settings |= {"start": 2 * o.warmup, "switch": 2 * o.warmup, "relative": RELATIVE, "fused": True}
    if o.ratio is not None:
        settings |= {"ratio": o.ratio, "kappa": o.ratio**2}
    if any(hasattr(p, "device_mesh") for _, p in named):
        del settings["fused"]
    return method(
        hidden(model) if method.hidden else [g for g in matrices if g["params"]], **settings
    )


def _one(config: Config, name: str, named: list[tuple[str, nn.Parameter]]) -> Optimizer:
    """AdamWN, or an optimizer of torch.optim, which :class:`NormControl` wraps if it is given a
    target."""
    o = config.optim
    groups: list[dict[str, Any]] = [
        {"params": [(n, p) for n, p in named if p.dim() >= 2]},
        {"params": [(n, p) for n, p in named if p.dim() < 2]},
    ]
    groups = [group for group in groups if group["params"]]
    kind = TORCH["AdamW"] if name == "AdamWN" else TORCH[name]
    options = _options(o, kind, named)
    if name == "AdamWN":
        if o.norm_layers:
            groups = [{**group, "controlled": True} for group in groups]
        return _adamwn(config, groups, options)
    decays = not is_controlled(o)
    for group in groups:
        if "weight_decay" in inspect.signature(kind).parameters:
            group["weight_decay"] = (
                o.weight_decay if decays and group["params"][0][1].dim() >= 2 else 0.0
            )
    base = kind(groups, **options)
    return base if decays else NormControl(base, rate=o.rate, scope=o.scope, **_target(config))


def _adamwn(config: Config, groups: list[dict[str, Any]], options: dict[str, Any]) -> AdamWN:
    o = config.optim
    return AdamWN(groups, rate=o.rate, scope=o.scope, **_target(config), **options)


def _options(
    o: Optim, kind: type[Optimizer], named: list[tuple[str, nn.Parameter]]
) -> dict[str, Any]:
    """What an optimizer of torch takes of the config's settings."""
    takes = inspect.signature(kind).parameters
    options: dict[str, Any] = {"lr": o.lr, "betas": o.betas, "adjust_lr_fn": "match_rms_adamw"}
    options = {key: value for key, value in options.items() if key in takes}
    if "fused" in takes and not any(hasattr(p, "device_mesh") for _, p in named):
        options["fused"] = True
    return options


def _target(config: Config) -> dict[str, Any]:
    """The target of the controller: a gain or a ratio.

    The model is multiplied by init_scale before the optimizer sees it: a ratio to the norm without
    it is so much less of that one.
    """
    gain = target_gain(config)
    if gain is not None:
        return {"gain": gain}
    return {"ratio": _divided(ratio_schedule(config), config.model.init_scale)}


def _divided(ratio: float | linear | trace, scale: float) -> float | linear | trace:
    if isinstance(ratio, linear):
        return linear(ratio.start / scale, ratio.end / scale, ratio.steps)
    if isinstance(ratio, trace):
        return trace([value / scale for value in ratio.values], ratio.steps)
    return ratio / scale
