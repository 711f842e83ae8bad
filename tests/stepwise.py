"""Algorithm 1 with everything that can happen between steps, in float64 NumPy.

``reference.py`` is the paper's algorithm for a whole run. Here the same lines are called step by
step, for all laws, targets and scopes, while weights are edited, frozen, saved or added between the
steps. It shares no code with the library.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LR, BETA1, BETA2, EPSILON = 0.05, 0.9, 0.999, 1e-8


@dataclass
class Weight:
    """One tensor: its value, Adam's state, its group, and the reference norms of its parts."""

    theta: Array
    group: int
    m: Array = field(init=False)
    v: Array = field(init=False)
    steps: int = 0
    frozen: bool = False
    reference: Array = field(init=False)

    def __post_init__(self) -> None:
        self.m, self.v = np.zeros_like(self.theta), np.zeros_like(self.theta)


@dataclass
class Stepwise:
    """The controller and Adam. ``kind`` is the name of a target and ``value`` its number."""

    weights: list[Weight]
    scope: str
    law: str
    order: str
    kind: str
    value: float
    rate: float
    start: int = 0
    clock: int = 0
    fresh: bool = True
    multipliers: dict[object, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for w in self.weights:
            w.reference = self.norms(w)

    def parts(self, w: Weight) -> list[Array]:
        """Views into the tensor, one for each norm that it has."""
        return list(w.theta) if self.scope == "row" else [w.theta]

    def norms(self, w: Weight) -> Array:
        return np.array([np.sqrt(np.sum(part**2)) for part in self.parts(w)])

    def add(self, weight: Weight) -> None:
        weight.reference = self.norms(weight)
        self.weights.append(weight)

    def freeze(self, weight: Weight) -> None:
        """A weight that is frozen before control starts has its reference now."""
        if self.clock < self.start and not self.fresh and not weight.frozen:
            weight.reference = self.norms(weight)
        weight.frozen = True

    def begin(self) -> None:
        """The reference is measured at the first step."""
        if self.fresh:
            for w in self.weights:
                w.reference = self.norms(w)
        self.fresh = False

    def step(self, gradients: list[Array]) -> None:
        self.begin()
        self.clock += 1
        if self.order == "before":
            self.regularise()
        for w, g in zip(self.weights, gradients, strict=True):
            if w.frozen:
                continue
            w.steps += 1
            w.m[:] = BETA1 * w.m + (1 - BETA1) * g
            w.v[:] = BETA2 * w.v + (1 - BETA2) * g**2
            m_hat, v_hat = w.m / (1 - BETA1**w.steps), w.v / (1 - BETA2**w.steps)
            w.theta -= LR * m_hat / (np.sqrt(v_hat) + EPSILON)
        if self.order == "after":
            self.regularise()

    def shares(self) -> dict[object, list[tuple[Weight, int]]]:
        """The parts that share a norm, (tensor, index of the part), by what they share."""
        found: dict[object, list[tuple[Weight, int]]] = {}
        for i, w in enumerate(self.weights):
            if w.frozen:
                continue
            for j in range(len(self.parts(w))):
                keys = {"global": 0, "group": w.group, "tensor": i, "row": (i, j)}
                found.setdefault(keys[self.scope], []).append((w, j))
        return found

    def regularise(self) -> None:
        for key, members in self.shares().items():
            views = [self.parts(w)[j] for w, j in members]
            norm = np.sqrt(sum(np.sum(view**2) for view in views))
            count = sum(view.size for view in views)
            reference = np.sqrt(sum(w.reference[j] ** 2 for w, j in members))
            outputs = [w.theta.shape[0] * self.parts(w)[j].size / w.theta.size for w, j in members]
            unit = {
                "ratio": reference,
                "norm": 1.0,
                "rms": np.sqrt(count),
                "gain": np.sqrt(sum(outputs)),
                "hold": max(reference, 0.8 * np.sqrt(sum(outputs))),
            }[self.kind]
            scale = self.scale(key, norm, self.value * unit, count)
            if np.isfinite(norm) and np.isfinite(scale):
                for view in views:
                    view *= scale
            if self.clock == self.start and np.isfinite(norm):
                for w, j in members:
                    w.reference[j] = np.sqrt(np.sum(self.parts(w)[j] ** 2))

    def scale(self, key: object, norm: float, target: float, count: int) -> float:
        rate = self.rate if self.clock > self.start else 0.0
        if self.law == "integral":
            before = self.multipliers.get(key, 0.0)
            if np.isfinite(norm):
                grown = before + rate * (norm**2 - target**2) / count
                self.multipliers[key] = max(0.0, grown)
            return 1 - 2 * self.multipliers.get(key, 0.0)
        if norm == 0:
            return np.nan
        if self.law == "projection":
            return target / norm if rate > 0 else 1.0
        aim = {
            "proportional": target,
            "upper": min(norm, target),
            "lower": max(norm, target),
            "band(0.5)": min(max(norm, 0.5 * target), target),
        }[self.law]
        return 1 - rate * (1 - aim / norm)
