"""Measures a step on the CPU, compared with that of the same optimizer without control: time and
peak memory.

Each optimizer has its own weights, and both have the same gradients and the same implementation.
They step in turn in one process, so that other programs slow both down, and medians are compared.
The gradients are other noise at every step: one is forgotten when it returns, 64 steps later.
Run it with ``make bench``.

The fused step of a large model multiplies the weights by a guessed factor in the decay of AdamW,
and corrects wrong guesses; ``corrected`` is the fraction of the timed steps that did so. They begin
when control has settled: before that more guesses are wrong, see ``guesses.py``. In the row "fused,
no guess holds" every guess counts as wrong, and each step needs another pass over the weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import gpt_shapes, gradients, text_table, write
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from normcontrol import AdamWN, NormControl
from normcontrol.scope import SCOPES
from normcontrol.steppers import folded
from normcontrol.weights.passes import measure

BYTES_ADAM = 28  # per fp32 weight: weight, m and v are read and written, the gradient is read
# The norm reads the weight. Another pass, to correct the factor, reads and writes it.
BYTES_CONTROL = {"fused": 4, "fused, rate 0.01": 4, "fused, no guess holds": 12}
SETS, WARM_UP = 64, 64
LR = 3e-4

Shapes = list[tuple[int, ...]]
Make = Callable[[list[Tensor]], Optimizer]


def adam(rate: float = 0.1, **chosen: bool) -> tuple[Make, Make]:
    """AdamW and AdamWN with one implementation."""
    return (
        lambda weights: AdamW(weights, LR, weight_decay=0.1, **chosen),
        lambda weights: AdamWN(weights, LR, rate=rate, **chosen),
    )


def compiled_adam() -> tuple[Make, Make]:
    """AdamW and AdamWN for steps that are compiled, with a learning rate that may change."""
    return (
        lambda weights: AdamW(weights, torch.tensor(LR), weight_decay=0.1),
        lambda weights: AdamWN(weights, torch.tensor(LR)),
    )


def sgd(**settings: Any) -> tuple[Make, Make]:
    """SGD without and with control."""
    return (
        lambda weights: SGD(weights, LR, **settings),
        lambda weights: NormControl(SGD(weights, LR, **settings)),
    )


IMPLEMENTATIONS: dict[str, tuple[Make, Make]] = {
    "fused": adam(fused=True),
    "fused, rate 0.01": adam(0.01, fused=True),
    "fused, no guess holds": adam(fused=True),
    "default": adam(),
    "foreach": adam(foreach=True),
    "for-loop": adam(foreach=False),
    "compiled": compiled_adam(),
    "SGD, momentum": sgd(momentum=0.9),
    "SGD": sgd(),
}

MLP: Shapes = [(128, 64), (128,), (128, 128), (128,), (10, 128), (10,)]
FUSED = ("fused", "fused, rate 0.01", "fused, no guess holds")
CASES: dict[str, tuple[Shapes, int, tuple[str, ...]]] = {
    "GPT-2 124M": (gpt_shapes(768, 12, 50304), 1, (*FUSED, "foreach", "for-loop")),
    "12 layers of 1,024": ([(1024, 1024), (1024,)] * 12, 2, (*FUSED, "default", "compiled")),
    "MLP of 26,000": (MLP, 50, ("fused", "default", "compiled", "SGD, momentum", "SGD")),
    "1,000 tensors of 8x8": ([(8, 8)] * 1000, 5, ("fused", "foreach", "for-loop")),
}
"""The shapes, how many times more often a small case is repeated, and the implementations."""
SHORT: dict[str, tuple[Shapes, int, tuple[str, ...]]] = {
    "small": (
        [(64, 48), (48,)] * 4,
        1,
        tuple(name for name in IMPLEMENTATIONS if name != "compiled"),
    ),
}
"""Without the compiled steps, which need a C++ compiler."""


def make_weights(shapes: Shapes) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]


class Steps:
    """Steps of one optimizer, with other gradients at every step."""

    def __init__(
        self, make: Make, shapes: Shapes, sets: list[list[Tensor]], compiled: bool = False
    ) -> None:
        self.weights, self.sets, self.done = make_weights(shapes), sets, 0
        self.opt = make(self.weights)
        self.step: Any = torch.compile(self.opt.step) if compiled else self.opt.step

    def __call__(self) -> float:
        """Make a step; return its time without that of setting the gradients."""
        for w, g in zip(self.weights, self.sets[self.done % SETS], strict=True):
            w.grad = g
        self.done += 1
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def timed(function: Callable[[], Any]) -> Callable[[], float]:
    def call() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return call


def interleaved(functions: list[Callable[[], float]], repeats: int) -> list[list[float]]:
    """Seconds of each call of each function. The functions are called in turn, ``repeats`` times:
    between two steps other code runs, as in training."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:  # creates the state; the first guesses of a scale are poor
        for _ in range(WARM_UP):
            function()
    for repeat in range(repeats):
        order = range(len(functions)) if repeat % 2 == 0 else reversed(range(len(functions)))
        for i in order:
            times[i].append(functions[i]())
    return times


def peak_extra_bytes(steps: Steps) -> int | None:
    """The peak memory of the process during a step, beyond its memory before it. None if the system
    does not report it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
        before = _status("VmRSS")
        steps()
        return max(0, _status("VmHWM") - before)
    except OSError:
        return None


def _status(field: str) -> int:
    """A size in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def compare(case: str, shapes: Shapes, implementation: str, repeats: int) -> dict[str, Any]:
    """Time an optimizer without and with control, and the norm and the scaling alone."""
    sets = gradients(shapes, SETS)
    compiled = implementation == "compiled"
    torch.compiler.reset()  # or it compiles for any shapes after the second case
    makes = IMPLEMENTATIONS[implementation]
    plain, ours = (Steps(make, shapes, sets, compiled) for make in makes)
    folded.TOLERANCE = -1.0 if implementation.endswith("no guess holds") else 2.0**-23
    controlled, one = [w for w in ours.weights if w.dim() >= 2], torch.tensor(1.0)
    stepper: Any = ours.opt.stepper  # type: ignore[attr-defined]
    multiply, corrected = stepper.multiply_local_, set()

    def counted(*arguments: Any) -> None:
        corrected.add(ours.done)
        multiply(*arguments)

    if not compiled:
        stepper.multiply_local_ = counted

    @torch.no_grad()
    def norm() -> Tensor:
        return measure(controlled, SCOPES["global"])

    @torch.no_grad()
    def scale() -> None:
        torch._foreach_mul_(controlled, one)

    times = interleaved([plain, ours, timed(norm), timed(scale)], repeats)
    medians = [statistics.median(t) for t in times]
    peaks = [peak_extra_bytes(steps) for steps in (plain, ours)]
    return {
        "case": case,
        "implementation": implementation,
        "weights": sum(w.numel() for w in ours.weights),
        "tensors": len(ours.weights),
        "controlled": len(controlled),
        "plain_ms": 1e3 * medians[0],
        "controlled_ms": 1e3 * medians[1],
        "norm_alone_ms": 1e3 * medians[2],
        "scale_alone_ms": 1e3 * medians[3],
        "ratio": medians[1] / medians[0],
        "ratio_of_minima": min(times[1]) / min(times[0]),
        "corrected": sum(step > WARM_UP for step in corrected) / (ours.done - WARM_UP)
        if getattr(stepper, "folded", 0)
        else None,
        "plain_peak_extra_bytes": peaks[0],
        "controlled_peak_extra_bytes": peaks[1],
        "repeats": repeats,
    }


def table(results: list[dict[str, Any]]) -> str:
    """The results as a text table."""
    head = (
        "case",
        "implementation",
        "plain ms",
        "controlled ms",
        "ratio",
        "of minima",
        "bytes limit",
        "corrected",
        "plain peak",
        "controlled peak",
    )
    rows = [head]
    for r in results:
        more = BYTES_CONTROL.get(r["implementation"]) if r["weights"] > 1e7 else None
        limit = "-" if more is None else f"{(BYTES_ADAM + more) / BYTES_ADAM:.2f}"
        peaks = [
            "-" if p is None else f"+{p / 2**20:.1f} MiB"
            for p in (r["plain_peak_extra_bytes"], r["controlled_peak_extra_bytes"])
        ]
        rows.append(
            (
                r["case"],
                r["implementation"],
                f"{r['plain_ms']:.3f}",
                f"{r['controlled_ms']:.3f}",
                f"{r['ratio']:.2f}",
                f"{r['ratio_of_minima']:.2f}",
                limit,
                "-" if r["corrected"] is None else f"{r['corrected']:.0%}",
                *peaks,
            )
        )
    return text_table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--short",
        action="store_true",
        help="small shapes and few repeats, to check that everything runs",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=list(IMPLEMENTATIONS),
        help="measure only these implementations",
    )
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    repeats = 3 if args.short else args.repeats
    results = [
        compare(case, shapes, name, repeats * more)
        for case, (shapes, more, names) in (SHORT if args.short else CASES).items()
        for name in names
        if name in args.only
    ]
    print(table(results))
    print(
        f"\nbytes limit: Adam moves {BYTES_ADAM} bytes per weight; the norm reads 4 more, another "
        "pass moves 8 more."
    )
    print("peak: the memory that a step needs beyond that of the process before it.")
    big = results[0]
    adam, norm, scale = (
        big["weights"] * size / big[key] / 1e6
        for size, key in ((16, "plain_ms"), (4, "norm_alone_ms"), (4, "scale_alone_ms"))
    )
    print(
        f"alone, norm {big['norm_alone_ms']:.1f} ms and scaling {big['scale_alone_ms']:.1f} ms. ",
        end="",
    )
    print(
        f"The fused step reads {adam:.0f} GB/s, the norm {norm:.0f} GB/s, the scaling {scale:.0f} "
        "GB/s."
    )
    write(args.json, results)


if __name__ == "__main__":
    main()
