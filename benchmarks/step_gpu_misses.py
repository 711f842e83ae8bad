"""Counts how often the guessed factor of the fused step is wrong in a training run on the GPU.

A guess is wrong if it is off by more than one unit in the last place: then the step needs another
pass over the weights. The run trains a byte-level GPT of 26M parameters on the source of Python's
standard library. ``benchmarks/step_gpu.py`` calls it.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from normcontrol import AdamWN, linear


def misses(steps: int = 600) -> dict[str, float]:
    """Train at two rates, and return the fraction of steps with a wrong guess for each, without the
    first third of the steps."""
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to("cuda", torch.long)
    width, layers, context = 512, 8, 256
    fractions = {}
    for rate in (1e-2, 1e-1):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, 0.0, nn.functional.gelu, batch_first=True, norm_first=True
        )
        model = nn.ModuleDict(
            {
                "in": nn.Embedding(256, width),
                "at": nn.Embedding(context, width),
                "body": nn.TransformerEncoder(layer, layers),
            }
        )
        model["out"] = nn.Linear(width, 256, bias=False)
        for p in model.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        model = model.cuda()
        opt = AdamWN(
            model.parameters(),
            lr=1e-3,
            betas=(0.9, 0.95),
            ratio=linear(1.0, 2.0, steps=50),
            rate=rate,
            max_grad_norm=1.0,
        )
        mask = nn.Transformer.generate_square_subsequent_mask(context, device="cuda")
        missed = []
        for _ in range(steps):
            at = torch.randint(len(data) - context - 1, (64, 1), device="cuda") + torch.arange(
                context + 1, device="cuda"
            )
            tokens = data[at]
            with torch.autocast("cuda", torch.bfloat16):
                hidden = model["in"](tokens[:, :-1]) + model["at"].weight
                logits = model["out"](model["body"](hidden, mask, is_causal=True))
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            missed.append(opt.stepper.plan.needed.clone())
        late = torch.stack(missed[steps // 3 :]).float().mean().item()
        early = torch.stack(missed[: steps // 3]).float().mean().item()
        fractions[f"rate {rate:g}"] = late
        print(
            f"rate {rate:g}: second pass in {early:.1%} of the first {steps // 3} steps, "
            f"{late:.1%} of the rest; loss {loss.item():.3f}"
        )
    return fractions
