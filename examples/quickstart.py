"""AdamW and AdamWN side by side: the paper's challenge, on a network that a laptop can train.

A character model learns the source code of Python's standard library. The norm of an AdamW run is
recorded, and its final value is AdamWN's target. Both are then trained with a third and with three
times the learning rate. The final norm of AdamW depends on the learning rate; the final norm of
AdamWN does not. Run it with ``make quickstart``.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normcontrol import AdamWN, NormTrace

CONTEXT = 16  # characters from which the model predicts the next one
LR = 3e-3


def read_corpus(characters: int) -> tuple[Tensor, Tensor]:
    """Training and validation text as ASCII codes: source files of Python's standard library."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= characters:
            break
    codes = torch.frombuffer(text, dtype=torch.uint8).long().clamp(max=127)[:characters]
    split = int(0.9 * len(codes))
    return codes[:split], codes[split:]


def make_model() -> nn.Module:
    """The network, with the same initial weights at every call."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(128, 32),
        nn.Flatten(),
        nn.Linear(32 * CONTEXT, 256),
        nn.GELU(),
        nn.LayerNorm(256),
        nn.Linear(256, 128),
    )
    for p in model.parameters():
        if p.dim() >= 2:
            nn.init.normal_(p, std=0.02)  # GPT-2's initialisation
    return model


def loss_on(model: nn.Module, codes: Tensor, at: Tensor) -> Tensor:
    """The loss for the windows of text that begin at these positions."""
    windows = codes[at[:, None] + torch.arange(CONTEXT + 1)]
    return nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])


class Run(NamedTuple):
    """The result of one training run."""

    method: str
    lr: float
    norms: NormTrace
    loss: float


def train(
    method: str,
    make_optimizer: Callable[..., Optimizer],
    lr: float,
    steps: int,
    data: tuple[Tensor, Tensor],
) -> Run:
    """Train a model and record its norm at every step. All runs have the same initial weights and
    batches."""
    model = make_model()
    opt = make_optimizer(model.parameters(), lr)
    norms = NormTrace(opt)
    cosine = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda t: 0.1 + 0.45 * (1 + math.cos(math.pi * t / steps))
    )
    batches = torch.Generator().manual_seed(1)
    for _ in range(steps):
        at = torch.randint(len(data[0]) - CONTEXT, (128,), generator=batches)
        opt.zero_grad()
        loss_on(model, data[0], at).backward()
        opt.step()
        cosine.step()
    with torch.no_grad():
        loss = loss_on(model, data[1], torch.arange(0, len(data[1]) - CONTEXT, 7))
    return Run(method, lr, norms, loss.item())


def sparkline(values: list[float], high: float, width: int = 32) -> str:
    """The ratios as a row of bars, from 1 to ``high``."""
    picked = [values[i * (len(values) - 1) // (width - 1)] for i in range(width)]
    return "".join("▁▂▃▄▅▆▇█"[min(7, max(0, int(8 * (v - 1) / (high - 1))))] for v in picked)


def show(runs: list[Run], target: float) -> None:
    """Print a table with a row for each run."""
    high = max(max(run.norms.ratios) for run in runs)
    print(
        f"{'method':8}{'lr':>6}  "
        f"{'norm / initial norm, step by step':34}{'final':>6}{'target':>11}{'val. loss':>11}"
    )
    for run in runs:
        goal = f"{target:.3f}" if run.method == "AdamWN" else "-"
        bars, final = sparkline(run.norms.ratios, high), run.norms.ratios[-1]
        print(f"{run.method:8}{run.lr:6.3f}  {bars:34}{final:6.3f}{goal:>11}{run.loss:11.3f}")


def draw(runs: list[Run], target: float, path: Path) -> None:
    """Save a figure with the norms of AdamW on the left and of AdamWN on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, constrained_layout=True)
    titles = {
        "AdamW": "AdamW: the norm follows the learning rate",
        "AdamWN": "AdamWN: the norm is the one you chose",
    }
    for panel, (method, title) in zip(panels, titles.items(), strict=True):
        panel.set_title(title, loc="left", fontweight="bold", fontsize=11.5)
        panel.set_xlabel("step")
        mine = [run for run in runs if run.method == method]
        for run, colour in zip(mine, ("#6baed6", "#2171b5", "#08306b"), strict=True):
            panel.plot(run.norms.steps, run.norms.ratios, color=colour, lw=2)
            if method == "AdamW":
                end = (run.norms.steps[-1], run.norms.ratios[-1])
                panel.annotate(
                    f"lr {run.lr:g}",
                    end,
                    (5, 0),
                    textcoords="offset points",
                    color=colour,
                    va="center",
                )
    panels[0].set_ylabel("norm of the weights / initial norm")
    panels[1].axhline(target, color="#d62728", lw=1.2, ls=(0, (5, 4)), zorder=0)
    middle = panels[1].get_xlim()[1] / 2
    panels[1].annotate(
        f"target {target:.2f}",
        (middle, target),
        (0, -14),
        textcoords="offset points",
        color="#d62728",
    )
    panels[1].annotate(
        "all three learning rates",
        (middle, target),
        (0, 14),
        textcoords="offset points",
        color="#2171b5",
    )
    panels[0].set_xlim(0)
    panels[1].set_xlim(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"The figure is {path}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--short", action="store_true", help="a few steps only, to check that everything runs"
    )
    parser.add_argument(
        "--figure",
        type=Path,
        default=Path("runs/quickstart.png"),
        help="path of the figure; it is drawn if matplotlib is installed",
    )
    args = parser.parse_args()
    steps = 20 if args.short else 500
    data = read_corpus(100_000 if args.short else 2_000_000)

    def adamw(params: Any, lr: float) -> Optimizer:
        return torch.optim.AdamW(params, lr=lr, weight_decay=0.1)

    def adamwn(params: Any, lr: float) -> Optimizer:
        return AdamWN(params, lr=lr, ratio=ratio, rate=5e-2)

    first = train("AdamW", adamw, LR, steps, data)
    # The paper's challenge: AdamW's final norm is AdamWN's target, after a ramp.
    ratio = first.norms.final(ramp=0.05 * steps)
    runs = [
        first if lr == LR else train("AdamW", adamw, lr, steps, data) for lr in (LR / 3, LR, 3 * LR)
    ]
    runs += [train("AdamWN", adamwn, lr, steps, data) for lr in (LR / 3, LR, 3 * LR)]

    print(
        f"\nA character model learns Python's standard library: {steps} steps, learning rate "
        "annealed to a tenth, AdamW with weight decay 0.1."
    )
    print(
        f"AdamWN's target is the final norm of AdamW at lr {LR:g}: {ratio.end:.3f} times the "
        "initial norm.\n"
    )
    show(runs, ratio.end)
    print("\nOne seed and short runs: compare the norms, not the losses.")
    if importlib.util.find_spec("matplotlib"):
        draw(runs, ratio.end, args.figure)


if __name__ == "__main__":
    main()
