"""Grokking with a constant norm: modular addition, learned from 60 % of all pairs.

A small network learns (a + b) mod 41. Its weights start twice as large as usual, so that it can
memorise the pairs that it is trained on. AdamW without decay only memorises them; with decay it
generalises after the norm has fallen. AdamWN keeps the norm constant from the first step. With a
norm that is too small it cannot fit the pairs, with one that is too large it memorises, and between
the two it generalises: sooner than AdamW with a decay of 1, about as soon as with a decay of 3.

    python examples/grokking.py [--steps 2000] [--figure runs/grokking.png]

Ten runs, about a minute on one core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from normcontrol import AdamWN

P, SHARE, START = 41, 0.6, 2.0
DECAYS = (0.0, 0.3, 1.0, 3.0)
RATIOS = (0.18, 0.25, 0.35, 0.5, 0.65, 1.0)
EVERY = 20


class Network(nn.Module):
    """Two embedded numbers, one hidden layer, and P possible answers."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Embedding(P, 48)
        self.hidden = nn.Linear(96, 128, bias=False)
        self.answers = nn.Linear(128, P, bias=False)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.answers(torch.relu(self.hidden(self.numbers(pairs).flatten(1))))


@dataclass
class Run:
    """The records of one training run. ``ratio`` is AdamWN's target, and None for AdamW."""

    name: str
    ratio: float | None
    steps: list[int] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    shown: list[float] = field(default_factory=list)
    unseen: list[float] = field(default_factory=list)

    def generalised(self) -> int | None:
        """The first recorded step with more than 95 % right answers on the pairs not shown."""
        return next(
            (step for step, share in zip(self.steps, self.unseen, strict=True) if share > 0.95),
            None,
        )


def pairs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All pairs, their sums, the indices of the training pairs, and those of the other pairs."""
    every = torch.cartesian_prod(torch.arange(P), torch.arange(P))
    order = torch.randperm(P * P, generator=torch.Generator().manual_seed(0))
    count = int(SHARE * P * P)
    return every, every.sum(1) % P, order[:count], order[count:]


def train(
    name: str, optimizer: Callable[[nn.Module], Optimizer], steps: int, ratio: float | None = None
) -> Run:
    """Train one network and record its norm and its right answers every few steps."""
    torch.manual_seed(0)
    network, run = Network(), Run(name, ratio)
    with torch.no_grad():
        torch._foreach_mul_(list(network.parameters()), START)
    adam = optimizer(network)
    every, sums, shown, unseen = pairs()
    for step in range(1, steps + 1):
        cross_entropy(network(every[shown]), sums[shown]).backward()
        adam.step()
        adam.zero_grad()
        if step % EVERY == 0 or step == 1:
            with torch.no_grad():
                right = (network(every).argmax(1) == sums).float()
                run.norm.append(
                    float(torch.cat([p.flatten() for p in network.parameters()]).norm())
                )
            run.steps.append(step)
            run.shown.append(float(right[shown].mean()))
            run.unseen.append(float(right[unseen].mean()))
    known = run.generalised()
    when = "never" if known is None else f"at step {known:,}"
    print(
        f"{name:18}  norm {run.norm[-1]:6.1f}  shown {run.shown[-1]:5.1%}  unseen "
        f"{run.unseen[-1]:6.1%}  generalised {when}",
        flush=True,
    )
    return run


def runs(steps: int) -> list[Run]:
    """AdamW with every decay, then AdamWN with every ratio."""
    options = {"lr": 3e-3, "betas": (0.9, 0.98)}
    found = [
        train(
            f"AdamW, decay {d:g}",
            lambda n, d=d: AdamW(n.parameters(), weight_decay=d, **options),
            steps,
        )
        for d in DECAYS
    ]
    for r in RATIOS:  # with rate=1 the norm is exactly r times the initial norm after every step
        found.append(
            train(
                f"AdamWN, ratio {r:g}",
                lambda n, r=r: AdamWN(n.parameters(), ratio=r, rate=1.0, **options),
                steps,
                ratio=r,
            )
        )
    return found


def draw(found: list[Run], path: Path) -> None:
    """Save a figure: right answers and norms over the steps, and right answers by final norm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, norms, summary) = plt.subplots(1, 3, figsize=(14, 5), layout="constrained")
    reds, blues = plt.get_cmap("Reds"), plt.get_cmap("viridis")
    adamwn = [run for run in found if run.ratio is not None]
    adamw = [run for run in found if run.ratio is None]
    colours = {run.name: reds(0.4 + 0.2 * i) for i, run in enumerate(adamw)} | {
        run.name: blues(i / len(adamwn)) for i, run in enumerate(adamwn)
    }
    for run in found:
        style = {
            "color": colours[run.name],
            "linestyle": "--" if run.ratio is None else "-",
            "label": run.name,
        }
        curves.plot(run.steps, run.unseen, **style)
        norms.plot(run.steps, run.norm, **style)
    curves.set(title="right answers on pairs never shown", xlabel="step", ylim=(-0.03, 1.03))
    norms.set(title="norm of the weights", xlabel="step", ylim=(0, None))
    figure.legend(
        *norms.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=5
    )
    at = [run.norm[-1] for run in adamwn]
    summary.plot(
        at,
        [run.shown[-1] for run in adamwn],
        color="#888888",
        marker="o",
        label="AdamWN: pairs shown",
    )
    summary.plot(
        at,
        [run.unseen[-1] for run in adamwn],
        color="#1f77b4",
        marker="o",
        label="AdamWN: pairs never shown",
    )
    summary.plot(
        [r.norm[-1] for r in adamw],
        [r.unseen[-1] for r in adamw],
        "x",
        color="#d62728",
        markersize=9,
        label="AdamW: never shown",
    )
    summary.set(
        title="at the end, by the final norm", xlabel="norm of the weights", ylim=(-0.03, 1.03)
    )
    summary.legend(frameon=False, loc="center right")
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"The figure is {path}.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--figure", type=Path, default=Path("runs/grokking.png"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    draw(runs(args.steps), args.figure)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
