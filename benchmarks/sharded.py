"""Measures the cost of norm control under sharding: collectives and time per step on 4 gloo
processes, compared with torch's AdamW.

Every process has its rows of a GPT as DTensors, as under FSDP2. AdamW and AdamWN step in turn on
the same shards, and all processes start each step together. Norm control adds a pass that measures,
a pass that multiplies, and an all-reduce of one number per tensor. Each of them is also timed
alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import gpt_shapes, text_table, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from normcontrol import AdamWN
from normcontrol.scope import SCOPES
from normcontrol.weights.passes import measure

RANKS = 4


def timed(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each function, called in turn, from a common start until the slowest
    rank is done."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 2):
        for name in functions if repeat % 2 else reversed(functions):
            dist.barrier()
            start = time.perf_counter()
            functions[name]()
            if repeat >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    slowest = torch.tensor(list(times.values()))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {
        name: statistics.median(row) for name, row in zip(functions, slowest.tolist(), strict=True)
    }


def collectives(opt: torch.optim.Optimizer) -> int:
    """The number of collectives in a step."""
    with CommDebugMode() as comm:
        opt.step()
    return comm.get_total_counts()


def measure_on_rank(rank: int, folder: str, shapes: list[tuple[int, ...]], repeats: int) -> None:
    """Measure in one of the processes. Rank 0 writes the result to the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    params = [
        nn.Parameter(distribute_tensor(0.02 * torch.randn(shape), mesh, [Shard(0)]))
        for shape in shapes
    ]
    for p in params:
        p.grad = distribute_tensor(1e-3 * torch.randn(p.shape), mesh, [Shard(0)])

    def groups() -> list[dict[str, Any]]:
        """nanoGPT's two groups: matrices, and vectors without decay."""
        return [
            {"params": [p for p in params if p.dim() > 1]},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]

    opts: dict[str, Any] = {
        "AdamW": torch.optim.AdamW(groups(), lr=1e-6, weight_decay=0.1, foreach=True)
    }
    for scope in ("global", "tensor", "row"):
        opts[f"AdamWN {scope}"] = AdamWN(
            groups(), lr=1e-6, weight_decay=0.1, ratio=1.0, scope=scope, foreach=True
        )
    for opt in opts.values():  # creates the state and stores the reference norms
        opt.step()
    counts = {name: collectives(opt) for name, opt in opts.items()}

    pieces = [p.to_local() for p in params if p.dim() > 1]
    numbers = torch.zeros(len(pieces), dtype=torch.float64)
    factor = torch.tensor(1.0)
    alone: dict[str, Callable[[], Any]] = {
        "measuring alone": lambda: measure(pieces, SCOPES["global"]),
        "all-reduce alone": lambda: dist.all_reduce(numbers),
        "multiplying alone": lambda: torch._foreach_mul_(pieces, factor),
    }
    with torch.no_grad():
        times = timed({**{name: opt.step for name, opt in opts.items()}, **alone}, repeats)
    if rank == 0:
        weights = {
            "weights": sum(p.numel() for p in params),
            "held": sum(p.to_local().numel() for p in params),
            "tensors": len(params),
        }
        Path(folder, "result").write_text(
            json.dumps({**weights, "numbers_sent": len(pieces), "collectives": counts, "ms": times})
        )
    dist.destroy_process_group()


def run(case: str, shapes: list[tuple[int, ...]], repeats: int) -> dict[str, Any]:
    """Measure one case on all processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure_on_rank, (folder, shapes, repeats), RANKS)
        result = json.loads(Path(folder, "result").read_text())
    ratios = {
        name: ms / result["ms"]["AdamW"]
        for name, ms in result["ms"].items()
        if name.startswith("AdamWN")
    }
    return {"case": case, **result, "ratios": ratios, "repeats": repeats}


def table(results: list[dict[str, Any]]) -> str:
    """The results as a text table."""
    rows = [("case", "step", "collectives", "ms", "ratio")]
    for r in results:
        for name, ms in r["ms"].items():
            ratio = r["ratios"].get(name)
            rows.append(
                (
                    r["case"],
                    name,
                    str(r["collectives"].get(name, "")),
                    f"{ms:.2f}",
                    "" if ratio is None else f"{ratio:.2f}",
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
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    if args.short:
        results = [run("small", gpt_shapes(16, 1, 64), 3)]
    else:
        results = [
            run("GPT 10M", gpt_shapes(256, 8, 16384), args.repeats),
            run("GPT 86M", gpt_shapes(768, 9, 29000), args.repeats),
        ]
    print(table(results))
    write(args.json, results)


if __name__ == "__main__":
    main()
