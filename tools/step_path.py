"""Print what one step goes through: our own files, changes of file, and calls.

A step that visits few files is a step that a reader can follow. Run it for the three steppers:

    python tools/step_path.py            # plain, then folded
    TRITON_INTERPRET=1 python tools/step_path.py

``--calls`` lists the calls. Code that runs in a Triton kernel is not counted: on a GPU it is not
Python. Comprehensions count as calls where Python makes a frame for them (before 3.12).
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

import normcontrol
from normcontrol import AdamWN
from normcontrol.steppers import folded

HOME = Path(normcontrol.__file__).parent


class StepPath(NamedTuple):
    """The calls of one step, as (file, function), in their order."""

    calls: list[tuple[str, str]]

    @property
    def files(self) -> int:
        return len({file for file, _ in self.calls})

    @property
    def changes(self) -> int:
        files = [file for file, _ in self.calls]
        return sum(a != b for a, b in pairwise(files))

    def __str__(self) -> str:
        return f"{self.files} files, {self.changes} changes of file, {len(self.calls)} calls"


def trace_step(**settings: Any) -> tuple[str, StepPath]:
    """Train a small network for a few steps, then trace one; return what ran the step, too."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    model = torch.nn.Sequential(*layers)
    opt = AdamWN(model.parameters(), **settings)
    calls: list[tuple[str, str]] = []

    def record(frame: Any, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        in_kernel = "kernels" in file.name or f"{os.sep}triton{os.sep}" in caller
        if event == "call" and HOME in file.parents and not in_kernel:
            calls.append((str(file.relative_to(HOME)), frame.f_code.co_name))

    for step in range(6):
        opt.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        sys.setprofile(record if step == 5 else None)
        opt.step()
        sys.setprofile(None)
    return type(opt.stepper).__name__, StepPath(calls)


def main() -> None:
    folded.FEWEST = 0  # the network is small
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for settings in [{}] if interpreted else [{}, {"fused": True}]:
        stepper, path = trace_step(**settings)
        print(f"{stepper}: {path}")
        if "--calls" in sys.argv:
            print("\n".join(f"  {file:24} {function}" for file, function in path.calls))


if __name__ == "__main__":
    main()
