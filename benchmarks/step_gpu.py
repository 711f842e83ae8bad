"""Measures steps under norm control on the GPU, each beside its peer without control, in one run.

    python benchmarks/step_gpu.py --json results/step_gpu.json
    python benchmarks/step_gpu.py --rate 0.1 --json results/step_gpu_rate_0.1.json

The first is at the paper's rate, the second at the default one, where fewer guesses are right.

Every row is a ratio of medians over interleaved rounds. The gradients differ at every step, as in
training, and become ``p.grad`` within the time of both contenders (``swap`` says how long that
takes). With constant gradients every guess of a scale would be right; with a few sets in turn the
norm would change in a cycle, as in no training. So large models have 64 sets. Where launches are
the limit there are four, because training finds most gradients at addresses of earlier ones. Before
they are timed the optimizers step until control has settled: while a target starts to move, more
guesses are wrong. ``benchmarks/guesses.py`` counts them in a training run.

Beside the ratio stands a limit: the time that the bytes alone need at the speed of a copy. Adam
moves 28 bytes per float32 weight (reads p, g, m, v; writes p, m, v), SGD with momentum 20. AdamWN
moves the same if the guessed factor is right; a second pass reads and writes p once more, 8 bytes.
``order="before"`` reads p once more, 4 bytes. ``NormControl`` adds 12 to what its peer takes: it
reads, then reads and writes; rows are read and written once, 8; with ``size="spectral"`` the
weights are read twice to be measured, 16. Clipping reads the gradients once more, 4 bytes;
``clip_grad_norm_`` reads them twice and writes them. Where Python and launches are the limit, there
is none here.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import triton
from common import gpt_shapes, gradients
from step_gpu_profile import kernels, profile
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from normcontrol import AdamWN, NormControl, linear
from normcontrol.steppers import tables

RATIO = linear(1.0, 2.0, steps=2500)
CONTROL: dict[str, Any] = {"ratio": RATIO, "rate": 0.01}
SPECTRAL = {"size": "spectral", "scope": "tensor"}
LAUNCH_BOUND = ("1M", "10M", "1,000 x 1,000")
Shapes = list[tuple[int, ...]]
Params = list[nn.Parameter]
Step = Callable[[], Any]
MODELS: dict[str, Shapes] = {
    "124M": gpt_shapes(768, 12, 50257),
    "XL": gpt_shapes(1600, 48, 50257),
    "1M": gpt_shapes(128, 4, 1024),
    "10M": gpt_shapes(384, 5, 1024),
    "1,000 x 1,000": [(20, 50)] * 1000,
    "12 x 1,024": [(1024, 1024)] * 12,
}


def adamw(params: Params, **options: Any) -> AdamW:
    return AdamW(params, lr=1e-4, fused=True, **{"weight_decay": 0.1, **options})


def adam_fused(params: Params) -> AdamW:
    return adamw(params, weight_decay=0.0)


def sgd(params: Params) -> SGD:
    return SGD(params, lr=1e-4, momentum=0.9, fused=True)


def adamw_step(params: Params) -> Step:
    return adamw(params).step


def sgd_step(params: Params) -> Step:
    return sgd(params).step


def clipped_step(params: Params) -> Step:
    optimizer = adamw(params)

    def step() -> None:
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return step


def ours(**settings: Any) -> Callable[[Params], Step]:
    return lambda params: AdamWN(params, **{"lr": 1e-4, **CONTROL, **settings}).step


def around(make: Callable[[Params], Any], **settings: Any) -> Callable[[Params], Step]:
    return lambda params: NormControl(make(params), **{**CONTROL, **settings}).step


def captured(make: Callable[[Params], torch.optim.Optimizer]) -> Callable[[Params], Step]:
    """A step in a CUDA graph: its gradients are copied to where the graph reads them."""

    def build(params: Params) -> Step:
        static = [torch.zeros_like(p) for p in params]

        def copy_gradients() -> None:
            torch._foreach_copy_(static, [p.grad for p in params])

        optimizer = make(params)
        given = [p.grad for p in params]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        copy_gradients()
        with torch.cuda.stream(aside):
            for p, grad in zip(params, static, strict=True):
                p.grad = grad
            for _ in range(3):
                optimizer.step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        for p, grad in zip(params, given, strict=True):
            p.grad = grad

        def step(kept: Any = optimizer) -> None:  # the graph uses the memory of the optimizer
            copy_gradients()
            graph.replay()

        return step

    return build


@dataclass(frozen=True)
class Case:
    """A contender, its peer, and the bytes per float32 weight that bound it."""

    name: str
    model: str
    make: Callable[[Params], Step]
    goal: float | None = None
    moved: int | None = None
    """The bytes that the whole step moves per weight of four bytes."""
    added: int | None = None
    """Or those that it moves in addition to the peer."""
    peer: Callable[[Params], Step] = adamw_step
    dtype: torch.dtype = torch.float32


CASES = [
    Case("global, after", "124M", ours(), 0.84, 28),
    Case("global, before", "124M", ours(order="before"), 0.84, 32),
    Case("tensor scope", "124M", ours(scope="tensor"), 0.95, 28),
    Case("row scope", "124M", ours(scope="row"), 1.25, 36),
    Case("rate 0.1, ratio 1", "124M", ours(rate=0.1, ratio=1.0), 1.00, 36),
    Case("rate 1, ratio 1", "124M", ours(rate=1.0, ratio=1.0), 1.05, 36),
    Case("clipping, after", "124M", ours(max_grad_norm=1.0), 0.64, 32, peer=clipped_step),
    Case(
        "clipping, before", "124M", ours(max_grad_norm=1.0, order="before"), 0.64, 36,
        peer=clipped_step,
    ),
    Case("NormControl(AdamW)", "124M", around(adam_fused), 1.38, added=12),
    Case("NormControl(SGD, momentum)", "124M", around(sgd), 1.55, added=12, peer=sgd_step),
    Case(
        "NormControl(SGD, momentum), row scope", "124M", around(sgd, scope="row"), None, added=8,
        peer=sgd_step,
    ),
    Case("bf16, after", "124M", ours(), 0.95, 28, dtype=torch.bfloat16),
    Case("bf16, before", "124M", ours(order="before"), None, 32, dtype=torch.bfloat16),
    Case(
        "bf16, NormControl(AdamW)", "124M", around(adam_fused), added=12, dtype=torch.bfloat16
    ),
    Case("1,000 tensors of 1,000", "1,000 x 1,000", ours(), 0.60),
    Case("1M weights", "1M", ours(), 1.4),
    Case("10M weights", "10M", ours(), 1.2),
    Case("1M weights, tensor scope", "1M", ours(scope="tensor")),
    Case("1M weights, NormControl(AdamW)", "1M", around(adam_fused)),
    Case(
        "1M weights, CUDA graph", "1M",
        captured(lambda p: AdamWN(p, lr=1e-4, capturable=True, **CONTROL)),
        peer=captured(lambda p: adamw(p, capturable=True)),
    ),
    Case("global, after", "XL", ours(), 0.84, 28),
    Case("NormControl(AdamW)", "XL", around(adam_fused), added=12),
    Case("size='spectral'", "124M", around(adam_fused, **SPECTRAL), 3.0, added=16),
    Case("size='spectral'", "12 x 1,024", around(adam_fused, **SPECTRAL), 3.0, added=16),
]  # fmt: skip
"""Every case with a number in the performance budget, and some beside them."""


def parameters(shapes: Shapes, dtype: torch.dtype) -> Params:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s, device="cuda", dtype=dtype) * 0.02) for s in shapes]


def gradients_for(case: Case) -> list[list[Tensor]]:
    """The gradients of a case: see above for how many sets there are."""
    shapes = MODELS[case.model]
    sets = 4 if case.model in LAUNCH_BOUND else 64
    return gradients(shapes, sets, device="cuda", dtype=case.dtype)


def fresh(params: Params, sets: Iterator[list[Tensor]]) -> None:
    """Give the parameters their next gradients."""
    for p, grad in zip(params, next(sets), strict=True):
        p.grad = grad


class Trained:
    """Steps with new gradients, of parameters of its own."""

    def __init__(self, make: Callable[[Params], Step], case: Case, grads: list[list[Tensor]]):
        self.params, self.sets = parameters(MODELS[case.model], case.dtype), cycle(grads)
        fresh(self.params, self.sets)
        self.step = make(self.params)

    def __call__(self) -> None:
        fresh(self.params, self.sets)
        self.step()

    def second_passes(self, steps: int = 128) -> float | None:
        """The fraction of steps that had to correct a guess; None if nothing is guessed."""
        optimizer = getattr(self.step, "__self__", None)
        plan = getattr(getattr(optimizer, "stepper", None), "plan", None)
        if plan is None or not all(s in plan.slots and s.order == "after" for s in optimizer.sets):
            return None
        needed = []
        for _ in range(steps):
            self()
            needed.append(plan.parts.needed.clone())
        return torch.stack(needed).float().mean().item()


def interleaved(
    steps: dict[str, Step], rounds: int, inner: int, warm_up: int = 300
) -> dict[str, list[float]]:
    """Milliseconds per step of each function in every round. The rounds are taken in turn, so that
    a change of the GPU's speed affects all of them."""
    for step in steps.values():
        for _ in range(warm_up):
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
    return times


def measure(case: Case, bandwidth: float) -> dict[str, Any]:
    """Time a case and its peer in turn, each with its own parameters and the same gradients."""
    shapes = MODELS[case.model]
    grads = gradients_for(case)
    params, sets = parameters(shapes, case.dtype), cycle(grads)
    peer, contender = (Trained(make, case, grads) for make in (case.peer, case.make))
    steps = {"swap": lambda: fresh(params, sets), "peer": peer, "ours": contender}
    is_large = case.model == "XL"
    times = interleaved(steps, 11, 8 if is_large else 40)
    ms = {name: statistics.median(of_rounds) for name, of_rounds in times.items()}
    ratios = [a / b for a, b in zip(times["ours"], times["peer"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    weights = sum(torch.Size(s).numel() for s in shapes)
    per_byte = weights * case.dtype.itemsize / 4 / (bandwidth * 1e9)  # milliseconds
    limit = None
    if case.moved is not None:
        limit = case.moved * per_byte
    elif case.added is not None:
        limit = ms["peer"] + case.added * per_byte
    return {
        "ratio": round(ms["ours"] / ms["peer"], 4),
        "spread": round(high - low, 4),
        "second_passes": contender.second_passes(),
        "goal": case.goal,
        "limit": limit and round(limit / ms["peer"], 4),
        "ms": round(ms["ours"], 4),
        "peer_ms": round(ms["peer"], 4),
        "limit_ms": limit and round(limit, 4),
        "swap_ms": round(ms["swap"], 4),
        "weights": weights,
        "tensors": len(shapes),
    }


def copy_bandwidth() -> float:
    """Terabytes per second that a copy on the device reads and writes."""
    a = torch.empty(1 << 30, device="cuda", dtype=torch.float32)
    b = torch.empty_like(a)
    times = interleaved({"copy": lambda: b.copy_(a)}, 5, 5, warm_up=10)["copy"]
    return 2 * a.nbytes / statistics.median(times) / 1e9


def extra_memory(shapes: Shapes) -> int:
    """Bytes of memory that AdamWN uses after a few steps beyond those of torch's fused AdamW."""
    params = parameters(shapes, torch.float32)
    for p in params:
        p.grad = torch.randn_like(p)
    used = []
    for make in (adamw, lambda params: AdamWN(params, ratio=RATIO, max_grad_norm=1.0)):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        opt = make(params)
        for _ in range(3):
            opt.step()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated() - before)
        del opt
    return used[1] - used[0]


def tune() -> None:
    """Time the kernels with several block sizes, warps and blocks per chunk."""
    case = CASES[0]
    grads = gradients_for(case)
    base = statistics.median(interleaved({"": Trained(case.peer, case, grads)}, 10, 10)[""])
    print(f"AdamW fused {base:.3f} ms")
    for block, warps, blocks in [
        (b, w, c) for b in (512, 1024, 2048, 4096) for w in (4, 8) for c in (1, 2, 4, 8, 16)
    ]:
        if block * blocks > 32768 or block // (32 * warps) > 16:
            continue
        tables.BLOCK, tables.WARPS, tables.BLOCKS_A_CHUNK = block, warps, blocks
        steps = {order: Trained(ours(order=order), case, grads) for order in ("before", "after")}
        got = {name: statistics.median(t) for name, t in interleaved(steps, 7, 10).items()}
        print(
            f"block {block:5} warps {warps} blocks {blocks:3}: "
            + "  ".join(f"{k} {v:.3f} ({v / base:.3f})" for k, v in got.items()),
            flush=True,
        )


def measure_cases(bandwidth: float, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure and print the cases whose model and name contain a text."""
    print(f"{'':46}{'ratio':>7}{'spread':>8}{'2nd':>6}{'goal':>6}{'limit':>7}{'ms':>9}{'peer':>9}")
    for case in CASES:
        title = f"{case.model}: {case.name}"
        if only not in title:
            continue
        try:
            row = measure(case, bandwidth)
        except Exception as error:  # the other cases are worth having
            row = {"error": f"{type(error).__name__}: {error}"}
        finally:
            torch.cuda.empty_cache()
        if "error" in row:
            print(f"{title:46}{row['error']}", flush=True)
        else:
            second = "" if row["second_passes"] is None else f"{row['second_passes']:.0%}"
            goal, limit = (f"{x:.2f}" if x else "" for x in (row["goal"], row["limit"]))
            print(
                f"{title:46}{row['ratio']:7.3f}{row['spread']:8.3f}{second:>6}{goal:>6}{limit:>7}"
                f"{row['ms']:9.4f}{row['peer_ms']:9.4f}",
                flush=True,
            )
        yield title, row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rate", type=float, default=0.01, help="of cases that name none")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose title has this")
    parser.add_argument("--tune", action="store_true", help="try several shapes of blocks")
    parser.add_argument("--profile", action="store_true", help="profile Python in small steps")
    parser.add_argument("--kernels", metavar="TEXT", help="the time of every kernel of such cases")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device.")
    warnings.simplefilter("ignore")
    CONTROL["rate"] = args.rate
    if args.tune:
        return tune()
    if args.profile:
        optimizers = {
            "AdamWN": ours(),
            "NormControl(AdamW(fused=True))": around(adam_fused),
        }
        case = next(case for case in CASES if case.model == "1M")
        for name, make in optimizers.items():
            t = Trained(make, case, gradients_for(case))
            profile(name, t.step, partial(fresh, t.params, t.sets))
        return None
    if args.kernels:
        for case in CASES:
            if args.kernels in f"{case.model}: {case.name}":
                kernels(case.name, Trained(case.make, case, gradients_for(case)))
        return None

    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    print(f"{machine}; device copy {bandwidth:.2f} TB/s")
    command = " ".join(["python", *sys.argv])
    results: dict[str, Any] = {"command": command, "machine": machine, "copy_TB_per_s": bandwidth}

    def write() -> None:
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")

    results["cases"] = {}
    for title, row in measure_cases(bandwidth, args.only):
        results["cases"][title] = row
        write()  # what is measured stays, if the run is stopped
    if not args.only:
        results["extra_bytes"] = {m: extra_memory(MODELS[m]) for m in ("124M", "XL")}
        print(f"bytes more than AdamW fused uses: {results['extra_bytes']}")
        write()


if __name__ == "__main__":
    main()
