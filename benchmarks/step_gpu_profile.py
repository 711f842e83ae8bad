"""Profiles the Python code or the kernels of a step. ``benchmarks/step_gpu.py`` calls it.

A step of a small model takes as long as Python needs to launch it. The profiler slows Python down,
so the times show where it goes; how long a step takes is said first, without the profiler. A step
of a large model takes as long as its kernels.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiled

STEPS = 2000


def profile(name: str, step: Callable[[], Any], before: Callable[[], Any]) -> None:
    """Print the functions of a step that take most time of their own; ``before`` is not timed."""
    for _ in range(200):
        before()
        step()
    taken = 0.0
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    for _ in range(STEPS):
        before()
        wait()
        start = time.perf_counter()
        step()
        taken += time.perf_counter() - start
    print(f"\n{name}: {taken / STEPS * 1e6:.1f} us of Python in a step, then {STEPS} with cProfile")
    profiler = cProfile.Profile()
    for _ in range(STEPS):
        before()
        profiler.enable()
        step()
        profiler.disable()
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text)
    stats.strip_dirs().sort_stats("tottime").print_stats(40)
    print(text.getvalue())


def kernels(name: str, step: Callable[[], Any], steps: int = 50) -> None:
    """Print the mean time of every kernel in a step, when control has settled."""
    for _ in range(300):
        step()
    torch.cuda.synchronize()
    with profiled(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    print(f"\n{name}: microseconds of each kernel in a step")
    for e in sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total):
        if e.self_device_time_total > 0:
            total, each = (e.self_device_time_total / n for n in (steps, e.count))
            print(f"{total:9.1f}  {e.count / steps:5.2f} x {each:8.1f}  {e.key[:70]}")
