"""What a step of AdamWN costs beside torch's own AdamW on the CPU: time and peak memory, as ratios.

Each optimizer steps weights of its own with the same gradients and the same implementation, in
turn, in one process, so that whatever else the machine does hits both; medians are compared. Run it
with ``make bench``.

Fused, the multiplication is folded into AdamW's own decay by a guessed factor. Here the gradients
do not change, so that the guess always holds; the row "fused, no guess holds" has it miss at every
step, which costs the multiplication a pass. What a training run costs lies between the two.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import write
from torch import Tensor
from torch.optim import Optimizer

from normcontrol import AdamWN
from normcontrol.scope import SCOPES
from normcontrol.weights.passes import measure
from normcontrol.steppers import folded

BYTES_ADAM = 28  # a weight in fp32: weight, m and v are read and written, the gradient read
BYTES_CONTROL = {
    "fused": 4,
    "fused, no guess holds": 12,
}  # the norm reads the weight; a pass for the factor reads and writes it
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "fused, no guess holds": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}


def gpt2_shapes(layers: int) -> list[tuple[int, ...]]:
    """The weights of nanoGPT's GPT-2; 12 layers are the 124M model: 50 matrices and 98 vectors."""
    d = 768
    block = [
        (3 * d, d),
        (d, d),
        (4 * d, d),
        (d, 4 * d),
        (d,),
        (d,),
        (3 * d,),
        (d,),
        (d,),
        (d,),
        (4 * d,),
        (d,),
    ]
    return [(50304, d), (1024, d), *(shape for _ in range(layers) for shape in block), (d,), (d,)]


def make_weights(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
    for w in weights:
        w.grad = torch.randn_like(w) * 1e-3
    return weights


def interleaved(functions: list[Callable[[], Any]], repeats: int, calls: int) -> list[list[float]]:
    """Seconds a call for each function, ``repeats`` times, each measured over some calls in turn
    with the others."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:  # the states are made, the caches warmed
        function()
        function()
    for repeat in range(repeats):
        order = range(len(functions)) if repeat % 2 == 0 else reversed(range(len(functions)))
        for i in order:
            began = time.perf_counter()
            for _ in range(calls):
                functions[i]()
            times[i].append((time.perf_counter() - began) / calls)
    return times


def peak_extra_bytes(opt: Optimizer) -> int | None:
    """How far the process grows beyond its size while it makes a step; None where the system cannot
    say."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now the present size
        before = _status("VmRSS")
        opt.step()
        return max(0, _status("VmHWM") - before)
    except OSError:
        return None


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def compare(
    case: str, shapes: list[tuple[int, ...]], implementation: str, repeats: int, steps: int = 1
) -> dict[str, Any]:
    weights = make_weights(shapes)
    chosen = IMPLEMENTATIONS[implementation]
    adamw = torch.optim.AdamW(make_weights(shapes), lr=1e-6, weight_decay=0.1, **chosen)
    adamwn = AdamWN(
        weights, lr=1e-6, ratio=1.0, **chosen
    )  # the default otherwise: global norm, after the step
    folded.TOLERANCE = -1.0 if implementation.endswith("no guess holds") else 2.0**-23
    controlled, one = adamwn._sets[0].params, torch.tensor(1.0)

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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i < 2 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--short",
        action="store_true",
        help="small shapes and few repeats, to see that everything runs",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=list(IMPLEMENTATIONS),
        help="these implementations alone",
    )
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    shapes = [(64, 48), (48,)] * 4 if args.short else gpt2_shapes(12)
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
        f"\nbytes limit: Adam moves {BYTES_ADAM} bytes a weight; the norm reads 4 more, a pass for "
        "the factor 8."
    )
    print("peak: how far the process grows while it makes a step.")
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
