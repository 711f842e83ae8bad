"""Time of an AdamWN step against torch's fused AdamW on the GPU, side by side in one run.

    python benchmarks/step_gpu.py --json results/step_gpu.json

Every row is a ratio of medians over interleaved rounds, with the ratio that the bytes moved alone
would give. Adam must move 28 bytes a float32 parameter (read p, g, m, v; write p, m, v), and so
must we as long as the guessed factors hold; a step whose guess misses reads and writes p once more,
8 bytes. Clipping reads the gradients once more, 4 bytes for us and 12 for ``clip_grad_norm_``,
which reads them twice and writes them. How often a guess misses depends on the training:
``--misses`` counts it on a GPT that learns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import normcontrol.steppers.fused as fused
from normcontrol import AdamWN, NormControl, linear

RATIO = linear(1.0, 2.0, steps=2500)


def gpt2_shapes(
    layers: int, width: int, vocabulary: int = 50257, context: int = 1024
) -> list[tuple[int, ...]]:
    """Every tensor of GPT-2 with its biases, in the order of the model: 148 for 12 layers."""
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
    """Median milliseconds a step of each, the rounds taken in turn so that drift hits all alike."""
    for step in steps.values():
        for _ in range(
            100
        ):  # also past the first steps, in which a target that starts to move is not guessed well
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
    """What is measured: a name, the name of its peer, and a function that makes its step for some
    parameters."""

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
    """Each contender beside its peer, in turns, each with parameters of its own."""
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
    """Other people's fused optimizers, where they are installed."""
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


BYTES = {  # moved for each float32 parameter
    "global, after": 28,
    "global, before": 28,
    "tensor, after": 28,
    "max_grad_norm, global, after": 32,
    "max_grad_norm, global, before": 32,
    "NormControl(AdamW fused)": 40,
}
LIMITS = {
    name: moved / (40 if name.startswith("max_grad_norm") else 28) for name, moved in BYTES.items()
}  # over the peer's


def copy_bandwidth() -> float:
    """Terabytes a second that a device copy moves, read and written."""
    a = torch.empty(1 << 30, device="cuda", dtype=torch.float32)
    b = torch.empty_like(a)
    return 2 * a.nbytes / interleaved({"copy": lambda: b.copy_(a)}, 5, 5)["copy"] / 1e9


def extra_memory(shapes: list[tuple[int, ...]]) -> int:
    """Bytes that AdamWN holds after a few steps beyond what torch's fused AdamW holds."""
    params = parameters(shapes, torch.float32)
    held = []
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
        held.append(torch.cuda.memory_allocated() - before)
        del opt
    return held[1] - held[0]


def misses(steps: int = 600) -> dict[str, float]:
    """The share of steps in which the guessed factor was off by more than a unit in the last place,
    on a byte-level GPT of 26M parameters that learns the source of Python's standard library."""
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to("cuda", torch.long)
    width, layers, context = 512, 8, 256
    share = {}
    for rate in (1e-2, 1e-1):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, 0.0, nn.functional.gelu, batch_first=True, norm_first=True
        )
        model = nn.ModuleDict(
            {
                "in": nn.Embedding(256, width),
                "at": nn.Embedding(context, width),
                "body": nn.TransformerEncoder(layer, layers),
            }
        )
        model["out"] = nn.Linear(width, 256, bias=False)
        for p in model.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        model = model.cuda()
        opt = AdamWN(
            model.parameters(),
            lr=1e-3,
            betas=(0.9, 0.95),
            ratio=linear(1.0, 2.0, steps=50),
            rate=rate,
            max_grad_norm=1.0,
        )
        mask = nn.Transformer.generate_square_subsequent_mask(context, device="cuda")
        missed = []
        for _ in range(steps):
            at = torch.randint(len(data) - context - 1, (64, 1), device="cuda") + torch.arange(
                context + 1, device="cuda"
            )
            words = data[at]
            with torch.autocast("cuda", torch.bfloat16):
                hidden = model["in"](words[:, :-1]) + model["at"].weight
                logits = model["out"](model["body"](hidden, mask, is_causal=True))
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            missed.append(opt.stepper.plan.needed.clone())
        late = torch.stack(missed[steps // 3 :]).float().mean().item()
        early = torch.stack(missed[: steps // 3]).float().mean().item()
        share[f"rate {rate:g}"] = late
        print(
            f"rate {rate:g}: second pass in {early:.1%} of the first {steps // 3} steps, "
            f"{late:.1%} of the rest; loss {loss.item():.3f}"
        )
    return share


def tune() -> None:
    params = parameters(SHAPES["GPT-2 124M"], torch.float32)
    adamw = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, fused=True)
    base = interleaved({"AdamW": adamw.step}, 10, 10)["AdamW"]
    print(f"AdamW fused {base:.3f} ms")
    for block, warps, blocks in [
        (b, w, c) for b in (512, 1024, 2048, 4096) for w in (4, 8) for c in (1, 2, 4, 8, 16)
    ]:
        if block * blocks > 32768 or block // (32 * warps) > 16:
            continue
        fused.BLOCK, fused.WARPS, fused.BLOCKS_A_CHUNK = block, warps, blocks
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
        help="only the cases whose title holds one of these, and nothing else",
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
    print(f"not installed, so not measured: {', '.join(missing) or 'nothing'}")
    results: dict[str, Any] = {
        "machine": machine,
        "copy_TB_per_s": bandwidth,
        "not installed": missing,
        "cases": {},
    }
    for title, shapes, dtype, rounds, inner in (
        ("GPT-2 124M fp32", SHAPES["GPT-2 124M"], torch.float32, 11, 40),
        ("GPT-2 XL 1.56B fp32", SHAPES["GPT-2 XL 1.56B"], torch.float32, 7, 8),
        ("GPT-2 124M bf16", SHAPES["GPT-2 124M"], torch.bfloat16, 11, 40),
        ("1,000 tensors of 1,000 fp32", SHAPES["1,000 x 1,000"], torch.float32, 7, 20),
    ):
        if args.cases and not any(text in title for text in args.cases):
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
        results["cases"][title] = {"floor_ms": round(floor, 4), **rows}

    if args.cases:
        return None
    print("\ngrowth, global after, against AdamW fused")
    for millions in (1, 10, 100, 1000, 3000):
        shapes = (
            [(1000, 1000)] * millions if millions <= 100 else [(10000, 10000)] * (millions // 100)
        )
        row = compare(shapes, torch.float32, 5, 20 if millions < 1000 else 5, ["global, after"])[
            "global, after"
        ]
        results["cases"][f"growth {millions}M"] = row
        print(
            f"{millions:6} M parameters: {row['ms']:8.3f} ms against {row['peer_ms']:8.3f}, ratio "
            f"{row['ratio']:.3f}"
        )

    for title in ("GPT-2 124M", "GPT-2 XL 1.56B"):
        results[f"extra bytes, {title}"] = extra = extra_memory(SHAPES[title])
        print(f"{title}: {extra:,} bytes held beyond what AdamW fused holds")
        torch.cuda.empty_cache()
    results["share of steps with a second pass"] = misses()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
