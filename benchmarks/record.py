"""What benchmarks write beside their numbers: the command, and the machine."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    load = os.getloadavg()[
        0
    ]  # at the end: what is above the benchmark's own processes and threads was somebody else's
    threads = torch.get_num_threads()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": threads, "load": load, **versions}


def write(path: Path | None, results: Any) -> None:
    """The results as JSON, if somebody wants them."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        command = " ".join(["python", *sys.argv])
        path.write_text(
            json.dumps({"command": command, "machine": machine(), "results": results}, indent=2)
            + "\n"
        )
