"""Averages of weights (EMA, SWA) under norm control.

The average of points on a sphere lies inside it: an averaged model is shorter than the models it
averages, and so off the norm that was held on purpose. ``reproject_`` puts it back.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normcontrol.control import NormControl, control_
from normcontrol.distributed.sharding import measure_together, shards_of
from normcontrol.law import projection
from normcontrol.scope import Weights


@torch.no_grad()
def reproject_(average: nn.Module, model: nn.Module, optimizer: NormControl) -> None:
    """Scale an averaged copy of ``model`` so that its controlled norms equal the optimizer's
    present targets.

    ``average`` is any module whose parameters stand in the order of the model's, such as
    :class:`torch.optim.swa_utils.AveragedModel`.

    >>> model = nn.Linear(4, 4)
    >>> opt = NormControl(torch.optim.SGD(model.parameters(), lr=0.1), ratio=1.0)
    >>> average = torch.optim.swa_utils.AveragedModel(model)
    >>> _ = average.module.weight.data.mul_(0.7)     # as averaging does
    >>> reproject_(average, model, opt)
    >>> torch.allclose(average.module.weight, model.weight)
    True
    """
    theirs, ours = list(average.parameters()), list(model.parameters())
    if [p.shape for p in theirs] != [p.shape for p in ours]:
        raise ValueError(
            f"The average has {len(theirs)} parameters and the model {len(ours)}, or their shapes "
            "differ: it must be an average of this "
            "very model, such as AveragedModel(model)."
        )
    twin: dict[Tensor, Tensor] = dict(zip(ours, theirs, strict=True))
    for s in optimizer._sets:
        missing = [name for name, p in zip(s.names, s.params, strict=True) if p not in twin]
        if missing:
            raise ValueError(
                f"The optimizer controls {missing[0]}, which is not a parameter of the given "
                "model. Give the model it trains."
            )
        target = optimizer._reading(s).target
        twins = [twin[p] for p in s.params]
        shards = (
            None
            if s.shards is None
            else shards_of(twins, s.scope, optimizer._spread, s.shards.shares)
        )
        measure_together([shards])
        control_(shards or Weights(twins, s.scope), projection, 1.0, target, 1.0, optimizer._step)
