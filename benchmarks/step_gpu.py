"""Time of an AdamWN step against torch's fused AdamW on the GPU, side by side in one run.

    python benchmarks/step_gpu.py --json results/step_gpu.json

Every row is a ratio of medians over interleaved rounds, with the ratio that the bytes moved alone would give. Adam
must move 28 bytes a float32 parameter (read p, g, m, v; write p, m, v), and so must we as long as the guessed factors
hold; a step whose guess misses reads and writes p once more, 8 bytes. Clipping reads the gradients once more, 4 bytes
for us and 12 for ``clip_grad_norm_``, which reads them twice and writes them. How often a guess misses depends on the
training: ``--misses`` counts it on a GPT that learns.
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

import normcontrol.fused as fused
from normcontrol import AdamWN, NormControl, linear

RATIO = linear(1.0, 2.0, steps=2500)


def gpt2_shapes(layers: int, width: int, vocabulary: int = 50257, context: int = 1024) -> list[tuple[int, ...]]:
    """Every tensor of GPT-2 with its biases, in the order of the model: 148 for 12 layers."""
    d = width
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
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
        for _ in range(100):  # also past the first steps, in which a target that starts to move is not guessed well
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


def compare(shapes: list[tuple[int, ...]], dtype: torch.dtype, rounds: int, inner: int, only: list[str] | None = None) -> dict[str, float]:
    params = parameters(shapes, dtype)
    adamw = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, fused=True)
    makers: dict[str, Any] = {
        "AdamW fused": lambda: adamw.step,
        "global, after": lambda: AdamWN(params, lr=1e-4, ratio=RATIO).step,
        "global, before": lambda: AdamWN(params, lr=1e-4, ratio=RATIO, order="before").step,
        "tensor, after": lambda: AdamWN(params, lr=1e-4, ratio=RATIO, scope="tensor").step,
        "clip_grad_norm_ + AdamW fused": lambda: clipped(adamw, params),
        "max_grad_norm, global, after": lambda: AdamWN(params, lr=1e-4, ratio=RATIO, max_grad_norm=1.0).step,
        "max_grad_norm, global, before": lambda: AdamWN(params, lr=1e-4, ratio=RATIO, max_grad_norm=1.0, order="before").step,
        "NormControl(AdamW fused)": lambda: NormControl(torch.optim.AdamW(params, lr=1e-4, weight_decay=0.0, fused=True), ratio=RATIO).step,
        **peers(params),
    }
    return interleaved({name: make() for name, make in makers.items() if only is None or name in only}, rounds, inner)


def peers(params: list[nn.Parameter]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        from apex.optimizers import FusedAdam

        found["apex FusedAdam"] = lambda: FusedAdam(params, lr=1e-4, weight_decay=0.1).step
    except ImportError:
        print("apex is not installed: not measured")
    try:
        from torchao.optim import AdamW8bit

        found["torchao AdamW8bit"] = lambda: AdamW8bit(params, lr=1e-4, weight_decay=0.1).step
        found["NormControl(torchao AdamW8bit)"] = lambda: NormControl(AdamW8bit(params, lr=1e-4, weight_decay=0.0), ratio=RATIO).step
    except ImportError:
        print("torchao is not installed: not measured")
    return found


LIMITS = {  # bytes moved, ours over theirs, in float32
    "global, after": 28 / 28,
    "global, before": 28 / 28,
    "tensor, after": 28 / 28,
    "max_grad_norm, global, after": 32 / 40,
    "max_grad_norm, global, before": 32 / 40,
    "NormControl(AdamW fused)": 40 / 28,
}


def peer_of(name: str) -> str:
    return "clip_grad_norm_ + AdamW fused" if name.startswith("max_grad_norm") else "AdamW fused"


def copy_bandwidth() -> float:
    """Terabytes a second that a device copy moves, read and written."""
    a = torch.empty(1 << 30, device="cuda", dtype=torch.float32)
    b = torch.empty_like(a)
    return 2 * a.nbytes / interleaved({"copy": lambda: b.copy_(a)}, 5, 5)["copy"] / 1e9


def extra_memory(shapes: list[tuple[int, ...]]) -> int:
    """Bytes that AdamWN holds after a few steps beyond what torch's fused AdamW holds."""
    params = parameters(shapes, torch.float32)
    held = []
    for make in (lambda: torch.optim.AdamW(params, fused=True), lambda: AdamWN(params, ratio=RATIO, max_grad_norm=1.0)):
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
    """The share of steps in which the guessed factor was off by more than a unit in the last place, on a byte-level GPT of 26M
    parameters that learns the source of Python's standard library."""
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to("cuda", torch.long)
    width, layers, context = 512, 8, 256
    share = {}
    for rate in (1e-2, 1e-1):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, nn.functional.gelu, batch_first=True, norm_first=True)
        model = nn.ModuleDict(
            {"in": nn.Embedding(256, width), "at": nn.Embedding(context, width), "body": nn.TransformerEncoder(layer, layers)}
        )
        model["out"] = nn.Linear(width, 256, bias=False)
        for p in model.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        model = model.cuda()
        opt = AdamWN(model.parameters(), lr=1e-3, betas=(0.9, 0.95), ratio=linear(1.0, 2.0, steps=50), rate=rate, max_grad_norm=1.0)
        mask = nn.Transformer.generate_square_subsequent_mask(context, device="cuda")
        missed = []
        for _ in range(steps):
            at = torch.randint(len(data) - context - 1, (64, 1), device="cuda") + torch.arange(context + 1, device="cuda")
            words = data[at]
            with torch.autocast("cuda", torch.bfloat16):
                hidden = model["in"](words[:, :-1]) + model["at"].weight
                logits = model["out"](model["body"](hidden, mask, is_causal=True))
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            missed.append(opt._plan.needed.clone())
        late = torch.stack(missed[steps // 3 :]).float().mean().item()
        early = torch.stack(missed[: steps // 3]).float().mean().item()
        share[f"rate {rate:g}"] = late
        print(f"rate {rate:g}: second pass in {early:.1%} of the first {steps // 3} steps, {late:.1%} of the rest; loss {loss.item():.3f}")
    return share


def tune() -> None:
    params = parameters(SHAPES["GPT-2 124M"], torch.float32)
    adamw = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, fused=True)
    base = interleaved({"AdamW": adamw.step}, 10, 10)["AdamW"]
    print(f"AdamW fused {base:.3f} ms")
    for block, warps, blocks in [(b, w, c) for b in (512, 1024, 2048, 4096) for w in (4, 8) for c in (1, 2, 4, 8, 16)]:
        if block * blocks > 32768 or block // (32 * warps) > 16:
            continue
        fused.BLOCK, fused.WARPS, fused.BLOCKS_A_CHUNK = block, warps, blocks
        steps = {o + s: AdamWN(params, lr=1e-4, ratio=RATIO, order=o, scope=s).step for o, s in (("before", "global"), ("after", "global"))}
        got = interleaved(steps, 7, 10)
        print(
            f"block {block:5} warps {warps} blocks {blocks:3}: " + "  ".join(f"{k} {v:.3f} ({v / base:.3f})" for k, v in got.items()),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--misses", action="store_true")
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
    results: dict[str, Any] = {"machine": machine, "copy_TB_per_s": bandwidth, "cases": {}}
    for title, shapes, dtype, rounds, inner in (
        ("GPT-2 124M fp32", SHAPES["GPT-2 124M"], torch.float32, 11, 40),
        ("GPT-2 XL 1.56B fp32", SHAPES["GPT-2 XL 1.56B"], torch.float32, 7, 6),
        ("GPT-2 124M bf16", SHAPES["GPT-2 124M"], torch.bfloat16, 11, 40),
        ("1,000 tensors of 1,000 fp32", SHAPES["1,000 x 1,000"], torch.float32, 9, 20),
    ):
        times = compare(shapes, dtype, rounds, inner)
        count = sum(torch.Size(s).numel() for s in shapes)
        floor = count * 28 / (bandwidth * 1e9) * (0.5 if dtype == torch.bfloat16 else 1.0)
        print(f"\n{title}: {count:,} parameters; 28 bytes a parameter at copy speed (14 in bf16): {floor:.3f} ms")
        print(f"{'':34}{'ms':>8} {'ratio':>7} {'bytes alone':>12}")
        rows = {}
        for name, ms in times.items():
            ratio = ms / times[peer_of(name)]
            limit = LIMITS.get(name)
            rows[name] = {"ms": round(ms, 4), "ratio": round(ratio, 4), "bytes_ratio": limit}
            print(f"{name:34}{ms:8.3f} {ratio:7.3f} {limit if limit is None else format(limit, '12.3f')!s:>12}")
        results["cases"][title] = rows
        torch.cuda.empty_cache()

    print("\ngrowth, global after, against AdamW fused")
    for millions in (1, 10, 100, 1000, 3000):
        shapes = [(1000, 1000)] * millions if millions <= 100 else [(10000, 10000)] * (millions // 100)
        times = compare(shapes, torch.float32, 7, 20 if millions < 1000 else 5, ["AdamW fused", "global, after"])
        ours, theirs = times["global, after"], times["AdamW fused"]
        results["cases"][f"growth {millions}M"] = {
            "ms": round(ours, 4),
            "AdamW fused ms": round(theirs, 4),
            "ratio": round(ours / theirs, 4),
        }
        print(f"{millions:6} M parameters: {ours:8.3f} ms against {theirs:8.3f}, ratio {ours / theirs:.3f}")
        torch.cuda.empty_cache()

    for title in ("GPT-2 124M", "GPT-2 XL 1.56B"):
        results[f"extra bytes, {title}"] = extra = extra_memory(SHAPES[title])
        print(f"{title}: {extra:,} bytes held beyond what AdamW fused holds")
        torch.cuda.empty_cache()
    results["share of steps with a second pass"] = misses()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
