"""FSDP2 over NCCL on one CUDA device: the same weights as whole tensors, without waiting for the
device."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run
from spread import Model, batch, relative, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from normcontrol import AdamWN, linear

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
SETTINGS: dict[str, Any] = {"lr": 1e-2, "ratio": linear(1.0, 1.5, steps=10), "rate": 0.2}


@pytest.fixture(scope="module", autouse=True)
def nccl(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("nccl") / "store"), 1)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: range, waits: bool = True) -> None:
    for step in steps:
        x, y = (t.cuda() for t in batch(step))
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.cuda.set_sync_debug_mode("default" if waits or step == steps[0] else "error")
        opt.step()
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("scope", ["global", "tensor", "row", "col"])
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"norm_group": True}])
def test_fsdp2_over_nccl_matches_whole_tensors_and_never_waits_for_the_device(how, scope, order):
    alone = Model().cuda()
    model = copy.deepcopy(alone)
    fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
    settings = {"norm_group": dist.group.WORLD} if "norm_group" in how else how
    matrices = (
        {"params": [p for p in alone.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() > 1]},
    )
    own = {} if "norm_group" in how else how
    one = AdamWN([matrices[0]], scope=scope, order=order, **own, **SETTINGS)
    opt = AdamWN([matrices[1]], scope=scope, order=order, **settings, **SETTINGS)
    train(alone, one, range(20))
    train(model, opt, range(20), waits=False)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert relative(whole(p), q.detach()) < 1e-6
    for name, reading in opt.norms().items():
        assert relative(reading.norm, one.norms()[name].norm) < 1e-6


def test_offloaded_weights_are_measured_on_the_host_and_added_up_on_the_device():
    alone = Model().cuda()
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cuda", (1,)), offload_policy=CPUOffloadPolicy())
    one = AdamWN(alone.parameters(), **SETTINGS)
    opt = AdamWN(model.parameters(), norm_group=dist.group.WORLD, **SETTINGS)
    assert next(model.parameters()).device.type == "cpu"
    train(alone, one, range(5))
    train(model, opt, range(5))
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        # Adam itself rounds differently on the host.
        assert relative(whole(p).cuda(), q.detach()) < 1e-5


def test_a_checkpoint_from_the_device_resumes_there(tmp_path):
    def make(scale: float) -> tuple[nn.Module, AdamWN]:
        model = Model().cuda()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(scale)
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
        return model, AdamWN(model.parameters(), scope="global", **SETTINGS)

    model, opt = make(1.0)
    train(model, opt, range(4))
    weights, state = get_state_dict(model, opt)
    dcp.save({"model": weights, "opt": state}, checkpoint_id=Path(tmp_path, "half"))
    train(model, opt, range(4, 8))
    other, again = make(2.0)
    weights, state = get_state_dict(other, again)
    dcp.load({"model": weights, "opt": state}, checkpoint_id=Path(tmp_path, "half"))
    set_state_dict(other, again, model_state_dict=weights, optim_state_dict=state)
    assert torch.equal(
        again.param_groups[0]["control"]["reference"], opt.param_groups[0]["control"]["reference"]
    )
    train(other, again, range(4, 8))
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        assert relative(whole(p), whole(q)) < 1e-6


def shards() -> None:
    """Several processes on one device, over gloo, with matrices of which some ranks have no rows.
    On a device gloo supports sums only, so the shards are cut and compared without it."""
    torch.cuda.set_device(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.randn(shape, generator=generator).cuda()
        for shape in ((1, 5), (7, 3), (130, 1100), (2, 2))
    ]
    mesh = init_device_mesh("cuda", (ranks,))

    def shard(value: torch.Tensor) -> torch.Tensor:
        chunks = value.chunk(ranks)
        return chunks[rank].clone() if rank < len(chunks) else value[:0].clone()

    def spread(value: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            shard(value),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )

    for scope, order, own in itertools.product(
        ("global", "tensor", "row", "col"), ("after", "before"), (True, False)
    ):
        whole_tensors = [nn.Parameter(v.clone()) for v in values]
        sharded = [nn.Parameter(spread(v)) for v in values]
        settings = {
            "scope": scope,
            "order": order,
            "fused": None if own else False,
            "max_grad_norm": 1.0,
            **SETTINGS,
        }
        one, opt = AdamWN(whole_tensors, **settings), AdamWN(sharded, **settings)
        for step in range(10):
            generator = torch.Generator().manual_seed(step)
            for p, q in zip(whole_tensors, sharded, strict=True):
                p.grad = torch.randn(p.shape, generator=generator).cuda()
                q.grad = spread(p.grad)
            one.step()
            opt.step()
        assert (opt.implementation == "Triton kernels") == own, opt.implementation
        for p, q in zip(whole_tensors, sharded, strict=True):
            mine = shard(p.detach())
            assert mine.numel() == 0 or relative(q.to_local().detach(), mine) < 1e-6, (
                rank,
                scope,
                order,
                own,
            )


def test_shards_on_several_processes_match_whole_tensors():
    run(shards, 4, timeout=120)
