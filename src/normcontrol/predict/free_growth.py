"""A target that grows as the norm of AdamW does until decay acts: as a random walk."""

from __future__ import annotations

import math
from itertools import accumulate

from normcontrol.predict.learning_rates import LearningRate, is_finite, learning_rates
from normcontrol.predict.prediction import sampled
from normcontrol.schedule import trace


def growth(end: float, lr: LearningRate, *, steps: int | None = None, points: int = 200) -> trace:
    """Return a schedule of the ratio from 1 to ``end``, which grows as a random walk.

    Under Adam every weight makes nearly a random walk with steps of size ``lr``, so ``r_t^2 - 1``
    is proportional to the sum of ``lr^2`` up to step t. This is the model of :func:`adamw` without
    decay, with an end that you choose.

    Args:
        end: the ratio of the norm to the initial one after the last step.
        lr: the learning rate, in every form that :func:`adamw` takes. Of a scheduler with several
            groups, that of the first.
        steps: the number of steps. Default: the number of learning rates, if a list is given.
        points: about how many points the schedule has.

    >>> growth(2.0, lr=1e-3, steps=300, points=3)
    trace([1.0, 1.414..., 1.732..., 2.0], steps=[0.0, 100.0, 200.0, 300.0])
    """
    if not is_finite(end) or end < 0:
        raise ValueError(f"end={end!r}: it is the final ratio of the norm, a number, 0 or more.")
    lrs = learning_rates(lr, steps)[0]
    peak = max(lrs)
    if not peak:
        raise ValueError("The learning rate of the first group is 0 at all steps. Give another.")
    sums = list(accumulate(((rate / peak) ** 2 for rate in lrs), initial=0.0))
    return sampled([math.sqrt(1 + (end * end - 1) * part / sums[-1]) for part in sums], points)
