"""Averages of weights (EMA, SWA) under norm control.

The average of points on a sphere lies inside it: an averaged model has a smaller norm than the
models it averages, and so is off the target. ``reproject_`` applies the law of the weights to it,
at rate 1. This file does not know how the average was computed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from normcontrol.control import NormControl, control_
from normcontrol.distributed.shards import shards_of
from normcontrol.groups.sets import WeightSet
from normcontrol.law import Integral, upper_bound
from normcontrol.steppers.stepper import PlainStepper
from normcontrol.watch.trackers import controller

Goal = Tensor | float


@torch.no_grad()
def reproject_(average: nn.Module, model: nn.Module, optimizer: Any) -> None:
    """Scale an averaged copy of ``model`` to the optimizer's current targets.

    It applies the optimizer's laws at rate 1. A bound changes only an average that is beyond it;
    ``law="integral"`` is an upper bound. Weights whose control has not started (``start=``) have no
    target, and are left alone.

    ``average`` is any module whose parameters have the order of the model's, such as
    :class:`torch.optim.swa_utils.AveragedModel`. ``optimizer`` is the controller, or a wrapper of
    Accelerate or Lightning around it.

    >>> model = nn.Linear(4, 4)
    >>> opt = NormControl(torch.optim.SGD(model.parameters(), lr=0.1), ratio=1.0)
    >>> average = torch.optim.swa_utils.AveragedModel(model)
    >>> _ = average.module.weight.data.mul_(0.7)  # as averaging does
    >>> reproject_(average, model, opt)
    >>> torch.allclose(average.module.weight, model.weight)
    True
    """
    optimizer = controller(optimizer)
    for name, given in (("average", average), ("model", model)):
        if not isinstance(given, nn.Module):
            raise TypeError(
                f"reproject_ got a {type(given).__name__} as the {name}, which is no module. Give "
                "the model, and the module that contains its averaged weights."
            )
    theirs, ours = list(average.parameters()), list(model.parameters())
    if [p.shape for p in theirs] != [p.shape for p in ours]:
        raise ValueError(
            f"The average has {len(theirs)} parameters and the model {len(ours)}, or their shapes "
            "differ: it must be an average of this very model, such as AveragedModel(model)."
        )
    twin: dict[Tensor, Tensor] = dict(zip(ours, theirs, strict=True))
    optimizer.norms()  # before the sets are looked at: it takes over tensors that were changed
    stepper = PlainStepper(optimizer.optimizer, optimizer.clock)
    for s in optimizer.sets:
        pairs = zip(s.names, s.params, strict=True)
        missing = next((name for name, p in pairs if p not in twin), None)
        if missing is not None:
            raise ValueError(
                f"The optimizer controls {missing}, which is not a parameter of the given model. "
                "Give the model it trains."
            )
        averaged = with_params(s, [twin[p] for p in s.params], optimizer)
        if averaged.shards is not None:
            stepper.sum_over_ranks([averaged])
        averaged.choose_goal(optimizer.clock)
        averaged.goal = on_device_of(averaged.params, averaged.goal)
        control_(averaged, stepper)


def on_device_of(params: list[Tensor], goal: tuple[Goal, Goal]) -> tuple[Goal, Goal]:
    """Return a target and a rate on the device of the averages, which may be another one."""
    home = params[0].device if params else None
    target, rate = (x.to(home) if isinstance(x, Tensor) and home else x for x in goal)
    return target, rate


def with_params(s: WeightSet, params: list[Tensor], optimizer: NormControl) -> WeightSet:
    """Return a copy of a set with other tensors, whose law goes all the way in one step."""
    other = copy.copy(s)
    other.params = params
    if isinstance(s.law, Integral):  # a call would change the multiplier of the training
        other.law = upper_bound
    other.power_iteration = None  # it follows the weights that are trained
    other.law_on_device = None  # and this one the norms of those
    other.given, other.mechanisms = {**s.given, "rate": 1.0}, set()
    if s.shards is not None:
        other.shards = shards_of(params, s.scope, optimizer.sharing, s.shards.shares)
    return other
