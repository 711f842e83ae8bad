"""Makes the figures of the documentation from the library itself: ``make figures``.

No curve is drawn by hand: schedules are plotted by their own method, and norms are measured in
steps of the optimizers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from normcontrol import AdamWN, NormControl, Schedule, constant, cosine, linear, piecewise, trace
from normcontrol.law import LAWS

HERE = Path(__file__).parent
BLUE, RED, GREEN, GREY, ORANGE = "#2171b5", "#d62728", "#2a8a4a", "#8a8a8a", "#e08214"
SHADES = ("#9ecae1", BLUE, "#08306b")
plt.rcParams.update(
    {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "lines.linewidth": 2,
        "figure.constrained_layout.use": True,
    }
)


def save(figure: Any, name: str) -> None:
    figure.savefig(HERE / name, dpi=110)
    plt.close(figure)
    print(f"docs/figures/{name}")


def label(
    ax: Axes,
    text: str,
    at: tuple[float, float],
    colour: str,
    offset: tuple[float, float] = (6, 0),
    ha: str = "left",
) -> None:
    """A label beside its line, in its colour: no legend to look up."""
    ax.annotate(text, at, offset, textcoords="offset points", color=colour, va="center", ha=ha)


def figure_1() -> None:
    """The paper's Figure 1: the ratio r_t of weight decay, and one that grows to 2 and stays."""
    figure, ax = plt.subplots(figsize=(5.6, 3.2))
    linear(1.0, 2.0, steps=2500).plot(10_000, ax=ax, color=BLUE)
    constant(0.0).plot(10_000, ax=ax, color=RED)
    label(ax, "weight norm control: linear(1, 2, steps=2500)", (2700, 1.87), BLUE)
    label(ax, "weight decay: 0", (2700, 0.12), RED)
    ax.set(ylabel="$r_t$: target norm / initial norm", xlim=(0, 10_000), ylim=(-0.05, 2.15))
    save(figure, "figure_1.png")


def schedules() -> None:
    shown: list[tuple[str, Schedule]] = [
        ("constant(1.5)", constant(1.5)),
        ("linear(1, 2, steps=400)", linear(1.0, 2.0, steps=400)),
        ("cosine(1, 2, steps=800)", cosine(1.0, 2.0, steps=800)),
        (
            "piecewise((0, 1), (200, 2), (700, 2), (1000, 1.2))",
            piecewise((0, 1.0), (200, 2.0), (700, 2.0), (1000, 1.2)),
        ),
        (
            "trace(recorded ratios)",
            trace(
                [1 + 0.9 * (1 - math.exp(-i / 9)) + 0.03 * math.sin(2 * i) for i in range(51)],
                range(0, 1001, 20),
            ),
        ),
    ]
    figure, axes = plt.subplots(1, 5, figsize=(13, 2.4), sharey=True)
    for ax, (name, schedule) in zip(axes, shown, strict=True):
        schedule.plot(1000, ax=ax, color=BLUE)
        title, _, rest = name.partition("(")
        ax.set_title(title)
        ax.text(
            0.52,
            0.04,
            "(" + rest.replace("), ", "),\n "),
            transform=ax.transAxes,
            fontsize=8.5,
            color=GREY,
            ha="center",
        )
        ax.set_ylim(0.7, 2.1)
    axes[0].set_ylabel("value")
    save(figure, "schedules.png")


def idea() -> None:
    """Where each method pulls the weights, in two dimensions: arrows are (scale - 1) * theta."""
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.8))
    cases = [
        ("weight decay", "proportional", 0.0, "towards zero, for ever"),
        (
            "weight norm control",
            "proportional",
            1.0,
            "towards the target norm,\nfrom inside and from outside",
        ),
        ("max-norm", "upper", 1.0, "only if too long"),
    ]
    for ax, (title, law, target, words) in zip(axes, cases, strict=True):
        for radius in (0.45, 0.75, 1.3, 1.65):
            for i in range(16):
                angle = 2 * math.pi * (i + 0.5 * (radius > 1)) / 16
                theta = torch.tensor([math.cos(angle), math.sin(angle)]) * radius
                scale = LAWS[law](theta.norm(), torch.tensor(target), 0.38)
                move = (scale - 1) * theta
                colour = GREY if move.norm() < 1e-6 else RED if scale < 1 else GREEN
                ax.plot(*theta, "o", ms=2.5, color=colour)
                if move.norm() > 1e-6:
                    ax.annotate(
                        "",
                        (theta + move).tolist(),
                        theta.tolist(),
                        arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.2},
                    )
        if target:
            ax.add_patch(
                plt.Circle(
                    (0, 0),
                    target,
                    fill=False,
                    color=BLUE,
                    lw=2.5,
                    ls="-" if law == "proportional" else (0, (5, 3)),
                )
            )
        else:
            ax.plot(0, 0, "o", color=BLUE, ms=8)
        ax.set(title=title, xlim=(-1.8, 1.8), ylim=(-1.8, 1.8), aspect="equal")
        ax.text(0, -2.0, words, ha="center", va="top", color="#333333")
        ax.axis("off")
    save(figure, "idea.png")


def laws() -> None:
    """The norm over the steps, from three starts, with no gradient: what each setting of the four
    lines does."""
    figure, axes = plt.subplots(1, 4, figsize=(12, 2.9), sharey=True)
    cases = [
        ("weight decay", {"norm": 0.0, "rate": 0.05}),
        ("proportional (the paper)", {"norm": 2.0, "rate": 0.05}),
        ("upper bound", {"norm": 2.0, "rate": 0.05, "law": "upper"}),
        ("projection", {"norm": 2.0, "law": "projection"}),
    ]
    for ax, (title, settings) in zip(axes, cases, strict=True):
        for start, colour in zip((0.5, 1.5, 3.0), SHADES, strict=True):
            weight = torch.nn.Parameter(torch.eye(2, dtype=torch.float64) * start / math.sqrt(2))
            opt = NormControl(torch.optim.SGD([weight], lr=0.0), **settings)
            norms = [start]
            for _ in range(80):
                opt.step()
                norms.append(weight.norm().item())
            ax.plot(norms, color=colour)
        if settings["norm"]:
            ax.axhline(settings["norm"], color=RED, lw=1.2, ls=(0, (5, 4)), zorder=0)
        ax.set(title=title, xlabel="step", ylim=(0, 3.2), xlim=(0, 80))
    axes[0].set_ylabel("norm")
    label(axes[1], "target", (80, 2.0), RED, (-2, -10), "right")
    save(figure, "laws.png")


def noisy_run(
    shapes_rms: list[float], steps: int, lr: float = 1e-3, **settings: Any
) -> tuple[list[float], list[list[float]]]:
    """AdamWN on independent random gradients: the global norm ratio and each tensor's rms, every
    tenth step."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(64, 64) * rms) for rms in shapes_rms]
    opt = AdamWN(weights, lr=lr, betas=(0.9, 0.95), **settings)
    first = math.sqrt(sum(w.detach().square().sum().item() for w in weights))
    ratios, rms = [], []
    for step in range(steps):
        for w in weights:
            w.grad = torch.randn_like(w)
        opt.step()
        if step % 10 == 0:
            squares = [w.detach().square().sum().item() for w in weights]
            ratios.append(math.sqrt(sum(squares)) / first)
            rms.append([math.sqrt(s / 4096) for s in squares])
    return ratios, rms


def rate() -> None:
    """The paper's ramp at three rates, under Adam's noise at GPT-2's size of weights: lag, offset,
    time constant."""
    figure, ax = plt.subplots(figsize=(6.6, 3.6))
    steps, target, rms, lr = 6000, linear(1.0, 2.415, steps=2500), 0.01706, 1e-3
    target.plot(steps, ax=ax, color=RED, lw=1.4, ls=(0, (5, 4)), zorder=5)
    for k, colour in zip((1e-3, 1e-2, 1e-1), SHADES, strict=True):
        ratios, _ = noisy_run([rms], steps, lr=lr, ratio=target, rate=k)
        ax.plot(range(0, steps, 10), ratios, color=colour)
        predicted = 100 * lr**2 / (2 * k * (2.415 * rms) ** 2)
        measured = 100 * (sum(ratios[-100:]) / 100 / 2.415 - 1)
        print(
            f"  k={k:g}: {measured:+.2f} % above its target, C lr^2/(2 k tau^2) says "
            f"{predicted:+.2f} %"
        )
        label(
            ax,
            f"rate {k:g}: {measured:+.1f} %",
            (steps, ratios[-1]),
            colour,
            (6, -6 if k > 0.05 else 4),
        )
    label(ax, "target", (2300, 2.3), RED, (4, -12))
    ax.set(xlabel="step", ylabel="norm / initial norm", xlim=(0, steps), ylim=(0.9, 3.2))
    save(figure, "rate.png")


def scopes() -> None:
    """A small and a large tensor under one ratio: a joint norm lets them share it out, a norm each
    pins them."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.3), sharey=True)
    init = [0.02, 0.02 / math.sqrt(24)]
    for ax, scope, title in zip(
        axes,
        ("global", "tensor"),
        ("scope='global': the paper", "scope='tensor': another method"),
        strict=True,
    ):
        _, rms = noisy_run(init, 8000, ratio=linear(1.0, 2.415, steps=2500), scope=scope)
        for i, (name, colour) in enumerate(
            (("other matrices", "#08306b"), ("residual projections", ORANGE))
        ):
            values = [r[i] for r in rms]
            ax.plot(range(0, 8000, 10), values, color=colour)
            above = i == 0 or scope == "tensor"
            label(
                ax,
                f"{name}: {values[-1]:.3f}",
                (8000, values[-1]),
                colour,
                (-4, 9 if above else -12),
                "right",
            )
            if scope == "tensor":
                ax.axhline(2.415 * init[i], color=colour, lw=1, ls=(0, (5, 4)))
                label(ax, "target", (0, 2.415 * init[i]), colour, (4, 8 if i == 0 else -9))
        ax.set(title=title, xlabel="step", xlim=(0, 8000), ylim=(0, 0.06))
    axes[0].set_ylabel("root mean square")
    save(figure, "scopes.png")


def bf16() -> None:
    """Control from 20 % away in bf16: rounded to nearest (what plain multiplication does) and at
    random."""
    figure, ax = plt.subplots(figsize=(6.4, 3.2))
    torch.manual_seed(0)
    start = torch.randn(256, 256) * 0.02
    weight = torch.nn.Parameter(start.bfloat16())
    naive, first = start.bfloat16(), start.bfloat16().float().norm()
    opt = NormControl(torch.optim.SGD([weight], lr=0.0), ratio=1.2, rate=1e-2)
    ours, theirs = [1.0], [1.0]
    for _ in range(600):
        opt.step()
        ours.append((weight.detach().float().norm() / first).item())
        norm = naive.float().norm()
        naive = naive * (1 - 1e-2 * (1 - 1.2 * first / norm)).bfloat16()
        theirs.append((naive.float().norm() / first).item())
    ax.axhline(1.2, color=RED, lw=1.2, ls=(0, (5, 4)), zorder=0)
    ax.plot(ours, color=BLUE)
    ax.plot(theirs, color=ORANGE)
    label(ax, f"normcontrol: {ours[-1]:.4f}", (600, ours[-1]), BLUE, (-4, -11), "right")
    label(
        ax,
        f"bf16 multiplication: {theirs[-1]:.4f}, for ever",
        (600, theirs[-1]),
        ORANGE,
        (-4, 10),
        "right",
    )
    label(ax, "target 1.2", (4, 1.2), RED, (0, 9))
    ax.set(xlabel="step", ylabel="norm / initial norm", xlim=(0, 600), ylim=(0.99, 1.225))
    save(figure, "bf16.png")


def methods() -> None:
    """Every published method on the same small training: the norm of the hidden matrix, and AdamW's
    behind it."""
    from normcontrol.methods import METHODS, hidden

    steps, lr = 400, 1e-2
    own = {
        "Hanson-Pratt": {"lr": 0.2, "weight_decay": 2e-3},
        "max-norm": {"lr": 0.2, "norm": 0.5},
        "MinMaxNorm": {"low": 0.4, "high": 0.6},
    }
    own |= {
        "AdamW-13b": {"weight_decay": 1e-3},
        "Adam-L2": {"weight_decay": 1e-3},
        "CPR-uniform": {"mean_square": 6e-3},
        "NaP": {"n": 50},
    }
    own |= {
        "CPR-kI0": {"kappa": 1.2**2},
        "AdamWN": {"ratio": linear(1.0, 1.5, steps=100), "rate": 0.1},
        "AdamH": {"lr": 0.03},
    }
    own |= {
        "MuonH": {"lr": 0.03, "adam_lr": lr},
        "nGPT": {"scope": "row"},
        "QK-Clip": {"threshold": 4.0},
    }
    own |= {
        "AdamW-lr2": {"weight_decay": 30.0},
        "Muown": {"lr": 0.03, "adam_lr": lr, "weight_decay": 0.0},
        "relative-update": {"lr": 0.03},
        "update-floor": {"floor": 3.0},
    }

    def norms(name: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 64),
            torch.nn.LayerNorm(64),
            torch.nn.Linear(64, 64),
            torch.nn.Tanh(),
        )
        model.append(torch.nn.Linear(64, 4))
        teacher = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)
        ).requires_grad_(False)
        matrix = model[2]

        def logits(
            p: torch.Tensor,
        ) -> torch.Tensor:  # a stand-in: four heads, each with the square of its weights' norm
            return p.detach().reshape(4, -1).square().sum(1)

        given = hidden(model, lambda n, p: n == "2.weight")
        if METHODS[name].takes_model:
            given = model
        settings = {
            "lr": lr,
            "weight_decay": 0.3,
            "start": 100,
            "switch": 100,
            "largest_logits": logits,
            **own.get(name, {}),
        }
        optimizers = METHODS[name](given, **settings)
        peak = {id(g): g["lr"] for opt in optimizers for g in opt.param_groups}
        found = []
        for step in range(steps):
            now = (
                matrix.parametrizations.weight.original1 if name == "weight-norm" else matrix.weight
            )
            found.append(now.detach().norm().item())
            x = torch.randn(64, 16)
            loss = (model(x) - 3 * teacher(x)).square().mean()
            model.zero_grad()
            loss.backward()
            for opt in optimizers:
                for group in opt.param_groups:
                    group["lr"] = peak[id(group)] * 0.5 * (1 + math.cos(math.pi * step / steps))
                opt.step()
        return [n / found[0] for n in found]

    adamw = norms("AdamW-13a")
    figure, axes = plt.subplots(5, 6, figsize=(13, 9), sharex=True)
    for ax, name in zip(axes.flat, METHODS, strict=False):
        ax.plot(adamw, color=GREY, lw=1.2, alpha=0.7)
        ax.plot(norms(name), color=BLUE)
        ax.axhline(1.0, color="black", lw=0.6, ls=(0, (2, 3)))
        ax.set_title(name, fontsize=10.5)
        ax.tick_params(labelsize=8)
        ax.margins(y=0.15)
    for ax in axes.flat[len(METHODS) :]:
        ax.axis("off")
    note = "norm / initial norm\nover 400 steps\ngrey: AdamW"
    axes.flat[len(METHODS)].text(0, 0.5, note, fontsize=9.5, color="#444444", va="center")
    save(figure, "methods.png")


if __name__ == "__main__":
    for make in (figure_1, schedules, idea, laws, rate, scopes, bf16, methods):
        make()
