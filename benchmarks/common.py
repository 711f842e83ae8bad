"""Code that several benchmarks share: the shapes of a GPT, gradients, a text table, and the JSON
file with the results, the command and the machine. It may not know what is measured.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHIFT = 4096
"""By how many elements two sets of gradients are shifted against each other."""


def gpt_shapes(width: int, layers: int, vocabulary: int) -> list[tuple[int, ...]]:
    """The shapes of the matrices and vectors of nanoGPT's GPT, with biases. A width of 768, 12
    layers and a vocabulary of 50304 are GPT-2 124M: 50 matrices and 98 vectors."""
    d = width
    matrices = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)]
    vectors = [(d,), (d,), (3 * d,), (d,), (d,), (d,), (4 * d,), (d,)]
    blocks = [shape for _ in range(layers) for shape in (*matrices, *vectors)]
    return [(vocabulary, d), (1024, d), *blocks, (d,), (d,)]


def gradients(shapes: Sequence[tuple[int, ...]], sets: int, **options: Any) -> list[list[Tensor]]:
    """Sets of gradients, to be taken in turn: noise, other noise in each set.

    All sets are views of one long tensor, each from another offset on, so that many of them need
    little memory. With a few sets Adam's update repeats itself every few steps, and so does the
    change of the norm, as in no training. With 64 of them a gradient is forgotten when it returns.
    """
    torch.manual_seed(1)
    sizes = [math.prod(shape) for shape in shapes]
    *firsts, end = accumulate((-(-size // 64) * 64 for size in sizes), initial=0)  # aligned
    noise = torch.randn(end + SHIFT * sets, **options) * 1e-3
    return [
        [
            noise[shift + first : shift + first + size].view(shape)
            for first, size, shape in zip(firsts, sizes, shapes, strict=True)
        ]
        for shift in range(0, SHIFT * sets, SHIFT)
    ]


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows with aligned columns: the first two to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def machine() -> dict[str, Any]:
    """The CPU, its load, and the versions of Python and torch."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    # Measured at the end of the benchmark. A load above its own processes and threads means that
    # other programs were running.
    load = os.getloadavg()[0]
    threads = torch.get_num_threads()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": threads, "load": load, **versions}


def write(path: Path | None, results: Any) -> None:
    """Write the results as JSON, if a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        command = " ".join(["python", *sys.argv])
        path.write_text(
            json.dumps({"command": command, "machine": machine(), "results": results}, indent=2)
            + "\n"
        )
