"""A small GPT, sharded with FSDP2: the same weights on 1, 2 and 4 processes.

    torchrun --nproc-per-node 4 examples/sharded_gpt.py   # CPUs with gloo, or 4 GPUs with NCCL
    python examples/sharded_gpt.py                        # one process: the same last line

With ``--checkpoint FOLDER`` it saves to that folder every ten steps, and continues from the last
checkpoint in it. The number of processes may change between the two.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from normcontrol import AdamWN, linear

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 32, 64, 4, 2, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        x = x + self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128, bias=False)
        self.head.weight = self.words.weight  # tied: it counts once in the norm
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(text: Tensor, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of the batch. The whole batch is a function of the step alone."""
    starts = torch.randint(
        len(text) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(step)
    ).chunk(ranks)[rank]
    pieces = torch.stack([text[s : s + CONTEXT + 1] for s in starts])
    return pieces[:, :-1], pieces[:, 1:]


def start_processes() -> tuple[torch.device, int, int]:
    """Join the process group of torchrun, if there is one. Returns the device, the rank and the
    number of ranks."""
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cpu")
    if enough:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:  # not started by torchrun
        return device, 0, 1
    dist.init_process_group("nccl" if enough else "gloo")
    return device, dist.get_rank(), dist.get_world_size()


def save(model: nn.Module, opt: AdamWN, folder: Path) -> None:
    weights, state = get_state_dict(model, opt)
    dcp.save({"model": weights, "opt": state}, checkpoint_id=folder)


def load_last(model: nn.Module, opt: AdamWN, folder: Path) -> int:
    """Load the last checkpoint of the folder and return its step, or 0 if there is none."""
    saved = [int(path.name) for path in folder.glob("*") if (path / ".metadata").exists()]
    if not saved:
        return 0
    weights, state = get_state_dict(model, opt)
    dcp.load({"model": weights, "opt": state}, checkpoint_id=folder / str(max(saved)))
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)
    return max(saved)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()

    device, rank, ranks = start_processes()
    source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long().clamp(max=127)
    torch.manual_seed(0)  # every rank makes the same weights, and then keeps its shard of them
    model = GPT().to(device)
    if dist.is_initialized():
        mesh = init_device_mesh(device.type, (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    # Construct the optimizer after fully_shard. Sharding needs no other setting.
    opt = AdamWN(model.parameters(), lr=3e-3, ratio=linear(1, 2, steps=20), rate=0.1)

    start = load_last(model, opt, args.checkpoint) if args.checkpoint else 0
    for step in range(start, args.steps):
        x, y = (t.to(device) for t in batch(text, step, rank, ranks))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if (step + 1) % 10:
            continue
        if args.checkpoint:
            save(model, opt, args.checkpoint / str(step + 1))
        mean = loss.detach() / ranks
        if dist.is_initialized():
            dist.all_reduce(mean)
        reading = opt.norms()["global"]  # the norm of all weights, the same on every rank
        if rank == 0:
            norm, ratio = reading.norm.item(), reading.ratio.item()
            print(
                f"step {step + 1:3}  loss {mean.item():.4f}  norm {norm:.4f}  ratio {ratio:.4f}",
                flush=True,
            )
    if dist.is_initialized():
        dist.destroy_process_group()
        # gloo's threads may still run, and would abort an interpreter that is shutting down.
        os._exit(0)


if __name__ == "__main__":
    main()
