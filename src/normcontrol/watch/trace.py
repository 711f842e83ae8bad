"""Records the norms of a run with any optimizer, and returns them as a schedule for AdamWN.

This is the protocol of the paper: record the norm of AdamW, then train AdamWN at that norm. The
recorded weights are those that AdamWN would control in the same groups. This file may not know how
a controlled step is carried out.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import asdict, dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from normcontrol.distributed.layouts import check_recognised
from normcontrol.distributed.shards import whole_norms
from normcontrol.distributed.sharing import Sharing
from normcontrol.groups.classes import regularised, sort_members
from normcontrol.groups.members import CONTROL, Members
from normcontrol.groups.outputs import as_axes, is_known, outputs_of
from normcontrol.groups.turns import may_move
from normcontrol.schedule import linear, trace
from normcontrol.scope import SCOPES
from normcontrol.warn import warn

EXPONENTS = (0.35, 0.85)
"""The exponents p for which sums of ``lr^(2 - p)`` are recorded, for
:func:`normcontrol.predict.calibrate`: of matrices, and of embeddings tied to the head."""


@dataclass(frozen=True)
class ClassTrace:
    """The records of a class of tensors.

    If gradients of different steps are independent, the mean square of the weights is that of a
    random walk, ``kept * initial + noise``.

    Attributes:
        count: the number of weights.
        norms: the norm at every record.
        kept: the fraction of the initial mean square that decay has left.
        noise: the sum of the squared learning rates of all steps, each reduced by later decay.
        slowed: the same sum of ``lr^(2 - p)``, for every exponent p in ``EXPONENTS`` (as text).
    """

    count: int
    norms: list[float]
    kept: list[float]
    noise: list[float]
    slowed: dict[str, list[float]] = field(default_factory=dict)


def angle(before: Tensor, after: Tensor, moved: Tensor) -> Tensor:
    """The angle between two vectors with the norms ``before`` and ``after``, whose difference has
    the norm ``moved``. It is accurate for small angles.

    >>> float(angle(torch.tensor(3.0), torch.tensor(4.0), torch.tensor(5.0)).rad2deg())
    90.0
    """
    # The squared distance of the two unit vectors.
    chord = (moved.square() - (after - before).square()).clamp(min=0) / (before * after)
    return 2 * torch.asin((chord.sqrt() / 2).clamp(max=1))


class NormTrace:
    """Records the joint norm of the regularised weights of an optimizer, and that of each class of
    tensors.

    Args:
        optimizer: any optimizer. Hooks are registered on it. Groups that are added to it later are
            not recorded, nor tensors that are frozen now.
        every: the number of steps between records. Step 0 is always recorded.
        angles: also record the angle between the weights before and after each recorded step. This
            needs a copy of the weights during that step.

    >>> model = torch.nn.Linear(4, 4)
    >>> adamw = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    >>> recorded = NormTrace(adamw)
    >>> for _ in range(3):
    ...     model(torch.ones(2, 4)).sum().backward()
    ...     adamw.step()
    >>> recorded.steps, len(recorded.norms)
    ([0, 1, 2, 3], 4)
    >>> ratio = recorded.final(ramp=100)     # for AdamWN(..., ratio=ratio)
    """

    def __init__(self, optimizer: Optimizer, every: int = 1, angles: bool = False) -> None:
        check_whole("every", every, "the number of steps between records")
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                "NormTrace records the norms of an optimizer's weights, but got a "
                f"{type(optimizer).__name__}. Give the optimizer that trains them."
            )
        members = regularised(optimizer)
        self.params = [p for m in members for p in m.params]
        if not self.params:
            raise ValueError(
                "The optimizer regularises no weights, so there is no norm to record. Give it "
                "trained tensors of two or more dimensions, or groups with a weight decay."
            )
        self._sharing = Sharing(self.params)
        check_recognised(
            [f"tensor{i}" for i in range(len(self.params))],
            self.params,
            SCOPES["global"],
            self._sharing,
        )
        self.every = every
        self.outputs = _outputs(optimizer, members)
        """The number of outputs of the recorded weights, which gains are relative to."""
        self.steps: list[int] = []
        self._norms: list[Tensor | float] = []
        self._count = 0
        # Under norm control the groups do not contain the decay, so classes are not recorded.
        decays = not any(CONTROL in group for group in optimizer.param_groups)
        self._sorted = sort_members(members) if decays else []
        # For each group: what decay has left, then the sums of lr^2 and of lr^(2 - p).
        start = [1.0, 0.0, *(0.0 for _ in EXPONENTS)]
        self._walk: list[list[Any]] = [start for _ in members] if decays else []
        self._frozen = [p for m in regularised(optimizer, trained=False) for p in m.params]
        self._groups, self._gone = len(members), 0
        self._parts: list[tuple[Tensor, list[list[Any]]]] = []
        self._classes: dict[str, ClassTrace] = {}
        self._records_angles = angles
        self._angles: list[Tensor | float] = []
        self._copies: list[Tensor] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def __repr__(self) -> str:
        if not self.steps:
            return "NormTrace(no records: the optimizer has made no step)"
        last = f"ratio {self.ratios[-1]:.4g}" if self.norms[0] else f"norm {self.norms[-1]:.4g}"
        return f"NormTrace({len(self.steps)} records, step {self.steps[-1]}, {last})"

    def _is_dummy(self, optimizer: Optimizer) -> bool:
        """Return whether this is the step that creates a state for a checkpoint, with gradients and
        learning rates of zero. The weights may be loaded after it."""
        groups = optimizer.param_groups
        params = [p for group in groups for p in group["params"]]
        return not may_move(groups, not self.steps) and self._sharing.all_zero(params)

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_dummy(optimizer):
            return
        if not self.steps:
            self._record()
        if self._records_angles and (self._count + 1) % self.every == 0:
            self._copies = [p.detach().clone() for p in self.params]

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        skipped = getattr(optimizer, "found_inf", False)  # by GradScaler, which calls fused steps
        if skipped or self._is_dummy(optimizer):
            self._copies = []
            return
        self._count += 1
        groups = optimizer.param_groups  # other ones than before, after a state was loaded
        if len(groups) > self._groups:
            warn(
                f"The optimizer has {len(groups)} groups, and this trace was made when it had "
                f"{self._groups}: the weights of the new ones are not recorded. To record them, "
                "make a NormTrace after the groups are added."
            )
            self._groups = len(groups)
        if self._count % self.every == 0:
            self._warn_of_others(groups)
        for i, group in enumerate(groups[: len(self._walk)]):
            # Some optimizers have no learning rate. Then nothing can be calibrated.
            lr = 0.0 if group.get("lr") is None else group["lr"]
            if isinstance(lr, Tensor):  # reading one on a device would wait
                lr = lr.double() if lr.is_cuda else lr.item()
            left = (1 - lr * group.get("weight_decay", 0.0)) ** 2
            added = (0.0, lr**2, *(lr ** (2 - p) for p in EXPONENTS))
            self._walk[i] = [x * left + a for x, a in zip(self._walk[i], added, strict=True)]
        if self._count % self.every == 0:
            self._record()
            if self._copies:
                self._angles.append(self._angle())
                self._copies = []

    def _warn_of_others(self, groups: list[dict[str, Any]]) -> None:
        """Warn once if recorded tensors are not trained any more, or frozen ones are now."""
        trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        gone = sum(id(p) not in trained for p in self.params)
        if gone > self._gone:
            warn(
                f"{gone} of the {len(self.params)} tensors that this trace records are no longer "
                "trained by the optimizer: they were replaced, removed or frozen, and their last "
                "norms are recorded from now on. Make a new NormTrace after such a change."
            )
            self._gone = gone
        unfrozen = sum(id(p) in trained for p in self._frozen)
        if unfrozen:
            warn(
                f"{unfrozen} tensors that were frozen when this trace was made are trained now, "
                "and are not recorded. To record them, make a new NormTrace."
            )
            self._frozen = []

    @torch.no_grad()
    def _angle(self) -> Tensor:
        scope, now = SCOPES["global"], [p.detach() for p in self.params]
        both = (self._copies, now, [a - b for a, b in zip(now, self._copies, strict=True)])
        return angle(*(scope.join(whole_norms(params, scope, self._sharing)) for params in both))

    @torch.no_grad()
    def _record(self) -> None:
        self.steps.append(self._count)
        parts = whole_norms(self.params, SCOPES["global"], self._sharing)
        self._norms.append(SCOPES["global"].join(parts))
        if self._walk:
            self._parts.append((parts, list(self._walk)))

    @property
    def norms(self) -> list[float]:
        """The recorded norms. Reading this property waits for the device. Recording does not, but
        for fused optimizers under GradScaler, whose overflow flag is read at every step."""
        self._norms = [float(n) for n in self._norms]
        return self._norms  # type: ignore[return-value]

    @property
    def angles(self) -> list[float]:
        """The angle between the weights before and after each recorded step, in radians. Empty
        without ``angles=True``. Scaling all weights does not change the angle."""
        self._angles = [float(a) for a in self._angles]
        return self._angles  # type: ignore[return-value]

    @property
    def ratios(self) -> list[float]:
        """The norms as multiples of the first one."""
        if self.norms and not self.norms[0]:
            raise ValueError(
                "The weights were all zero at step 0, so their norms have no ratio to that. Use "
                "the norms themselves: AdamWN(..., norm=trace(recorded.norms, recorded.steps))."
            )
        return [n / self.norms[0] for n in self.norms]

    @property
    def gains(self) -> list[float]:
        """The norms as gains: in units of the root of the number of outputs. A gain can be the
        target of a model of another width, where a norm or a ratio means something else."""
        if self.outputs is None:
            raise ValueError(
                "The gains of this trace are not known: the outputs of some of its weights cannot "
                "be seen from their shape, or the file does not contain them. Give outputs= in the "
                "groups of vectors and stacks, or leave these out of the decay."
            )
        return [n / math.sqrt(self.outputs) for n in self.norms]

    @property
    def classes(self) -> dict[str, ClassTrace]:
        """The records of each class of tensors, for :func:`normcontrol.predict.calibrate`. Empty
        under norm control."""
        for name, group, indices in self._sorted:
            count = sum(self.params[i].numel() for i in indices)
            slowed: dict[str, list[float]] = {f"{p:g}": [] for p in EXPONENTS}
            records = self._classes.setdefault(name, ClassTrace(count, [], [], [], slowed))
            for parts, walk in self._parts[len(records.norms) :]:
                records.norms.append(math.sqrt(sum(n * n for n in parts[indices].tolist())))
                sums = records.kept, records.noise, *records.slowed.values()
                for values, x in zip(sums, walk[group], strict=True):
                    values.append(float(x))
        return self._classes

    def curve(self, smooth: int = 1) -> trace:
        """The whole curve of ratios as a schedule. Each point is the mean over ``smooth`` records
        around it."""
        check_whole("smooth", smooth, "the number of records in a mean")
        ratios, half = self._recorded_ratios(), smooth // 2
        windows = [ratios[max(0, i - half) : i - half + smooth] for i in range(len(ratios))]
        return trace([sum(w) / len(w) for w in windows], self.steps)

    def final(self, ramp: float = 2500) -> linear:
        """A schedule from 1 to the final ratio in ``ramp`` steps, then constant, as in the
        paper."""
        return linear(1.0, self._recorded_ratios()[-1], steps=ramp)

    def _recorded_ratios(self) -> list[float]:
        if not self.steps:
            raise ValueError(
                "The trace has no records yet, so it is no schedule: the optimizer that it records "
                "has made no step. Train with that one first."
            )
        return self.ratios

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON, or as CSV if the name ends in ``.csv``. CSV contains only the
        joint norm."""
        path = Path(path)
        if path.suffix == ".csv":
            with path.open("w", newline="") as file:
                rows = zip(self.steps, self.norms, strict=True)
                csv.writer(file).writerows([("step", "norm"), *rows])
        else:
            content = {
                "steps": self.steps,
                "norms": self.norms,
                "classes": {name: asdict(c) for name, c in self.classes.items()},
                "angles": self.angles,
                "outputs": self.outputs,
            }
            path.write_text(json.dumps(content) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> NormTrace:
        """Read a trace that :meth:`save` wrote. It is for use as a schedule, and records nothing
        more."""
        path = Path(path)
        self = cls.__new__(cls)
        self.params, self.every, self._count, self.outputs = [], 1, 0, None
        self._sorted, self._classes, self._angles = [], {}, []
        try:
            if path.suffix == ".csv":
                rows = list(csv.DictReader(path.read_text().splitlines()))
                self.steps = [int(r["step"]) for r in rows]
                self._norms = [float(r["norm"]) for r in rows]
            else:
                content = json.loads(path.read_text())
                self.steps, self._norms = list(content["steps"]), list(content["norms"])
                self._classes = {
                    name: ClassTrace(**c) for name, c in content.get("classes", {}).items()
                }
                self._angles = list(content.get("angles", []))
                self.outputs = content.get("outputs")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a norm trace: it should contain steps and norms as NormTrace.save "
                "writes them."
            ) from error
        if not self.steps or len(self.steps) != len(self._norms):
            raise ValueError(
                f"{path} contains {len(self.steps)} steps and {len(self._norms)} norms: a trace "
                "needs one norm for each step."
            )
        return self


def check_whole(name: str, given: Any, what: str) -> None:
    """Refuse what is no whole number from 1 on. ``what`` says what it is the number of."""
    if not isinstance(given, Integral) or given < 1:
        raise ValueError(f"{name}={given!r}: it is {what}. Give a whole number, 1 or more.")


def _outputs(optimizer: Optimizer, members: list[Members]) -> int | None:
    """Return the number of outputs of all recorded weights, or None if it is not known."""
    total = 0
    for group, (names, params) in zip(optimizer.param_groups, members, strict=True):
        axes = as_axes(group.get(CONTROL, group).get("outputs"))
        if not all(is_known(p, axes) for p in params):
            return None
        total += sum(outputs_of(name, p, axes) for name, p in zip(names, params, strict=True))
    return total
