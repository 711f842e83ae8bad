"""Counts how often the guessed scale of a fused step misses in a training run.

    python benchmarks/guesses.py --json results/guesses.json
    python benchmarks/guesses.py --width 512 --layers 8 --batch 8 --lr 3e-4 --steps 240
    python benchmarks/guesses.py --device cuda --width 768 --layers 12 --batch 128

A guess misses if it is off by more than one unit in the last place of float32: then the step needs
another pass over the weights. The run trains a byte-level GPT on the source of Python's standard
library, and records the scale of every step. From these the misses of two guesses are counted:
the one that the steppers use, in which the fraction 1 - rate of the last change carries over to the
next step, and a straight line, in which all of it does.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import text_table, write
from torch import Tensor

from normcontrol import AdamWN
from normcontrol.lab.training.config import Model
from normcontrol.lab.training.model import GPT
from normcontrol.steppers.stepper import TOLERANCE, next_scale

CONTEXT = 128
RATES = (0.01, 0.1, 1.0)
GUESSES = {"1 - rate of the change": 1.0, "straight line": 0.0}
"""How much of the rate :func:`next_scale` takes into account."""


def batches(device: str, batch: int) -> Iterator[Tensor]:
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device, torch.long)
    within = torch.arange(CONTEXT + 1, device=device)
    while True:
        yield data[torch.randint(len(data) - CONTEXT - 1, (batch, 1), device=device) + within]


def trained(args: argparse.Namespace, rate: float, lr: float) -> tuple[list[float], float]:
    """Train; return the scale of every step and the last loss."""
    torch.manual_seed(0)
    config = Model(args.layers, args.width // 64, args.width, CONTEXT)
    model = GPT.initialised(config, vocab=256).to(args.device)
    opt = AdamWN(model.parameters(), lr, betas=(0.9, 0.95), rate=rate, fused=True)
    scales, loss = [], torch.zeros(())
    for _, tokens in zip(range(args.steps), batches(args.device, args.batch), strict=False):
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        opt.zero_grad()
        loss.backward()
        opt.step()
        scales.append(opt.norms()["global"].scale.item())
    return scales, loss.item()


def misses(scales: list[float], rate: float) -> list[bool]:
    """Return for every step from the third on whether the guess of its scale missed."""
    guesses = [next_scale(scale, last, rate) for last, scale in pairwise(scales)]
    found = zip(guesses, scales[2:], strict=False)
    return [abs(scale / float(torch.tensor(guess)) - 1) > TOLERANCE for guess, scale in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help=f"sequences of {CONTEXT} bytes")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-4, 1e-3])
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    first = args.steps // 3
    rows: list[dict[str, Any]] = []
    for lr in args.lr:
        for rate in RATES:
            scales, loss = trained(args, rate, lr)
            for name, known in GUESSES.items():
                missed = misses(scales, known * rate)
                early, late = (sum(m) / len(m) for m in (missed[:first], missed[first:]))
                found = {"first third": f"{early:.0%}", "rest": f"{late:.0%}"}
                rows.append({"lr": f"{lr:g}", "rate": f"{rate:g}", "guess": name, **found})
            print(f"lr {lr:g}, rate {rate:g}: loss {loss:.3f}", flush=True)
    print(text_table([tuple(rows[0]), *(tuple(row.values()) for row in rows)]))
    write(args.json, rows)


if __name__ == "__main__":
    main()
