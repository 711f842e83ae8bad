"""Which gain suits a classifier: scikit-learn's digits, 64-w-w-10, with and without normalisation.

    pip install scikit-learn
    python benchmarks/digits.py --json results/digits.json

A gain of 0.8 was found in GPTs, whose layers are followed by normalisation. These networks are of
another kind. For each width and normalisation it prints the best gain, what a gain of 0.8 loses
against it, and how AdamW does from the same start. A second table has the last layer, which makes
the logits, at a gain of its own.

The protocol is that of the study `transfer`: a start at the target, a fifth of warm-up, a cosine to
a tenth, rate 0.1, one joint norm. The loss is the mean cross entropy of the test images.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import text_table, write
from torch import Tensor, nn
from torch.nn import functional as F

from normcontrol import AdamWN, set_norm_

WIDTHS = (32, 128, 512)
NORMALISATIONS: dict[str, Any] = {
    "none": None,
    "LayerNorm": nn.LayerNorm,
    "BatchNorm": nn.BatchNorm1d,
}
GAINS = (0.12, 0.18, 0.25, 0.35, 0.5, 0.65, 0.8, 1.1, 1.5, 2.1)
HEAD_GAINS = (0.1, 0.25, 0.5, 1.6)
DECAYS = (0.0, 0.1, 1.0, 3.0, 10.0)
USUAL = 0.8
STEPS, BATCH, LR, TEST = 600, 128, 2e-3, 500
Digits = tuple[Tensor, Tensor, Tensor, Tensor]


def load() -> Digits:
    """The images and labels for training, and for the test: 500 that are the same in all runs."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32)
    labels = torch.tensor(found.target, dtype=torch.int64)
    images = (images - images.mean()) / images.std()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return images[TEST:], labels[TEST:], images[:TEST], labels[:TEST]


def network(width: int, normalisation: str, inputs: int = 64, classes: int = 10) -> nn.Sequential:
    """Two hidden layers with ReLU, each with the normalisation before it, as torch initialises
    them."""
    make = NORMALISATIONS[normalisation]
    layers: list[nn.Module] = []
    for i, o in ((inputs, width), (width, width)):
        layers += [nn.Linear(i, o), *([make(o)] if make else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def lr_at(step: int, steps: int = STEPS) -> float:
    """The learning rate of a step, counted from 1, as a fraction of its peak."""
    warmup = steps / 5
    if step < warmup:
        return step / warmup
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Digits, seed: int, steps: int = STEPS
) -> tuple[float, float]:
    """The loss and the accuracy on the test images after the last step."""
    images, labels, test_images, test_labels = data
    generator = torch.Generator().manual_seed(seed)
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(1, steps + 1):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * lr_at(step, steps)
        rows = torch.randint(len(images), (BATCH,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        logits = model(test_images)
    right = (logits.argmax(1) == test_labels).float().mean()
    return float(F.cross_entropy(logits, test_labels)), float(right)


def controlled(model: nn.Sequential, gain: float, head_gain: float | None = None) -> AdamWN:
    """AdamWN that holds the model at a gain, which it starts from. The last layer can have its own:
    then hidden layers and the last one have a norm each."""
    if head_gain is None:
        set_norm_(model, gain=gain)
        return AdamWN(model.parameters(), lr=LR, gain=gain, rate=0.1)
    groups = [
        {"params": list(model[:-1].parameters()), "gain": gain},
        {"params": list(model[-1].parameters()), "gain": head_gain},
    ]
    set_norm_(groups, gain=gain, scope="group")
    return AdamWN(groups, lr=LR, rate=0.1, scope="group")


def decayed(model: nn.Sequential, decay: float) -> torch.optim.AdamW:
    """AdamW from the usual gain; vectors are not decayed."""
    set_norm_(model, gain=USUAL)
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR)


def cells() -> Iterator[tuple[str, dict[str, Any]]]:
    """The arms: a kind, and its settings."""
    for gain in GAINS:
        yield "gain", {"gain": gain}
    for gain in HEAD_GAINS:
        yield "head", {"gain": USUAL, "head_gain": gain}
    for decay in DECAYS:
        yield "decay", {"decay": decay}


def run(seeds: int, data: Digits) -> list[dict[str, Any]]:
    """Every run, with its settings, loss and accuracy."""
    found = []
    for normalisation in NORMALISATIONS:
        for width in WIDTHS:
            for kind, settings in cells():
                for seed in range(seeds):
                    torch.manual_seed(seed)
                    model = network(width, normalisation)
                    make = decayed if kind == "decay" else controlled
                    loss, accuracy = train(model, make(model, **settings), data, seed)
                    about = {"normalisation": normalisation, "width": width, "kind": kind}
                    found.append(
                        {**about, **settings, "seed": seed, "loss": loss, "accuracy": accuracy}
                    )
            print(f"{normalisation}, width {width}: done", flush=True)
    return found


class Arm:
    """The runs of one kind in one network: their settings, and losses seed by seed."""

    def __init__(self, runs: list[dict[str, Any]], kind: str, key: str) -> None:
        self.losses: dict[float, list[float]] = {}
        for one in runs:
            if one["kind"] == kind:
                self.losses.setdefault(one[key], []).append(one["loss"])

    def best(self) -> float:
        return min(self.losses, key=lambda value: statistics.fmean(self.losses[value]))

    def at_edge(self) -> bool:
        return self.best() in (min(self.losses), max(self.losses))

    def mean(self, value: float) -> float:
        return statistics.fmean(self.losses[value])


def difference(one: list[float], other: list[float]) -> str:
    """The mean difference over seeds, with its standard error."""
    less = [a - b for a, b in zip(one, other, strict=True)]
    if len(less) < 2:
        return f"{less[0]:+.4f}"
    return f"{statistics.fmean(less):+.4f} ({statistics.stdev(less) / math.sqrt(len(less)):.4f})"


def rows(runs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The table: what a gain of 0.8 loses, against the best gain, the best gain of the last layer,
    and AdamW's best decay. In brackets: standard errors."""
    found = [
        (
            *("normalisation", "width", "best gain", "0.8 minus best gain"),
            *("best gain of the last layer", "0.8 minus that", "best decay", "0.8 minus that"),
        )
    ]
    for normalisation in NORMALISATIONS:
        for width in WIDTHS:
            here = [r for r in runs if (r["normalisation"], r["width"]) == (normalisation, width)]
            if not here:
                continue
            gain, head = Arm(here, "gain", "gain"), Arm(here, "head", "head_gain")
            decay = Arm(here, "decay", "decay")
            usual, row = gain.losses[USUAL], [normalisation, str(width)]
            for arm in (gain, head, decay):
                edge = " (edge)" if arm.at_edge() else ""
                row += [f"{arm.best():g}{edge}", difference(usual, arm.losses[arm.best()])]
            found.append(tuple(row))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = run(given.seeds, load())
    print(text_table(rows(runs)))
    write(given.json, {"runs": runs})


if __name__ == "__main__":
    main()
