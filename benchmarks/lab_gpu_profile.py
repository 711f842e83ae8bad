"""Profiles a training step of the laboratory's model on a GPU: where its time goes, by kind of
work, and the speed of its matrix products by shape.

    python benchmarks/lab_gpu_profile.py [--preset gpt2] [--micro-batch 64] [--bf16-stream]
        [--torch-gelu] [--top 30]

The options of torch's compiler can be changed by its environment variables, for example
TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1.
"""

from __future__ import annotations

import argparse
import collections
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from normcontrol import AdamWN
from normcontrol.lab.training import model as model_module
from normcontrol.lab.training.config import preset
from normcontrol.lab.training.device import choose, fast_kernels
from normcontrol.lab.training.model import GPT

VOCAB = 50304
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "cudnn"),
    "products": ("gemm", "nvjet", "cutlass", "splitk", "matmul"),
    "GELU": ("gelu", "erf"),
    "LayerNorm": ("layer_norm", "native_layer"),
    "loss": ("row_kernel", "row_losses"),
    "optimizer": ("adam", "multi_tensor", "foreach", "finish_norms", "settle", "scale", "prepare"),
    "copies": ("copy", "cat", "transpose", "memcpy", "memset"),
}
"""Kinds of work, and what the names of their kernels contain. The first kind that fits counts."""


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((k for k, parts in KINDS.items() if any(p in lower for p in parts)), "other")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--bf16-stream", action="store_true")
    parser.add_argument("--torch-gelu", action="store_true")
    parser.add_argument("--top", type=int, default=30)
    arguments = parser.parse_args()
    if arguments.torch_gelu:
        model_module.gelu = F.gelu  # type: ignore[attr-defined]
    config = preset(arguments.preset).with_(bf16_stream=arguments.bf16_stream).model
    device = choose("cuda")
    model = GPT.initialised(config, VOCAB).to(device)
    network: Any = torch.compile(model, dynamic=False)
    optimizer = AdamWN(model.parameters(), lr=1e-4)
    shape = (arguments.micro_batch, config.context)
    tokens, targets = (torch.randint(0, 50257, shape, device=device) for _ in range(2))

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = network(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    with fast_kernels(device):
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            step()
        torch.cuda.synchronize()
        print(f"{vars(arguments)}: {(time.perf_counter() - start) / 20 * 1e3:.2f} ms a step")
        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True
        ) as profiled:
            for _ in range(3):
                step()
            torch.cuda.synchronize()

    kernels: dict[str, float] = collections.defaultdict(float)
    counts: dict[str, int] = collections.defaultdict(int)
    for event in profiled.events():
        named_by_host = event.name.startswith(("##", "Optimizer."))  # spans over many kernels
        if event.device_type == torch.autograd.DeviceType.CUDA and not named_by_host:
            kernels[event.name] += event.device_time / 3e3
            counts[event.name] += 1
    kinds: dict[str, float] = collections.defaultdict(float)
    for name, milliseconds in kernels.items():
        kinds[kind_of(name)] += milliseconds
    for kind, milliseconds in sorted(kinds.items(), key=lambda item: -item[1]):
        print(f"{milliseconds:8.2f} ms  {kind}")
    for name, milliseconds in sorted(kernels.items(), key=lambda item: -item[1])[: arguments.top]:
        print(f"{milliseconds:8.3f} ms  {counts[name] // 3:4d} x  {name[:110]}")
    for entry in profiled.key_averages(group_by_input_shape=True):
        if entry.key in ("aten::mm", "aten::addmm") and entry.device_time_total:
            first = 0 if entry.key == "aten::mm" else 1  # addmm has the bias before the matrices
            (a, b), (_, c) = entry.input_shapes[first : first + 2]
            speed = 2 * a * b * c * entry.count / (entry.device_time_total * 1e-6) / 1e12
            print(f"{entry.device_time_total / 3e3:8.3f} ms  {a} x {b} x {c}: {speed:.0f} TFLOP/s")


if __name__ == "__main__":
    main()
