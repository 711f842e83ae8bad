"""The constants C of the random walk that Adam's weights make: within which bounds they are, how to
find them, when to doubt them.

The bounds are what was measured (by which runs: ``docs/predict.md``). They say how far a prediction
may be off, not how probably.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from normcontrol.groups.classes import TensorClass
from normcontrol.watch.trace import ClassTrace, NormTrace

MATRIX = (0.23, 1.5)
"""C of the matrices of GPTs, in all runs measured."""
EMBEDDING = (0.0, 1.5)
"""C of embeddings that are not tied: rows that are seldom seen seldom move, and then decay alone
acts."""
TIED = (0.34, 3.5)
"""C of an embedding tied to the head, in runs that are not short."""
TIED_SHORT = (0.34, 11.0)
"""The same in short runs: its gradients agree from step to step, and that is no random walk."""
SHORT = 0.05
"""A run is short for a class if decay leaves more than this share of its initial mean square (three
relaxation times leave as much): then what the first steps did, when gradients agree most, is still
in the norm."""
MOVED, TIED_MOVED = 2.0, 2.8
"""By which factor C was another one in runs with another learning rate, decay or horizon; and that
of tied embeddings."""
ALL = "all"
"""The name of a constant that holds for every class."""


@dataclass(frozen=True)
class Constant:
    """C of a class, and the bounds within which it may be."""

    value: float
    low: float
    high: float


Constants = float | Mapping[str, Constant]


def calibrate(recorded: NormTrace | Mapping[str, ClassTrace]) -> dict[str, Constant]:
    """The constants C of one AdamW run, class by class, for predictions of other runs of the same
    model.

    Each is the C with which that run would have been predicted to end where it did. Its bounds are
    the least and the greatest that would have been found, had the run ended anywhere in its second
    half; predictions widen them, since C is not quite the same in runs with other settings.

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
            "The trace holds no norms of classes to find constants from: it is empty, or was saved "
            "as CSV, or is of an optimizer under "
            "norm control. Record a run of AdamW with NormTrace, and save it as JSON."
        )
    constants = {}
    for name, c in classes.items():
        if len(c.norms) < 2 or not c.noise[-1] > 0:
            raise ValueError(
                f"The trace of {name} is empty: no step that moved it is recorded. Record at least "
                "one."
            )
        first = c.norms[0] ** 2
        seen = [
            (n**2 - k * first) / (c.count * s)
            for n, k, s in zip(c.norms[1:], c.kept[1:], c.noise[1:], strict=True)
            if s > 0
        ]
        late = seen[len(seen) // 2 :]
        constants[name] = Constant(late[-1], min(late), max(late))
    return constants


def constant_of(c: TensorClass, constants: Constants, kept: float) -> Constant:
    """C of a class with the bounds it has in a run of which decay leaves the share ``kept`` of the
    initial mean square."""
    if isinstance(constants, Mapping):
        found = constants.get(c.name, constants.get(ALL))
        if found is None:
            raise ValueError(
                f"The constants are of the classes {', '.join(constants)}; there is none for "
                f"{c.name}. Calibrate on a run of the same "
                "model, and give both optimizers names: AdamW(model.named_parameters())."
            )
        by = TIED_MOVED if c.tied else MOVED
        return Constant(
            found.value, min(found.low / by, found.low * by), max(found.high / by, found.high * by)
        )
    value = float(constants)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(
            f"constants={constants}: C is the mean square that a step of lr 1 adds, a positive "
            "number near 1."
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
    """Whether the random walk is known not to hold: for a tied embedding, in a short run."""
    return c.tied and kept > SHORT


def doubts(c: TensorClass, constant: Constant, kept: float, calibrated: bool) -> list[str]:
    """What speaks against a prediction for this class."""
    if is_doubtful(c, kept):
        fault = (
            f"its C was {constant.value:.3g} in the run calibrated on, and up to about twice that "
            "at half the learning rate in runs of "
            "ours. Trust this at that learning rate only"
            if calibrated
            else f"C from 0.9 to {TIED_SHORT[1]:g} was measured, so its norm may be far from what "
            f"{constant.value:g} gives. "
            "Calibrate on a run of this model"
        )
        return [
            f"{c.name} is an embedding tied to the head, and the run is short: decay leaves "
            f"{kept:.0%} of what the first steps did. There "
            f"the random walk is known not to hold: {fault}, or record AdamW's norm with NormTrace."
        ]
    if calibrated and constant.value <= 0:
        return [
            f"The calibrated C of {c.name} is {constant.value:.3g}: gradients shortened it by more "
            "than noise lengthens it, which is no "
            "random walk. Its norm is predicted for runs like the one calibrated on, and for no "
            "others."
        ]
    return []


def assumptions(classes: list[TensorClass], calibrated: bool, shown: bool) -> tuple[str, ...]:
    """What a prediction for these classes rests on; ``shown``: whether tied weights can be seen in
    what was given."""
    said = [
        "each step adds C * lr^2 to the mean square of a class, with one C for the whole run, and "
        "decay takes its share"
    ]
    if calibrated:
        by = f"times and divided by {MOVED:g} ({TIED_MOVED:g} if tied)"
        said.append(f"C as calibrated; bounds: its range over the second half of that run, {by}")
    else:
        bounds = f"{MATRIX[0]:g} to {MATRIX[1]:g}, embeddings from {EMBEDDING[0]:g}"
        said.append(
            "gradients of different steps are nearly independent (C = 1 if they are); bounds: C "
            f"from {bounds}"
        )
    if not any(c.tied for c in classes) and not (shown and all(c.hidden for c in classes)):
        said.append(
            "no embedding is tied to the head: none is known to be. If one is used so by hand, "
            "name it in tied="
        )
    return tuple(said)
