"""Recording the norms of any run of any optimizer, and replaying them as a schedule.

The paper's protocol in two lines: record AdamW's norm, then challenge it with AdamWN held at that norm. Who is
recorded is decided as AdamWN decides who is controlled, so that the two mean the same weights.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from normcontrol.layouts import check_recognised
from normcontrol.policy import is_controlled, marks_of_decay
from normcontrol.schedule import linear, trace
from normcontrol.scope import SCOPES, join
from normcontrol.sharding import Spread, whole_norms


class NormTrace:
    """Records the joint norm of an optimizer's regularised weights every ``every`` steps, from step 0 on.

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

    def __init__(self, optimizer: Optimizer, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every={every}: a trace records every so many steps. Give 1 or more.")
        marks = marks_of_decay(optimizer.param_groups, optimizer.defaults.get("weight_decay", 0.0))
        groups = [{"controlled": mark, **group} for group, mark in zip(optimizer.param_groups, marks, strict=True)]
        self.params = [p for group in groups for p in group["params"] if is_controlled(group, p)]
        if not self.params:
            raise ValueError("The optimizer regularises no weights that have a norm to record: give it groups that do.")
        self._spread = Spread(self.params)
        check_recognised([f"tensor{i}" for i in range(len(self.params))], self.params, SCOPES["global"], self._spread)
        self.every = every
        self.steps: list[int] = []
        self._norms: list[Tensor | float] = []
        self._count = 0
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, *_: Any) -> None:
        if not self.steps:
            self._record()

    def _after(self, *_: Any) -> None:
        self._count += 1
        if self._count % self.every == 0:
            self._record()

    @torch.no_grad()
    def _record(self) -> None:
        self.steps.append(self._count)
        self._norms.append(join(whole_norms(self.params, SCOPES["global"], self._spread), SCOPES["global"]))

    @property
    def norms(self) -> list[float]:
        """The recorded norms. Reading them waits for the device; recording them does not."""
        self._norms = [float(n) for n in self._norms]
        return self._norms  # type: ignore[return-value]

    @property
    def ratios(self) -> list[float]:
        """The norms as multiples of the first one."""
        return [n / self.norms[0] for n in self.norms]

    def curve(self, smooth: int = 1) -> trace:
        """The whole curve of ratios as a schedule, each point averaged with its neighbours over ``smooth`` records."""
        ratios, half = self.ratios, smooth // 2
        windows = [ratios[max(0, i - half) : i + half + 1] for i in range(len(ratios))] if half else [[r] for r in ratios]
        return trace([sum(w) / len(w) for w in windows], self.steps)

    def final(self, ramp: float = 2500) -> linear:
        """The paper's challenge: from 1 to the final ratio over ``ramp`` steps, then constant."""
        return linear(1.0, self.ratios[-1], steps=ramp)

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON, or as CSV if the name ends so."""
        path = Path(path)
        if path.suffix == ".csv":
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([("step", "norm"), *zip(self.steps, self.norms, strict=True)])
        else:
            path.write_text(json.dumps({"steps": self.steps, "norms": self.norms}) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> NormTrace:
        """Read a trace that :meth:`save` wrote, to replay it; it records nothing more."""
        path = Path(path)
        self = cls.__new__(cls)
        self.params, self.every, self._count = [], 1, 0
        try:
            if path.suffix == ".csv":
                rows = list(csv.DictReader(path.open(newline="")))
                self.steps, self._norms = [int(r["step"]) for r in rows], [float(r["norm"]) for r in rows]
            else:
                content = json.loads(path.read_text())
                self.steps, self._norms = list(content["steps"]), list(content["norms"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a norm trace: it should hold steps and norms as NormTrace.save writes them.") from error
        if not self.steps or len(self.steps) != len(self._norms):
            raise ValueError(f"{path} holds {len(self.steps)} steps and {len(self._norms)} norms: a trace needs one norm for each step.")
        return self
