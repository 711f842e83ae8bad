"""Builds the optimizers of a run from its config, and computes the learning rate of every step.

An optimizer gets nanoGPT's two parameter groups: matrices, which are regularised, and the rest,
which is not. Methods whose authors exclude the embeddings too get the groups of their authors. This
file may not know about data, the training loop or devices.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

from torch import nn
from torch.optim import Optimizer

from normcontrol import AdamWN, NormControl, linear, predict, trace
from normcontrol.lab import own_files
from normcontrol.lab.errors import LabError
from normcontrol.lab.training.config import Config, Optim
from normcontrol.lab.training.controls import CONTROLS, Named, two_groups
from normcontrol.lab.training.optimizer_names import TORCH, Choice, chosen, is_own, known_name
from normcontrol.methods import METHODS, hidden

ADAMW = Choice("AdamW")

DEFAULT_RATIO = 2.0
"""The ratio of the paper's best run, Figure 3."""

RELATIVE = 8.0
"""The length of a Hyperball step of a hidden matrix, relative to its norm, in multiples of the
learning rate. The other weights take Adam's steps. Adam's own steps have about this length, 0.23 lr
for each weight, if the weights have an rms of 0.03."""


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
    return name == "AdamWN" or (given and (name in TORCH or is_own(name)))


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
    """The optimizers of a run: one, or two if the first accepts only hidden matrices (Muon), or
    those of the user's own."""
    o, choice = config.optim, chosen(config.optim.optimizer)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    try:
        if choice.file is not None:
            with own_files.told(choice.file, "optimizer"):
                return _own(config, choice, model, named)
        if choice.name == "Muon":
            inside, rest = (group["params"] for group in hidden(model))
            return [
                _one(config, choice, inside),
                _one(config.with_(optimizer="AdamW", ratio=None, gain=None), ADAMW, rest),
            ]
        if choice.name in CONTROLS:
            return [CONTROLS[choice.name](config, named, _options(o, ADAMW, named))]
        if choice.name == "AdamWN":
            groups = hidden(model) if o.hidden_only else two_groups(named)
            if o.norm_layers:
                groups = [{**group, "controlled": True} for group in groups]
            target = {"rate": o.rate, "scope": o.scope, **_target(config)}
            return [AdamWN(groups, **target, **_options(o, choice, named))]
        if choice.name in TORCH:
            return [_one(config, choice, named)]
        return _method(config, choice, model, named)
    except (ValueError, TypeError, RuntimeError) as error:
        if not isinstance(error, ValueError) and not choice.arguments:
            raise
        raise LabError(f"{o.optimizer} does not accept these settings. {error}") from error


def _method(config: Config, choice: Choice, model: nn.Module, named: Named) -> list[Optimizer]:
    """A published method with the settings of the config that it takes. A method whose control
    starts or switches at a step does so after twice the warm-up."""
    o, method = config.optim, METHODS[choice.name]
    groups = two_groups(named)
    for group in groups:
        group["controlled"] = group["params"][0][1].dim() >= 2
    settings: dict[str, Any] = {
        "lr": o.lr,
        "betas": o.betas,
        "weight_decay": o.weight_decay,
        "lr_max": o.lr,
        "adam_lr": o.lr,
    }
    settings |= {"start": 2 * o.warmup, "switch": 2 * o.warmup, "relative": RELATIVE}
    if o.ratio is not None:
        settings |= {"ratio": o.ratio, "kappa": o.ratio**2}
    settings |= {**_fused(choice, named), **choice.arguments}
    return method(hidden(model) if method.hidden else groups, **settings)


def _own(config: Config, choice: Choice, model: nn.Module, named: Named) -> list[Optimizer]:
    """What a user's class or function constructs. Every weight must be in one of its groups."""
    if not choice.takes_model:
        made: Any = _one(config, choice, named)
    elif is_controlled(config.optim):
        raise LabError(
            f"{choice.name} takes the model, so that it decides what is controlled: it cannot be "
            "given a ratio or a gain. Let it take params, or put NormControl into it."
        )
    else:
        made = choice.build(model, **_options(config.optim, choice, named))
    optimizers = list(made) if isinstance(made, (list, tuple)) else [made]
    if not all(isinstance(one, Optimizer) for one in optimizers):
        raise LabError(
            f"{choice.name} returned {str(made)[:60]}, where an optimizer of torch is needed, or a "
            "list of them."
        )
    held = [id(p) for one in optimizers for group in one.param_groups for p in group["params"]]
    for name, p in named:
        if (times := held.count(id(p))) != 1:
            raise LabError(
                f"{choice.name} has {name} {times} times in the groups of its optimizers, and each "
                "weight must be in one of them. Put it into one."
            )
    return optimizers


def _one(config: Config, choice: Choice, named: Named) -> Optimizer:
    """An optimizer of torch.optim or of the user's own, which :class:`NormControl` wraps if it is
    given a target."""
    o, groups = config.optim, two_groups(named)
    for group in groups:
        is_matrix = group["params"][0][1].dim() >= 2
        group |= _decay(o, choice) if is_matrix else dict.fromkeys(_decay(o, choice), 0.0)
        if choice.file is not None:  # it may go through the tensors
            group["params"] = [p for _, p in group["params"]]
    base: Optimizer = choice.build(groups, **_options(o, choice, named))
    if not is_controlled(o):
        return base
    return NormControl(base, rate=o.rate, scope=o.scope, **_target(config))


def _decay(o: Optim, choice: Choice) -> dict[str, float]:
    """The decay of the matrices, if the optimizer has one."""
    takes = inspect.signature(choice.build).parameters
    decay = 0.0 if is_controlled(o) else o.weight_decay
    return {"weight_decay": decay} if "weight_decay" in takes else {}


def _options(o: Optim, choice: Choice, named: Named) -> dict[str, Any]:
    """What an optimizer takes of the config's settings, and its own arguments."""
    takes = inspect.signature(choice.build).parameters
    options: dict[str, Any] = {"lr": o.lr, "betas": o.betas}
    if choice.file is None:
        options["adjust_lr_fn"] = "match_rms_adamw"  # Muon's
        options |= _fused(choice, named)
    options = {key: value for key, value in options.items() if key in takes}
    if choice.file is not None:  # a function may have groups of its own
        options |= _decay(o, choice)
    return {**options, **choice.arguments}


def _fused(choice: Choice, named: Named) -> dict[str, Any]:
    """torch's fused implementation, but for sharded weights, or where another one is asked for."""
    is_sharded = any(hasattr(p, "device_mesh") for _, p in named)
    return {} if is_sharded or "foreach" in choice.arguments else {"fused": True}


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
