"""Measures a step of AdamWN on the CPU, compared with torch's AdamW: time and peak memory.

Each optimizer has its own weights, and both have the same gradients and the same implementation.
They step in turn in one process, so that other programs slow both down, and medians are compared.
Run it with ``make bench``.

The fused step multiplies the weights by a guessed factor in the decay of AdamW, and corrects wrong
guesses. In this benchmark the gradients do not change, so the guess is always right. In the row
"fused, no guess holds" every guess counts as wrong, and each step needs another pass over the
weights. The cost in a training run lies between the two.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import gpt_shapes, text_table, write
from torch import Tensor
from torch.optim import Optimizer

from normcontrol import AdamWN
from normcontrol.scope import SCOPES
from normcontrol.steppers import folded
from normcontrol.weights.passes import measure

BYTES_ADAM = 28  # per fp32 weight: weight, m and v are read and written, the gradient is read
# The norm reads the weight. Another pass, to correct the factor, reads and writes it.
BYTES_CONTROL = {"fused": 4, "fused, no guess holds": 12}
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "fused, no guess holds": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}


def make_weights(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
    for w in weights:
        w.grad = torch.randn_like(w) * 1e-3
    return weights


def interleaved(functions: list[Callable[[], Any]], repeats: int, calls: int) -> list[list[float]]:
    """Seconds per call of each function. The functions are timed in turn, ``repeats`` times, over
    ``calls`` calls each time."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:  # creates the state and warms the caches
        function()
        function()
    for repeat in range(repeats):
        order = range(len(functions)) if repeat % 2 == 0 else reversed(range(len(functions)))
        for i in order:
            start = time.perf_counter()
            for _ in range(calls):
                functions[i]()
            times[i].append((time.perf_counter() - start) / calls)
    return times


def peak_extra_bytes(opt: Optimizer) -> int | None:
    """The peak memory of the process during a step, beyond its memory before it. None if the system
    does not report it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
        before = _status("VmRSS")
        opt.step()
        return max(0, _status("VmHWM") - before)
    except OSError:
        return None


def _status(field: str) -> int:
    """A size in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def compare(
    case: str, shapes: list[tuple[int, ...]], implementation: str, repeats: int, steps: int = 1
) -> dict[str, Any]:
    """Time AdamW and AdamWN with one implementation, and the norm and the scaling alone."""
    weights = make_weights(shapes)
    chosen = IMPLEMENTATIONS[implementation]
    adamw = torch.optim.AdamW(make_weights(shapes), lr=1e-6, weight_decay=0.1, **chosen)
    adamwn = AdamWN(weights, lr=1e-6, ratio=1.0, **chosen)
    folded.TOLERANCE = -1.0 if implementation.endswith("no guess holds") else 2.0**-23
    controlled, one = [w for w in weights if w.dim() >= 2], torch.tensor(1.0)

    @torch.no_grad()
    def norm() -> Tensor:
        return measure(controlled, SCOPES["global"])

    @torch.no_grad()
    def scale() -> None:
        torch._foreach_mul_(controlled, one)

    times = interleaved([adamw.step, adamwn.step, norm, scale], repeats, steps)
    medians = [statistics.median(t) for t in times]
    peaks = [peak_extra_bytes(opt) for opt in (adamw, adamwn)]
    return {
        "case": case,
        "implementation": implementation,
        "weights": sum(w.numel() for w in weights),
        "tensors": len(weights),
        "controlled": len(controlled),
        "adamw_ms": 1e3 * medians[0],
        "adamwn_ms": 1e3 * medians[1],
        "norm_alone_ms": 1e3 * medians[2],
        "scale_alone_ms": 1e3 * medians[3],
        "ratio": medians[1] / medians[0],
        "ratio_of_minima": min(times[1]) / min(times[0]),
        "adamw_peak_extra_bytes": peaks[0],
        "adamwn_peak_extra_bytes": peaks[1],
        "repeats": repeats,
    }


def table(results: list[dict[str, Any]]) -> str:
    """The results as a text table."""
    head = (
        "case",
        "implementation",
        "AdamW ms",
        "AdamWN ms",
        "ratio",
        "bytes limit",
        "AdamW peak",
        "AdamWN peak",
    )
    rows = [head]
    for r in results:
        more = BYTES_CONTROL.get(r["implementation"]) if r["weights"] > 1e7 else None
        limit = "-" if more is None else f"{(BYTES_ADAM + more) / BYTES_ADAM:.2f}"
        peaks = [
            "-" if p is None else f"+{p / 2**20:.1f} MiB"
            for p in (r["adamw_peak_extra_bytes"], r["adamwn_peak_extra_bytes"])
        ]
        rows.append(
            (
                r["case"],
                r["implementation"],
                f"{r['adamw_ms']:.2f}",
                f"{r['adamwn_ms']:.2f}",
                f"{r['ratio']:.2f}",
                limit,
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
    shapes = [(64, 48), (48,)] * 4 if args.short else gpt_shapes(768, 12, 50304)
    repeats = 3 if args.short else args.repeats
    count = 20 if args.short else 1000

    results = [
        compare("small" if args.short else "GPT-2 124M", shapes, name, repeats)
        for name in args.only
    ]
    results += [
        compare(f"{count} tensors of 8x8", [(8, 8)] * count, name, repeats, steps=5)
        for name in args.only
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
        for size, key in ((16, "adamw_ms"), (4, "norm_alone_ms"), (4, "scale_alone_ms"))
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
