"""Measures the laboratory's training loop on the CPU, with the `tiny` preset, compared with a
minimal torch loop for the same model. It prints the ratio of the times of a step."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

from normcontrol.lab.data import batches
from normcontrol.lab.training import metrics
from normcontrol.lab.training.config import preset
from normcontrol.lab.training.device import Stopwatch
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.model import GPT

STEPS, ROUNDS, VOCAB = 40, 3, 1024


def minimal(config, tokens) -> float:
    """Tokens per second of a minimal loop that trains this model: AdamW, clipping, no logs."""
    model = GPT(config.model, VOCAB)
    model.initialise(0)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rows = config.data.tokens_per_step // config.model.context
    batch_of = batches.Batches([tokens], config.model.context, rows, 0)
    watch, speeds = Stopwatch(), []
    for step in range(STEPS):
        x, y = batch_of(step, slice(0, rows))
        model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        watch.tokens += config.data.tokens_per_step
        if step % 5 == 4:
            speeds.append(watch.lap())
    return statistics.median(speeds[1:])


def lab(config, out: Path) -> float:
    """Tokens per second of the training loop of the laboratory."""
    train(config, out)
    return statistics.median(
        line["tokens_per_second"] for line in metrics.read(out, metrics.TIMING)[1:]
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokens = np.random.default_rng(0).integers(0, VOCAB, 1_000_000).astype("<u2")
        tokens.tofile(folder / "train.bin")
        tokens[:200].tofile(folder / "val.bin")
        config = preset("tiny").with_(
            data=str(folder), steps=STEPS, eval_every=STEPS, checkpoint_every=STEPS, device="cpu"
        )
        # Files of nanoGPT imply the vocabulary of GPT-2. This benchmark uses a smaller one.
        batches.padded = lambda vocab: VOCAB  # type: ignore[assignment]
        pairs = []
        for i in range(ROUNDS):
            ours = lab(config.with_(optimizer="AdamW"), folder / f"adamw-{i}")
            theirs = minimal(config, tokens)
            control = lab(config.with_(optimizer="AdamWN"), folder / f"adamwn-{i}")
            pairs.append((theirs / ours, ours / control))
            print(
                f"minimal loop {theirs:,.0f} tokens/s, lab {ours:,.0f} (AdamW), {control:,.0f} "
                "(AdamWN)"
            )
    step, arm = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"time of a step, lab / minimal loop: {step:.3f} (at most 1.1); AdamWN / AdamW: {arm:.3f}"
    )


if __name__ == "__main__":
    main()
