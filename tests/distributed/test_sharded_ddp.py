"""DDP, where every rank has the whole weights, and gradient accumulation: the weights are those of
one process."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from processes import run
from spread import Model, batch, gathered, optimizer, relative, train, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode


def ddp() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone, model = Model(), Model()
    one, opt = optimizer(alone, "tensor", "after"), None
    spread = nn.parallel.DistributedDataParallel(model)
    opt = optimizer(model, "tensor", "after")
    train(alone, one)
    train(spread, opt, rank, ranks)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert relative(p.detach(), q.detach()) < 1e-6
    gathered(opt)
    with CommDebugMode() as comm:
        opt.step()
    assert comm.get_total_counts() == 0


def accumulation() -> None:
    """Two micro-batches in a step, the first under no_sync, give the step of the whole batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for kind in ("ddp", "fsdp"):
        alone, model = Model(), Model()
        one = optimizer(alone, "global", "after")
        train(alone, one, steps=range(5))
        spread: Any = (
            nn.parallel.DistributedDataParallel(model)
            if kind == "ddp"
            else fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        )
        opt = optimizer(model, "global", "after")
        for step in range(5):
            x, y = batch(step, rank, ranks)
            opt.zero_grad()
            if kind == "ddp":
                with spread.no_sync():
                    ((spread(x[:2]) - y[:2]).square().mean() / 2).backward()
            else:
                spread.set_requires_gradient_sync(False)
                ((spread(x[:2]) - y[:2]).square().mean() / 2).backward()
                spread.set_requires_gradient_sync(True)
            ((spread(x[2:]) - y[2:]).square().mean() / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert relative(whole(p), q.detach()) < 1e-6, kind


def test_ddp_trains_as_one_process_without_a_collective_in_the_step():
    run(ddp, 2)


def test_accumulated_gradients_give_the_step_of_the_whole_batch():
    run(accumulation, 2)
