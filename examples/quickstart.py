"""AdamW and AdamWN side by side: the paper's challenge on a network small enough for a laptop.

A character model learns the source code of Python's own standard library. AdamW's norm is recorded
and AdamWN is told to end at the same norm; then both train again at a third and at three times the
learning rate. AdamW's final norm follows the learning rate, AdamWN's stays where it was put. Run it
with ``make quickstart``.
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

CONTEXT = 16  # characters the model sees before it guesses the next one
LR = 3e-3


def read_corpus(characters: int) -> tuple[Tensor, Tensor]:
    """Real text that every machine with Python has: training and validation characters, as ASCII
    codes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= characters:
            break
    codes = torch.frombuffer(text, dtype=torch.uint8).long().clamp(max=127)[:characters]
    split = int(0.9 * len(codes))
    return codes[:split], codes[split:]


def make_model() -> nn.Module:
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
            nn.init.normal_(p, std=0.02)  # as GPT-2 starts
    return model


def loss_on(model: nn.Module, codes: Tensor, at: Tensor) -> Tensor:
    windows = codes[at[:, None] + torch.arange(CONTEXT + 1)]
    return nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])


class Run(NamedTuple):
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
    """Train from the same weights on the same batches, and record the norm at every step."""
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
    """The ratios as a row of bars, from 1 (the initial norm) to ``high``."""
    picked = [values[i * (len(values) - 1) // (width - 1)] for i in range(width)]
    return "".join("▁▂▃▄▅▆▇█"[min(7, max(0, int(8 * (v - 1) / (high - 1))))] for v in picked)


def show(runs: list[Run], target: float) -> None:
    high = max(max(run.norms.ratios) for run in runs)
    print(
        f"{'method':8}{'lr':>6}  "
        f"{'norm / initial norm, step by step':34}{'final':>6}{'asked for':>11}{'val. loss':>11}"
    )
    for run in runs:
        asked = f"{target:.3f}" if run.method == "AdamWN" else "-"
        bars, final = sparkline(run.norms.ratios, high), run.norms.ratios[-1]
        print(f"{run.method:8}{run.lr:6.3f}  {bars:34}{final:6.3f}{asked:>11}{run.loss:11.3f}")


def draw(runs: list[Run], target: float, path: Path) -> None:
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
    print(f"The same as a figure: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--short", action="store_true", help="a few steps only, to see that everything runs"
    )
    parser.add_argument(
        "--figure",
        type=Path,
        default=Path("runs/quickstart.png"),
        help="where the figure goes, if matplotlib is there",
    )
    args = parser.parse_args()
    steps = 30 if args.short else 500
    data = read_corpus(100_000 if args.short else 2_000_000)

    def adamw(params: Any, lr: float) -> Optimizer:
        return torch.optim.AdamW(params, lr=lr, weight_decay=0.1)

    def adamwn(params: Any, lr: float) -> Optimizer:
        return AdamWN(params, lr=lr, ratio=ratio, rate=5e-2)

    first = train("AdamW", adamw, LR, steps, data)
    ratio = first.norms.final(
        ramp=0.05 * steps
    )  # the paper's challenge: AdamWN is asked for the norm that AdamW reached
    runs = [
        first if lr == LR else train("AdamW", adamw, lr, steps, data) for lr in (LR / 3, LR, 3 * LR)
    ]
    runs += [train("AdamWN", adamwn, lr, steps, data) for lr in (LR / 3, LR, 3 * LR)]

    print(
        f"\nA character model learns Python's standard library: {steps} steps, lr annealed to a "
        "tenth, AdamW with weight decay 0.1."
    )
    print(
        f"AdamWN is asked to end at the norm AdamW reached at lr {LR:g}: {ratio.end:.3f} times the "
        "initial one.\n"
    )
    show(runs, ratio.end)
    print("\nOne seed and a short run: the norms are the point; the losses settle nothing.")
    if importlib.util.find_spec("matplotlib"):
        draw(runs, ratio.end, args.figure)


if __name__ == "__main__":
    main()
