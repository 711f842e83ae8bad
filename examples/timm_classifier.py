"""timm: a small vision transformer learns to tell stripes apart, with timm's groups, scheduler,
checkpoints and resume.

    python examples/timm_classifier.py --out runs/stripes
    python examples/timm_classifier.py --out runs/stripes --resume runs/stripes/last.pth.tar

It follows timm's train.py, with ``opt="adamwn"`` for ``opt="adamw"``; images are made on the spot.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import timm
import torch
from timm.models import resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver
from torch import Tensor, nn

import normcontrol.integrations.timm
from normcontrol.watch.trackers import values

UPDATES = 20  # an epoch


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Stripes that run down, across, or along either diagonal, in noise: a pure function of the
    batch's number."""
    made = torch.Generator().manual_seed(number)
    labels = torch.randint(4, (16,), generator=made)
    x, y = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    kinds = torch.stack([x, y, (x + y) / 2**0.5, (x - y) / 2**0.5]).sin()
    return kinds[labels, None].expand(-1, 3, -1, -1) + 0.5 * torch.randn(
        16, 3, 32, 32, generator=made
    ), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/stripes"))
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        num_classes=4,
    )
    total = args.epochs * UPDATES
    ratio = normcontrol.linear(1, 1.5, steps=0.25 * total)
    optimizer = create_optimizer_v2(
        model, opt="adamwn", lr=3e-3, weight_decay=0.05, ratio=ratio, rate=0.1
    )
    print(optimizer.report().splitlines()[0])

    schedule = {
        "sched": "cosine",
        "warmup_epochs": 1,
        "warmup_lr": 1e-6,
        "step_on_epochs": False,
        "updates_per_epoch": UPDATES,
    }
    scheduler, epochs = create_scheduler_v2(optimizer, num_epochs=args.epochs, **schedule)
    first = 0
    if args.resume:
        first = resume_checkpoint(model, str(args.resume), optimizer)
        scheduler.step_update(first * UPDATES)
    saver = CheckpointSaver(
        model, optimizer, checkpoint_dir=str(args.out), recovery_dir=str(args.out)
    )

    for epoch in range(first, epochs):
        for update in range(epoch * UPDATES, (epoch + 1) * UPDATES):
            images, labels = batch(update)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step_update(update + 1)
        norm = values(optimizer)
        print(
            f"epoch {epoch}: loss {loss:.4f}, norm {norm['norm/global']:.6f}, target "
            f"{norm['norm/global/target']:.6f}"
        )
        saver.save_checkpoint(epoch, metric=-loss.item())


if __name__ == "__main__":
    main()
