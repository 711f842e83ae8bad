"""The constants C of the random-walk model: their bounds, their calibration on a recorded run, and
the cases in which they are doubtful. This file may not know how a prediction is computed.

The bounds are the smallest and largest values measured in the runs of ``docs/predict.md``. They are
not confidence intervals.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from normcontrol.groups.classes import TensorClass, check_patterns
from normcontrol.predict.learning_rates import is_finite
from normcontrol.watch.trace import EXPONENTS, ClassTrace, NormTrace

MATRIX = (0.23, 6.0)
"""Bounds of C for the matrices of GPTs. Above 1.6 only in the smallest one, with 0.17 M weights."""
EMBEDDING = (0.0, 1.5)
"""Bounds of C for embeddings that are not tied. The lower one is 0: rows of rare tokens get few
gradients, and are changed by decay alone."""
TIED = (0.34, 53.0)
"""Bounds of C for an embedding tied to the head. Its gradients agree from step to step, so that it
does not follow a random walk. Above 18 only in the smallest GPT."""
SHORT = 0.05
"""A run is short for a class if decay leaves more than this fraction of its initial mean square,
that is, if it is shorter than three relaxation times. Then the norm still depends on the first
steps, whose gradients agree most."""
MOVED, TIED_MOVED = 2.1, 3.2
"""The factors by which the bounds of a calibrated C are widened, for all classes and for tied
embeddings. With them, the bounds contain the norms of all measured runs, whichever run of the same
model was calibrated on."""
EXPONENT, TIED_EXPONENT = EXPONENTS
"""The exponents p of the law C ~ lr^-p, for all classes and for tied embeddings. They are fitted to
one half of the measured runs of a GPT with 45 M weights, and tested on the other half."""
ALL = "all"
"""The name of a constant that applies to every class."""


@dataclass(frozen=True)
class Constant:
    """The constant C of a class, and its bounds.

    Attributes:
        value: C; in a calibration, the C of the recorded run.
        low, high: its bounds.
        exponent: the p of the law C ~ lr^-p. 0: C does not depend on the learning rate.
        lr: the learning rate at which C is ``value``. In a calibration it is a mean over the run,
            in which the late steps count most, since decay has reduced their effect least.
    """

    value: float
    low: float
    high: float
    exponent: float = 0.0
    lr: float = 1.0

    def at(self, lr: float) -> float:
        """C at a learning rate.

        >>> round(Constant(1.5, 1.0, 2.0, exponent=0.85, lr=2e-3).at(1e-3), 2)
        2.7
        """
        return self.value * (lr / self.lr) ** -self.exponent


Constants = float | Mapping[str, Constant]


def calibrate(
    recorded: NormTrace | Mapping[str, ClassTrace], tied: Sequence[str] = ()
) -> dict[str, Constant]:
    """Return the constant C of each class of tensors in a recorded AdamW run.

    The result is for predictions of other runs of the same model. With each C, the prediction for
    this run equals its final norm. The bounds of C are the smallest and largest values that a
    calibration at any step of the second half of this run gives. A prediction widens the bounds,
    since C is not quite the same in runs with other settings.

    C grows as the learning rate falls, like ``lr^-0.35`` for matrices and ``lr^-0.85`` for
    embeddings tied to the head. These exponents were measured on GPTs (``docs/predict.md``).

    A class whose learning rate was 0 at all recorded steps has no C, and is left out.

    Args:
        recorded: a trace of an AdamW run.
        tied: names of the classes that are embeddings tied to the head (``*`` and ``?`` as in file
            names). A trace does not show it.

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
    check_patterns(tied)
    classes = recorded.classes if isinstance(recorded, NormTrace) else recorded
    is_trace = isinstance(classes, Mapping) and all(
        isinstance(c, ClassTrace) for c in classes.values()
    )
    if not is_trace:
        raise TypeError(
            f"calibrate got a {type(recorded).__name__}, and not the trace of a run. Give one, or "
            "NormTrace.load(path) for a saved one."
        )
    if not classes:
        raise ValueError(
            "The trace contains no norms of classes to calibrate on: it is empty, or was saved as "
            "CSV, or is of an optimizer under norm control. Record a run of AdamW with NormTrace, "
            "and save it as JSON."
        )
    for pattern in tied:
        if not fnmatch.filter(classes, pattern):
            raise ValueError(
                f"tied={pattern!r} matches no class of the trace. The classes are "
                f"{', '.join(classes)}."
            )
    trained = {name: c for name, c in classes.items() if len(c.norms) > 1 and c.noise[-1] > 0}
    if not trained:
        raise ValueError(
            f"The trace of {', '.join(classes)} is empty: it contains no step with a positive "
            "learning rate. Record at least one."
        )
    return {
        name: _recorded(c, any(fnmatch.fnmatchcase(name, t) for t in tied))
        for name, c in trained.items()
    }


def _recorded(c: ClassTrace, tied: bool) -> Constant:
    """The constant of a class, from its records."""
    exponent = TIED_EXPONENT if tied else EXPONENT
    slowed = c.slowed.get(f"{exponent:g}")
    if slowed is None:  # a trace of an earlier version, or of another optimizer
        exponent, slowed = 0.0, c.noise
    scale = c.noise[-1] / slowed[-1]  # lr^p, so that the last C is that of the whole run
    first = c.norms[0] ** 2
    values = [
        (n**2 - k * first) / (c.count * scale * s)
        for n, k, s in zip(c.norms[1:], c.kept[1:], slowed[1:], strict=True)
        if s > 0
    ]
    late = values[len(values) // 2 :]
    lr = scale ** (1 / exponent) if exponent else 1.0
    return Constant(late[-1], min(late), max(late), exponent, lr)


def with_untrained(
    constants: Constants, classes: list[TensorClass], lrs: list[list[float]]
) -> Constants:
    """The constants, and one for every class without learning rates above 0: any C will do there,
    and a calibration on such a run has none. ``lrs`` are those of every group."""
    if not isinstance(constants, Mapping):
        return constants
    untrained = {
        c.name: Constant(1.0, 1.0, 1.0, TIED_EXPONENT if c.tied else EXPONENT)
        for c in classes
        if not any(lrs[c.group])
    }
    return {**untrained, **constants}


def law_of(c: TensorClass, constants: Constants) -> tuple[float, float]:
    """The exponent p of the law for C of a class, and the learning rate that it refers to."""
    if not isinstance(constants, Mapping):
        return 0.0, 1.0
    found = _calibrated(c, constants)
    return found.exponent, found.lr


def constant_of(c: TensorClass, constants: Constants, kept: float) -> Constant:
    """The constant of a class, with its bounds in a run in which decay leaves the fraction ``kept``
    of the initial mean square."""
    if isinstance(constants, Mapping):
        found = _calibrated(c, constants)
        by = TIED_MOVED if c.tied else MOVED
        low = min(found.low / by, found.low * by)
        return replace(found, low=low, high=max(found.high / by, found.high * by))
    if not (is_finite(constants) and constants > 0):
        raise ValueError(
            f"constants={constants!r}: C is the mean square that a step with a learning rate of 1 "
            "adds. Give a positive number near 1, or what calibrate returned."
        )
    value = float(constants)
    low, high = TIED if c.tied else MATRIX if c.hidden else EMBEDDING
    return Constant(value, min(low, value), max(high, value))


def _calibrated(c: TensorClass, constants: Mapping[str, Constant]) -> Constant:
    found = constants.get(c.name, constants.get(ALL))
    if found is None:
        raise ValueError(
            f"The constants are of the classes {', '.join(constants)}; there is none for "
            f"{c.name}. Calibrate on a run of the same model, in which its learning rate is above "
            "0, and give the optimizers of both runs named parameters: "
            "AdamW(model.named_parameters())."
        )
    if not isinstance(found, Constant):
        raise TypeError(
            f"The constant of {c.name} is {found!r}, which is no Constant. Give what calibrate "
            "returned, or one number for all classes."
        )
    return found


def is_doubtful(c: TensorClass, kept: float) -> bool:
    """True if the random-walk model is known to be wrong: for a tied embedding in a short run."""
    return c.tied and kept > SHORT


def doubts(c: TensorClass, constant: Constant, kept: float, calibrated: bool) -> list[str]:
    """The reasons why a prediction for this class may be wrong."""
    if is_doubtful(c, kept):
        if calibrated and constant.exponent == TIED_EXPONENT:
            reason = (
                f"its C was {constant.value:.3g} in the run calibrated on, and is assumed to be "
                f"proportional to lr^-{constant.exponent:g}. Joint norms of measured runs were "
                "predicted with an rms error of 8 to 17 %, and with up to 58 % far from the "
                "learning rate of that run. Stay near it"
            )
        elif calibrated:
            reason = (
                f"its C was {constant.value:.3g} in the run calibrated on, and in measured runs "
                "it was up to about twice as large at half the learning rate. Use this prediction "
                f"only at the learning rate of that run, calibrate with tied=[{c.name!r}]"
            )
        else:
            reason = (
                f"values of C from 0.9 to {TIED[1]:g} were measured, so that its norm may differ "
                f"much from the prediction with C = {constant.value:g}. Calibrate on a run of this "
                "model"
            )
        return [
            f"{c.name} is an embedding tied to the head, and the run is short: decay leaves "
            f"{kept:.0%} of the initial mean square. In this case the random-walk model is known "
            f"to be wrong: {reason}, or record the norm of AdamW with NormTrace."
        ]
    if calibrated and c.tied and constant.exponent != TIED_EXPONENT:
        return [
            f"{c.name} is an embedding tied to the head, and was calibrated as one that is not: "
            f"its C is assumed to be proportional to lr^-{constant.exponent:g}, where "
            f"lr^-{TIED_EXPONENT:g} was measured. Calibrate with tied=[{c.name!r}]."
        ]
    if calibrated and constant.value <= 0:
        return [
            f"The calibrated C of {c.name} is {constant.value:.3g}: gradients reduced its norm by "
            "more than their noise increased it, so that it does not follow a random walk. The "
            "prediction applies only to runs like the one calibrated on."
        ]
    return []


def assumptions(classes: list[TensorClass], constants: Constants, shown: bool) -> tuple[str, ...]:
    """The assumptions of a prediction for these classes. ``shown``: True if a model was given, in
    which tied weights can be recognised."""
    texts = ["each step adds C * lr^2 to the mean square of a class, and decay reduces it"]
    if isinstance(constants, Mapping):
        exponents = " or ".join(
            f"{p:g}" for p in sorted({law_of(c, constants)[0] for c in classes})
        )
        by = f"times and divided by {MOVED:g} ({TIED_MOVED:g} if tied)"
        texts.append(
            f"C as calibrated, proportional to lr^-p with p = {exponents}; bounds: its range over "
            f"the second half of that run, {by}"
        )
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
