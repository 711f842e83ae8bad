"""Measures the time of an AdamWN step on the GPU, compared with torch's fused AdamW in one run.

    python benchmarks/step_gpu.py --json results/step_gpu.json

Every row is a ratio of medians over interleaved rounds, beside the ratio of the bytes moved. Adam
moves 28 bytes per float32 parameter (reads p, g, m, v; writes p, m, v). AdamWN moves the same if
the guessed factor is right. If it is wrong, the step reads and writes p once more, 8 bytes.
Clipping adds 4 bytes in AdamWN, which reads the gradients once more, and 12 with
``clip_grad_norm_``, which reads them twice and writes them. How often a guess is wrong depends on
the training: ``--misses`` counts it for a GPT.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
from step_gpu_misses import misses
from torch import nn

from normcontrol import AdamWN, NormControl, linear
from normcontrol.steppers import fused, tables

RATIO = linear(1.0, 2.0, steps=2500)


def gpt2_shapes(
    layers: int, width: int, vocabulary: int = 50257, context: int = 1024
) -> list[tuple[int, ...]]:
    """The shapes of all tensors of GPT-2 with biases, in the order of the model: 148 for 12
    layers."""
    d = width
    block = [
        (d,),
        (d,),
        (3 * d, d),
        (3 * d,),
        (d, d),
        (d,),
        (d,),
        (d,),
        (4 * d, d),
        (4 * d,),
        (d, 4 * d),
        (d,),
    ]
    return [(vocabulary, d), (context, d), *(block * layers), (d,), (d,)]


SHAPES = {
    "GPT-2 124M": gpt2_shapes(12, 768),
    "GPT-2 XL 1.56B": gpt2_shapes(48, 1600),
    "1,000 x 1,000": [(20, 50)] * 1000,
}


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(s, device="cuda", dtype=dtype) * 0.02) for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    return params


def interleaved(steps: dict[str, Any], rounds: int, inner: int) -> dict[str, float]:
    """Median milliseconds per step of each function. The rounds are taken in turn, so that a change
    of the GPU's speed affects all of them."""
    for step in steps.values():
        # More steps than a warm-up needs: while a target starts to move, guesses are often wrong.
        for _ in range(100):
            step()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(inner):
                step()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / inner)
    return {name: statistics.median(t) for name, t in times.items()}


def clipped(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> Any:
    def step() -> None:
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return step


def contenders() -> dict[str, tuple[str, Any]]:
    """What is measured, as {name: (peer, make)}: the name of what it is compared with, and a
    function that returns the step for given parameters."""

    def adamw(params: list[nn.Parameter], decay: float = 0.1) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4, weight_decay=decay, fused=True)

    def ours(**settings: Any) -> Any:
        return lambda params: AdamWN(params, lr=1e-4, ratio=RATIO, **settings).step

    clip = "clip_grad_norm_ + AdamW fused"
    return {
        "AdamW fused": ("", lambda params: adamw(params).step),
        clip: ("", lambda params: clipped(adamw(params), params)),
        "global, after": ("AdamW fused", ours()),
        "global, before": ("AdamW fused", ours(order="before")),
        "tensor, after": ("AdamW fused", ours(scope="tensor")),
        "max_grad_norm, global, after": (clip, ours(max_grad_norm=1.0)),
        "max_grad_norm, global, before": (clip, ours(max_grad_norm=1.0, order="before")),
        "NormControl(AdamW fused)": (
            "AdamW fused",
            lambda params: NormControl(adamw(params, 0.0), ratio=RATIO).step,
        ),
        **peers(),
    }


def compare(
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    rounds: int,
    inner: int,
    only: list[str] | None = None,
) -> dict[str, Any]:
    """Time each contender and its peer in turn, each with its own parameters."""
    rows = {}
    makers = contenders()
    for name, (peer, make) in makers.items():
        if peer and (only is None or name in only):
            steps = {
                peer: makers[peer][1](parameters(shapes, dtype)),
                name: make(parameters(shapes, dtype)),
            }
            times = interleaved(steps, rounds, inner)
            rows[name] = {
                "ms": round(times[name], 4),
                "peer": peer,
                "peer_ms": round(times[peer], 4),
                "ratio": times[name] / times[peer],
            }
            del steps
            torch.cuda.empty_cache()
    return rows


def peers() -> dict[str, tuple[str, Any]]:
    """Fused optimizers of other packages, if they are installed."""
    found: dict[str, tuple[str, Any]] = {}
    try:
        from apex.optimizers import FusedAdam

        found["apex FusedAdam"] = (
            "AdamW fused",
            lambda params: FusedAdam(params, lr=1e-4, weight_decay=0.1).step,
        )
    except ImportError:
        pass
    try:
        from torchao.optim import AdamW8bit

        found["torchao AdamW8bit"] = (
            "AdamW fused",
            lambda params: AdamW8bit(params, lr=1e-4, weight_decay=0.1).step,
        )
        found["NormControl(torchao AdamW8bit)"] = (
            "AdamW fused",
            lambda params: (
                NormControl(AdamW8bit(params, lr=1e-4, weight_decay=0.0), ratio=RATIO).step
            ),
        )
    except ImportError:
        pass
    return found


BYTES = {  # bytes moved per float32 parameter
    "global, after": 28,
    "global, before": 32,
    "tensor, after": 28,
    "max_grad_norm, global, after": 32,
    "max_grad_norm, global, before": 36,
    "NormControl(AdamW fused)": 40,
}
# The same, divided by the bytes that the peer moves.
LIMITS = {
    name: moved / (40 if name.startswith("max_grad_norm") else 28) for name, moved in BYTES.items()
}


def copy_bandwidth() -> float:
    """Terabytes per second that a copy on the device reads and writes."""
    a = torch.empty(1 << 30, device="cuda", dtype=torch.float32)
    b = torch.empty_like(a)
    return 2 * a.nbytes / interleaved({"copy": lambda: b.copy_(a)}, 5, 5)["copy"] / 1e9


def extra_memory(shapes: list[tuple[int, ...]]) -> int:
    """Bytes of memory that AdamWN uses after a few steps beyond those of torch's fused AdamW."""
    params = parameters(shapes, torch.float32)
    used = []
    for make in (
        lambda: torch.optim.AdamW(params, fused=True),
        lambda: AdamWN(params, ratio=RATIO, max_grad_norm=1.0),
    ):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        opt = make()
        for _ in range(3):
            opt.step()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated() - before)
        del opt
    return used[1] - used[0]


def tune() -> None:
    """Time the kernels with several block sizes, warps and blocks per chunk."""
    params = parameters(SHAPES["GPT-2 124M"], torch.float32)
    adamw = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, fused=True)
    base = interleaved({"AdamW": adamw.step}, 10, 10)["AdamW"]
    print(f"AdamW fused {base:.3f} ms")
    for block, warps, blocks in [
        (b, w, c) for b in (512, 1024, 2048, 4096) for w in (4, 8) for c in (1, 2, 4, 8, 16)
    ]:
        if block * blocks > 32768 or block // (32 * warps) > 16:
            continue
        fused.BLOCK = tables.BLOCK = block
        tables.WARPS, tables.BLOCKS_A_CHUNK = warps, blocks
        steps = {
            o + s: AdamWN(params, lr=1e-4, ratio=RATIO, order=o, scope=s).step
            for o, s in (("before", "global"), ("after", "global"))
        }
        got = interleaved(steps, 7, 10)
        print(
            f"block {block:5} warps {warps} blocks {blocks:3}: "
            + "  ".join(f"{k} {v:.3f} ({v / base:.3f})" for k, v in got.items()),
            flush=True,
        )


def measure_cases(bandwidth: float, only: list[str] | None) -> dict[str, Any]:
    """Measure and print all cases, or those whose title contains one of the texts in ``only``."""
    results: dict[str, Any] = {}
    for title, shapes, dtype, rounds, inner in (
        ("GPT-2 124M fp32", SHAPES["GPT-2 124M"], torch.float32, 11, 40),
        ("GPT-2 XL 1.56B fp32", SHAPES["GPT-2 XL 1.56B"], torch.float32, 7, 8),
        ("GPT-2 124M bf16", SHAPES["GPT-2 124M"], torch.bfloat16, 11, 40),
        ("1,000 tensors of 1,000 fp32", SHAPES["1,000 x 1,000"], torch.float32, 7, 20),
    ):
        if only and not any(text in title for text in only):
            continue
        rows = compare(shapes, dtype, rounds, inner)
        count = sum(torch.Size(s).numel() for s in shapes)
        bytes_each = 28 if dtype == torch.float32 else 14
        floor = count * bytes_each / (bandwidth * 1e9)
        print(
            f"\n{title}: {count:,} parameters; {bytes_each} bytes each at copy speed: {floor:.3f} "
            "ms"
        )
        print(
            f"{'':34}{'ms':>8} {'peer':>8} {'ratio':>7} {'bytes alone':>12} {'at copy speed':>14}"
        )
        for name, row in rows.items():
            row["bytes_ratio"], row["ratio"] = LIMITS.get(name), round(row["ratio"], 4)
            row["ratio_at_copy_speed"] = (
                round(BYTES[name] / 28 * floor / row["peer_ms"], 4) if name in BYTES else None
            )
            alone, best = (
                f"{x:.3f}" if x else "" for x in (row["bytes_ratio"], row["ratio_at_copy_speed"])
            )
            print(
                f"{name:34}{row['ms']:8.3f} {row['peer_ms']:8.3f} {row['ratio']:7.3f} {alone:>12} "
                f"{best:>14}"
            )
        results[title] = {"floor_ms": round(floor, 4), **rows}
    return results


def measure_growth() -> dict[str, Any]:
    """Measure and print models from one million to three billion parameters."""
    results: dict[str, Any] = {}
    print("\ngrowth, global after, against AdamW fused")
    for millions in (1, 10, 100, 1000, 3000):
        shapes = (
            [(1000, 1000)] * millions if millions <= 100 else [(10000, 10000)] * (millions // 100)
        )
        row = compare(shapes, torch.float32, 5, 20 if millions < 1000 else 5, ["global, after"])[
            "global, after"
        ]
        results[f"growth {millions}M"] = row
        print(
            f"{millions:6} M parameters: {row['ms']:8.3f} ms against {row['peer_ms']:8.3f}, ratio "
            f"{row['ratio']:.3f}"
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--misses", action="store_true")
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="TEXT",
        help="measure only the cases whose title contains one of these",
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device.")
    warnings.simplefilter("ignore")
    if args.tune:
        return tune()
    if args.misses:
        misses()
        return None

    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": fused.triton.__version__,
        "python": platform.python_version(),
    }
    bandwidth = copy_bandwidth()
    print(f"{machine}; device copy {bandwidth:.2f} TB/s")
    missing = [name for name in ("apex FusedAdam", "torchao AdamW8bit") if name not in peers()]
    print(f"not installed, therefore not measured: {', '.join(missing) or 'nothing'}")
    results: dict[str, Any] = {
        "machine": machine,
        "copy_TB_per_s": bandwidth,
        "not installed": missing,
    }
    results["cases"] = measure_cases(bandwidth, args.cases)
    if args.cases:
        return None
    results["cases"] |= measure_growth()
    for title in ("GPT-2 124M", "GPT-2 XL 1.56B"):
        results[f"extra bytes, {title}"] = extra = extra_memory(SHAPES[title])
        print(f"{title}: {extra:,} bytes more than AdamW fused uses")
        torch.cuda.empty_cache()
    results["share of steps with a second pass"] = misses()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
