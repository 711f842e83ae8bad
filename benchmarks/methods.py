"""Measures a step of every published method, compared with torch's fused AdamW in one run.

    python benchmarks/methods.py [--device cuda] [--json results/methods_cpu.json]

It prints the time of the step divided by that of AdamW. The weights are hidden matrices of a GPT:
24 of 512 x 512 and 12 of 2048 x 512 on a CPU, those of GPT-2 124M on a GPU. A method takes longer
than AdamW if it measures norms in a separate pass, keeps a copy of the weights, or multiplies
matrices.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normcontrol.methods import METHODS

SHAPES = {
    "cpu": [(512, 512)] * 24 + [(2048, 512)] * 12,
    "cuda": [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12,
}


def parameters(device: str) -> list[nn.Parameter]:
    """Random weights with gradients."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in SHAPES[device]]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    return params


def step_of(name: str, device: str) -> Any:
    """A function that makes one step of the method, with its own weights."""
    if name == "AdamW fused":
        return torch.optim.AdamW(parameters(device), lr=1e-3, fused=True).step
    params: Any = parameters(device)
    if METHODS[name].takes_model:
        params = nn.ParameterList(params)
        model = nn.Sequential(
            *(nn.Linear(p.shape[1], p.shape[0], bias=False, device=device) for p in params)
        )
        optimizers = METHODS[name](model, lr=1e-3)
        for p in model.parameters():
            p.grad = torch.randn_like(p) * 1e-3
    else:
        groups = [{"params": params, "controlled": True}]
        settings = {
            "lr": 1e-3,
            "weight_decay": 0.1,
            "fused": True,
            "largest_logits": lambda p: torch.ones(8, device=p.device),
        }
        optimizers = METHODS[name](groups, **settings)
    return lambda: [opt.step() for opt in optimizers]


def seconds(step: Any, device: str, inner: int) -> float:
    """The mean time of ``inner`` steps."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(inner):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / inner


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    ratios = {}
    for name in METHODS:
        ours, theirs = step_of(name, arguments.device), step_of("AdamW fused", arguments.device)
        slow = name in ("MuonH", "Muown")  # products of matrices
        rounds = 3 if slow else arguments.repeats
        inner = 1 if arguments.device == "cpu" or slow else 10
        for step in (ours, theirs):
            for _ in range(1 if slow else 12):
                step()
        pairs = [
            (seconds(ours, arguments.device, inner), seconds(theirs, arguments.device, inner))
            for _ in range(rounds)
        ]
        ratios[name] = statistics.median(a for a, _ in pairs) / statistics.median(
            b for _, b in pairs
        )
        print(f"{name:14} {ratios[name]:8.2f}", flush=True)
    if arguments.json:
        gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else None
        machine = {
            "device": gpu or platform.processor() or platform.machine(),
            "torch": torch.__version__,
        }
        command = (
            f"python benchmarks/methods.py --device {arguments.device} --json {arguments.json}"
        )
        rounded = {name: round(ratio, 3) for name, ratio in ratios.items()}
        arguments.json.write_text(
            json.dumps({"command": command, "machine": machine, "ratios": rounded}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
