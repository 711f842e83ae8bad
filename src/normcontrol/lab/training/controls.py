"""AdamW or AdamWN with one thing changed: the controls of a study, to find out why a method works.
They are no methods to be used.

- ``AdamW-sqrt``: the decay follows the square root of the learning rate.
- ``AdamW-replay``: at each step the weights shrink as they did in a recorded run, whatever their
  own norm is.
- ``AdamW-angle``: the learning rate is proportional to the norm of the weights, so that relative to
  the weights the steps are those of a run whose gain is constant.
- ``AdamWN-follow``: the norm is that of a recorded run after every step.

This file may not know about data, the training loop or studies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from normcontrol import AdamWN, trace
from normcontrol.lab.errors import LabError
from normcontrol.lab.training.config import Config
from normcontrol.schedule import sqrt_lr_times
from normcontrol.scope import SCOPES
from normcontrol.weights.passes import measure

Named = list[tuple[str, nn.Parameter]]
STEP = "replayed"
"""The key of a parameter group that counts the steps, so that a resumed run goes on counting."""


def sqrt_decay(config: Config, named: Named, options: Mapping[str, Any]) -> Optimizer:
    """k_t = decay * sqrt(lr_t * lr): AdamW's decay at the peak of the learning rate, and more of it
    than AdamW's elsewhere."""
    o = config.optim
    rate = sqrt_lr_times(o.weight_decay**2 * o.lr)
    return AdamWN(two_groups(named), ratio=0.0, rate=rate, order="before", **options)


def replayed(config: Config, named: Named, options: Mapping[str, Any]) -> Optimizer:
    """After step t the matrices are multiplied by 1 - k_t, with k_t from ``replay``: decay in the
    order of AdamWN's control."""
    values, steps = config.optim.replay, config.run.steps
    if not values:
        raise LabError(
            "AdamW-replay has nothing to replay. Give as replay by which fraction the weights "
            "shrink, at steps that are spread evenly over the run."
        )
    fraction = _over_the_run(values, steps)
    groups = two_groups(named)
    groups[0] |= {"replay": values, STEP: 0}
    matrices = [p for _, p in groups[0]["params"]]
    optimizer = AdamW(groups, weight_decay=0.0, **options)

    @torch.no_grad()
    def shrink(opt: Optimizer, *_: Any) -> None:
        group = opt.param_groups[0]
        group[STEP] += 1
        factor = torch.tensor(1 - fraction(min(group[STEP], steps)), device=matrices[0].device)
        if hasattr(opt, "found_inf"):  # a step that is skipped changes nothing
            factor = torch.where(opt.found_inf == 0, factor, 1.0)
        torch._foreach_mul_(matrices, factor)

    optimizer.register_step_post_hook(shrink)
    return optimizer


def angle_matched(config: Config, named: Named, options: Mapping[str, Any]) -> Optimizer:
    """The learning rate of the matrices at step t is lr_t times their gain divided by ``gain``."""
    o = config.optim
    if o.gain is None:
        raise LabError("AdamW-angle needs the gain of the run whose relative steps it makes.")
    if any(hasattr(p, "device_mesh") for _, p in named):
        raise LabError("AdamW-angle measures whole matrices: run it in one process, or with ddp.")
    groups = two_groups(named)
    groups[0] |= {"weight_decay": o.weight_decay, "gain": o.gain}
    matrices = [p for _, p in groups[0]["params"]]
    norm = o.gain * math.sqrt(sum(p.shape[0] for p in matrices))
    optimizer = AdamW(groups, weight_decay=0.0, **options)

    @torch.no_grad()
    def scale_lr(opt: Optimizer, *_: Any) -> None:
        scope = SCOPES["global"]
        factor = scope.join(measure(matrices, scope)) / norm
        opt.param_groups[0]["lr"] = (opt.param_groups[0]["lr"] * factor).float()

    optimizer.register_step_pre_hook(scale_lr)
    return optimizer


def followed(config: Config, named: Named, options: Mapping[str, Any]) -> Optimizer:
    """After step t the joint norm of the matrices is the initial one times ``path``: k = 1."""
    path = config.optim.path
    if not path:
        raise LabError(
            "AdamWN-follow has no path to follow. Give as path the ratios of the norm to the "
            "initial one, at steps that are spread evenly over the run."
        )
    ratio = _over_the_run(path, config.run.steps)
    return AdamWN(two_groups(named), ratio=ratio, rate=1.0, **options)


def _over_the_run(values: Sequence[float], steps: int) -> trace:
    """Recorded values, spread evenly over the steps: the last one belongs to the last step."""
    return trace(values, [(i + 1) * steps / len(values) for i in range(len(values))])


def two_groups(named: Named) -> list[dict[str, Any]]:
    """The matrices, which are decayed, and the rest, which is not."""
    found = [[(n, p) for n, p in named if (p.dim() >= 2) == matrix] for matrix in (True, False)]
    return [{"params": params} for params in found if params]


CONTROLS: dict[str, Callable[[Config, Named, Mapping[str, Any]], Optimizer]] = {
    "AdamW-sqrt": sqrt_decay,
    "AdamW-replay": replayed,
    "AdamW-angle": angle_matched,
    "AdamWN-follow": followed,
}
USES: dict[str, set[str]] = {
    "AdamW-sqrt": {"betas", "weight_decay"},
    "AdamW-replay": {"betas", "replay"},
    "AdamW-angle": {"betas", "weight_decay", "gain"},
    "AdamWN-follow": {"betas", "path"},
}
"""The settings that each of them uses, beside those that every optimizer uses."""
