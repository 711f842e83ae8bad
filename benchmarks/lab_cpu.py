"""A step of the laboratory's `tiny` preset on the CPU against the same model in a bare torch loop:
prints the ratio."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

from normcontrol.lab.data.batches import Batches
from normcontrol.lab.training import metrics
from normcontrol.lab.training.config import preset
from normcontrol.lab.training.device import Stopwatch
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.model import GPT

STEPS, ROUNDS, VOCAB = 40, 3, 1024


def bare(config, tokens) -> float:
    """Tokens a second of the shortest loop that trains this model: AdamW, clipping, no logs."""
    model = GPT(config.model, VOCAB)
    model.initialise(0)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rows = config.data.tokens_per_step // config.model.context
    batches, watch, speeds = Batches([tokens], config.model.context, rows, 0), Stopwatch(), []
    for step in range(STEPS):
        x, y = batches(step, slice(0, rows))
        model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        watch.tokens += config.data.tokens_per_step
        if step % 5 == 4:
            speeds.append(watch.lap())
    return statistics.median(speeds[1:])


def laboratory(config, out: Path) -> float:
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
        # nanoGPT's files mean GPT-2's vocabulary; this one is small, so say so as a manifest would.
        import normcontrol.lab.data.batches as data

        data.padded = lambda vocab: VOCAB  # type: ignore[assignment]
        pairs = []
        for i in range(ROUNDS):
            ours = laboratory(config.with_(optimizer="AdamW"), folder / f"adamw-{i}")
            theirs = bare(config, tokens)
            control = laboratory(config.with_(optimizer="AdamWN"), folder / f"adamwn-{i}")
            pairs.append((theirs / ours, ours / control))
            print(
                f"bare loop {theirs:,.0f} tokens/s, laboratory {ours:,.0f} (AdamW), {control:,.0f} "
                "(AdamWN)"
            )
    step, arm = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"time of a step, laboratory / bare loop: {step:.3f} (at most 1.1); AdamWN / AdamW: "
        f"{arm:.3f}"
    )


if __name__ == "__main__":
    main()
