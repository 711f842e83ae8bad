"""The constants C of the random-walk model: their bounds, their calibration on a recorded run, and
the cases in which they are doubtful. This file may not know how a prediction is computed.

The bounds are the smallest and largest values measured in the runs of ``docs/predict.md``. They are
not confidence intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from normcontrol.groups.classes import TensorClass
from normcontrol.watch.trace import ClassTrace, NormTrace

MATRIX = (0.23, 1.5)
"""Bounds of C for the matrices of GPTs."""
EMBEDDING = (0.0, 1.5)
"""Bounds of C for embeddings that are not tied. The lower one is 0: rows of rare tokens get few
gradients, and are changed by decay alone."""
TIED = (0.34, 3.5)
"""Bounds of C for an embedding tied to the head, in runs that are not short."""
TIED_SHORT = (0.34, 11.0)
"""The same in short runs. The gradients of a tied embedding agree from step to step, so that it
does not follow a random walk."""
SHORT = 0.05
"""A run is short for a class if decay leaves more than this fraction of its initial mean square,
that is, if it is shorter than three relaxation times. Then the norm still depends on the first
steps, whose gradients agree most."""
MOVED, TIED_MOVED = 2.0, 2.8
"""The largest factor between the C of runs with different learning rates, decays or horizons, for
all classes and for tied embeddings."""
ALL = "all"
"""The name of a constant that applies to every class."""


@dataclass(frozen=True)
class Constant:
    """The constant C of a class, and its bounds."""

    value: float
    low: float
    high: float


Constants = float | Mapping[str, Constant]


def calibrate(recorded: NormTrace | Mapping[str, ClassTrace]) -> dict[str, Constant]:
    """The constants C of a recorded AdamW run, class by class, for predictions of other runs of the
    same model.

    Each C is the one with which the prediction for this run equals its final norm. Its bounds are
    the smallest and largest C that runs ending in the second half of this one would have given. A
    prediction widens the bounds, since C is not quite the same in runs with other settings.

    >>> import torch
    >>> layer = torch.nn.Linear(32, 32, bias=False)
    >>> optimizer = torch.optim.AdamW(layer.named_parameters(), lr=1e-2, weight_decay=0.1)
    >>> recorded = NormTrace(optimizer, every=10)
    >>> for _ in range(200):
    ...     layer.weight.grad = torch.randn(32, 32)
    ...     optimizer.step()
    >>> round(calibrate(recorded)["weight"].value)     # independent gradients
    1
    """
    classes = recorded.classes if isinstance(recorded, NormTrace) else recorded
    if not classes:
        raise ValueError(
            "The trace contains no norms of classes to calibrate on: it is empty, or was saved as "
            "CSV, or is of an optimizer under norm control. Record a run of AdamW with NormTrace, "
            "and save it as JSON."
        )
    constants = {}
    for name, c in classes.items():
        if len(c.norms) < 2 or not c.noise[-1] > 0:
            raise ValueError(
                f"The trace of {name} is empty: it contains no step with a positive learning rate. "
                "Record at least one."
            )
        first = c.norms[0] ** 2
        values = [
            (n**2 - k * first) / (c.count * s)
            for n, k, s in zip(c.norms[1:], c.kept[1:], c.noise[1:], strict=True)
            if s > 0
        ]
        late = values[len(values) // 2 :]
        constants[name] = Constant(late[-1], min(late), max(late))
    return constants


def constant_of(c: TensorClass, constants: Constants, kept: float) -> Constant:
    """The constant of a class, with its bounds in a run in which decay leaves the fraction ``kept``
    of the initial mean square."""
    if isinstance(constants, Mapping):
        found = constants.get(c.name, constants.get(ALL))
        if found is None:
            raise ValueError(
                f"The constants are of the classes {', '.join(constants)}; there is none for "
                f"{c.name}. Calibrate on a run of the same model, and give the optimizers of both "
                "runs named parameters: AdamW(model.named_parameters())."
            )
        by = TIED_MOVED if c.tied else MOVED
        return Constant(
            found.value, min(found.low / by, found.low * by), max(found.high / by, found.high * by)
        )
    value = float(constants)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(
            f"constants={constants}: C is the mean square that a step with a learning rate of 1 "
            "adds. Give a positive number near 1."
        )
    low, high = (
        TIED_SHORT
        if is_doubtful(c, kept)
        else TIED
        if c.tied
        else MATRIX
        if c.hidden
        else EMBEDDING
    )
    return Constant(value, min(low, value), max(high, value))


def is_doubtful(c: TensorClass, kept: float) -> bool:
    """True if the random-walk model is known to be wrong: for a tied embedding in a short run."""
    return c.tied and kept > SHORT


def doubts(c: TensorClass, constant: Constant, kept: float, calibrated: bool) -> list[str]:
    """The reasons why a prediction for this class may be wrong."""
    if is_doubtful(c, kept):
        reason = (
            f"its C was {constant.value:.3g} in the run calibrated on, and in measured runs it was "
            "up to about twice as large at half the learning rate. Use this prediction only at the "
            "learning rate of that run"
            if calibrated
            else f"values of C from 0.9 to {TIED_SHORT[1]:g} were measured, so that its norm may "
            f"differ much from the prediction with C = {constant.value:g}. Calibrate on a run of "
            "this model"
        )
        return [
            f"{c.name} is an embedding tied to the head, and the run is short: decay leaves "
            f"{kept:.0%} of the initial mean square. In this case the random-walk model is known "
            f"to be wrong: {reason}, or record the norm of AdamW with NormTrace."
        ]
    if calibrated and constant.value <= 0:
        return [
            f"The calibrated C of {c.name} is {constant.value:.3g}: gradients reduced its norm by "
            "more than their noise increased it, so that it does not follow a random walk. The "
            "prediction applies only to runs like the one calibrated on."
        ]
    return []


def assumptions(classes: list[TensorClass], calibrated: bool, shown: bool) -> tuple[str, ...]:
    """The assumptions of a prediction for these classes. ``shown``: True if a model was given, in
    which tied weights can be recognised."""
    texts = [
        "each step adds C * lr^2 to the mean square of a class, with one C for the whole run, and "
        "decay reduces it"
    ]
    if calibrated:
        by = f"times and divided by {MOVED:g} ({TIED_MOVED:g} if tied)"
        texts.append(f"C as calibrated; bounds: its range over the second half of that run, {by}")
    else:
        bounds = f"{MATRIX[0]:g} to {MATRIX[1]:g}, embeddings from {EMBEDDING[0]:g}"
        texts.append(
            "gradients of different steps are nearly independent (C = 1 if they are); bounds: C "
            f"from {bounds}"
        )
    if not any(c.tied for c in classes) and not (shown and all(c.hidden for c in classes)):
        texts.append(
            "no embedding is tied to the head: none was recognised. If the model uses one as its "
            "head, name it in tied="
        )
    return tuple(texts)
