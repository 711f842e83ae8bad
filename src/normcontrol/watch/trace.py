"""Recording the norms of any run of any optimizer, and replaying them as a schedule.

The paper's protocol in two lines: record AdamW's norm, then challenge it with AdamWN held at that
norm. Who is recorded is decided as AdamWN decides who is controlled, so that the two mean the same
weights.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from normcontrol.distributed.layouts import check_recognised
from normcontrol.distributed.shards import whole_norms
from normcontrol.distributed.sharing import Sharing
from normcontrol.groups.classes import regularised, sort_members
from normcontrol.schedule import linear, trace
from normcontrol.scope import SCOPES


@dataclass(frozen=True)
class ClassTrace:
    """A class of tensors, record by record: its norm, the share of the initial mean square that
    decay has left, and the sum of all steps' squared learning rates, each as decay has left it.
    (Without gradients that agree, the mean square is that of the random walk, ``kept * initial +
    noise``.)"""

    count: int
    norms: list[float]
    kept: list[float]
    noise: list[float]


def angle(before: Tensor, after: Tensor, moved: Tensor) -> Tensor:
    """The angle between two vectors of these norms, whose difference has the norm ``moved``; exact
    where it is small.

    >>> float(angle(torch.tensor(3.0), torch.tensor(4.0), torch.tensor(5.0)).rad2deg())     # a right one
    90.0
    """
    chord = (moved.square() - (after - before).square()).clamp(min=0) / (
        before * after
    )  # of the two unit vectors, squared
    return 2 * torch.asin((chord.sqrt() / 2).clamp(max=1))


class NormTrace:
    """Records the joint norm of an optimizer's regularised weights every ``every`` steps, from step
    0 on, and that of each class of tensors. With ``angles=True`` also the angle by which each
    recorded step turns the weights, for which it keeps a copy of them during that step: the norms
    before and after a step do not tell.

    >>> model = torch.nn.Linear(4, 4)
    >>> adamw = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    >>> recorded = NormTrace(adamw)
    >>> for _ in range(3):
    ...     model(torch.ones(2, 4)).sum().backward()
    ...     adamw.step()
    >>> recorded.steps, len(recorded.norms)
    ([0, 1, 2, 3], 4)
    >>> challenger_ratio = recorded.final(ramp=100)     # AdamWN(..., ratio=challenger_ratio)
    """

    def __init__(self, optimizer: Optimizer, every: int = 1, angles: bool = False) -> None:
        if every < 1:
            raise ValueError(f"every={every}: a trace records every so many steps. Give 1 or more.")
        members = regularised(optimizer)
        self.params = [p for m in members for p in m.params]
        if not self.params:
            raise ValueError(
                "The optimizer regularises no weights that have a norm to record: give it groups "
                "that do."
            )
        self._sharing = Sharing(self.params)
        check_recognised(
            [f"tensor{i}" for i in range(len(self.params))],
            self.params,
            SCOPES["global"],
            self._sharing,
        )
        self.every = every
        self.steps: list[int] = []
        self._norms: list[Tensor | float] = []
        self._count = 0
        # What decay does to each group; under norm control it is not known from the groups, and
        # classes are not recorded.
        self._groups = (
            []
            if any("control" in group for group in optimizer.param_groups)
            else optimizer.param_groups
        )
        self._sorted = sort_members(members) if self._groups else []
        self._walk: list[tuple[Any, Any]] = [(1.0, 0.0)] * len(self._groups)
        self._parts: list[tuple[Tensor, list[tuple[Any, Any]]]] = []
        self._classes: dict[str, ClassTrace] = {}
        self._asked = angles
        self._angles: list[Tensor | float] = []
        self._copies: list[Tensor] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, *_: Any) -> None:
        if not self.steps:
            self._record()
        if self._asked and (self._count + 1) % self.every == 0:
            self._copies = [p.detach().clone() for p in self.params]

    def _after(self, *_: Any) -> None:
        self._count += 1
        for i, group in enumerate(self._groups):
            lr = (
                0.0 if group.get("lr") is None else group["lr"]
            )  # some optimizers have none: then nothing can be calibrated
            left = (1 - lr * group.get("weight_decay", 0.0)) ** 2
            self._walk[i] = self._walk[i][0] * left, self._walk[i][1] * left + lr**2
        if self._count % self.every == 0:
            self._record()
            if self._copies:
                self._angles.append(self._angle())
                self._copies = []

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
        if self._groups:
            self._parts.append((parts, list(self._walk)))

    @property
    def norms(self) -> list[float]:
        """The recorded norms. Reading them waits for the device; recording them does not."""
        self._norms = [float(n) for n in self._norms]
        return self._norms  # type: ignore[return-value]

    @property
    def angles(self) -> list[float]:
        """By how much each recorded step turned the weights, in radians; nothing without
        ``angles=True``. Scaling them all does not."""
        self._angles = [float(a) for a in self._angles]
        return self._angles  # type: ignore[return-value]

    @property
    def ratios(self) -> list[float]:
        """The norms as multiples of the first one."""
        return [n / self.norms[0] for n in self.norms]

    @property
    def classes(self) -> dict[str, ClassTrace]:
        """The records of each class of tensors, from which :func:`normcontrol.predict.calibrate`
        finds its constants; none under norm control."""
        for name, group, indices in self._sorted:
            kept = self._classes.setdefault(
                name, ClassTrace(sum(self.params[i].numel() for i in indices), [], [], [])
            )
            for parts, walk in self._parts[len(kept.norms) :]:
                kept.norms.append(math.sqrt(sum(n * n for n in parts[indices].tolist())))
                kept.kept.append(float(walk[group][0]))
                kept.noise.append(float(walk[group][1]))
        return self._classes

    def curve(self, smooth: int = 1) -> trace:
        """The whole curve of ratios as a schedule, each point averaged with its neighbours over
        ``smooth`` records."""
        ratios, half = self.ratios, smooth // 2
        windows = (
            [ratios[max(0, i - half) : i + half + 1] for i in range(len(ratios))]
            if half
            else [[r] for r in ratios]
        )
        return trace([sum(w) / len(w) for w in windows], self.steps)

    def final(self, ramp: float = 2500) -> linear:
        """The paper's challenge: from 1 to the final ratio over ``ramp`` steps, then constant."""
        return linear(1.0, self.ratios[-1], steps=ramp)

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON, or as CSV if the name ends so; CSV holds the joint norm
        alone."""
        path = Path(path)
        if path.suffix == ".csv":
            with path.open("w", newline="") as file:
                csv.writer(file).writerows(
                    [("step", "norm"), *zip(self.steps, self.norms, strict=True)]
                )
        else:
            classes = {name: asdict(c) for name, c in self.classes.items()}
            path.write_text(
                json.dumps(
                    {
                        "steps": self.steps,
                        "norms": self.norms,
                        "classes": classes,
                        "angles": self.angles,
                    }
                )
                + "\n"
            )

    @classmethod
    def load(cls, path: str | Path) -> NormTrace:
        """Read a trace that :meth:`save` wrote, to replay it; it records nothing more."""
        path = Path(path)
        self = cls.__new__(cls)
        self.params, self.every, self._count = [], 1, 0
        self._groups, self._sorted, self._classes, self._angles = [], [], {}, []
        try:
            if path.suffix == ".csv":
                rows = list(csv.DictReader(path.open(newline="")))
                self.steps, self._norms = (
                    [int(r["step"]) for r in rows],
                    [float(r["norm"]) for r in rows],
                )
            else:
                content = json.loads(path.read_text())
                self.steps, self._norms = list(content["steps"]), list(content["norms"])
                self._classes = {
                    name: ClassTrace(**c) for name, c in content.get("classes", {}).items()
                }
                self._angles = list(content.get("angles", []))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a norm trace: it should hold steps and norms as NormTrace.save "
                "writes them."
            ) from error
        if not self.steps or len(self.steps) != len(self._norms):
            raise ValueError(
                f"{path} holds {len(self.steps)} steps and {len(self._norms)} norms: a trace needs "
                "one norm for each step."
            )
        return self
