"""Training holds no more memory after many steps than after a few: objects, tensors and bytes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest
import torch
from processes import run as run_processes
from torch import nn

from normcontrol import AdamWN, cosine, linear

FEW, MANY = 100, 2000
SETTINGS = {"ratio": linear(1.0, 2.0, steps=50), "rate": cosine(0.1, 0.01, steps=500)}
MAKERS = {
    "plain": lambda params: AdamWN(params, foreach=False, **SETTINGS),
    "foreach": lambda params: AdamWN(params, foreach=True, **SETTINGS),
    "folded": lambda params: AdamWN(params, fused=True, **SETTINGS),
    "with memory": lambda params: AdamWN(
        params, law="integral", start="inflection", scope="row", order="before", **SETTINGS
    ),
}


def held() -> tuple[int, int, int]:
    """The objects that the garbage collector knows, the bytes of tensors, all blocks of memory."""
    gc.collect()
    blocks, objects = sys.getallocatedblocks(), gc.get_objects()
    tensors = (t for t in objects if issubclass(type(t), torch.Tensor))
    return len(objects), sum(t.numel() * t.element_size() for t in tensors), blocks


def growth(step: Callable[[], None], many: int) -> tuple[int, ...]:
    """How much more is held after many steps than after a few."""
    gc.freeze()  # what was there before is not looked through
    try:
        for _ in range(FEW):
            step()
        before = held()
        for _ in range(many - FEW):
            step()
        return tuple(b - a for a, b in zip(before, held(), strict=True))
    finally:
        gc.unfreeze()


def assert_constant(step: Callable[[], None], many: int = MANY) -> None:
    objects, tensors, blocks = growth(step, many)
    kept_in_each_step = many - FEW
    assert objects < kept_in_each_step / 10
    assert tensors < kept_in_each_step / 10
    assert blocks < kept_in_each_step / 2  # the interpreter's own caches come and go


def training_step(opt, params) -> Callable[[], None]:
    def step() -> None:
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        opt.norms()

    return step


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_training_on_one_device(make):
    params = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))]
    assert_constant(training_step(make(params), params))


def train_shards() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(3, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    params = list(model.parameters())
    assert_constant(training_step(AdamWN(params, **SETTINGS), params))


@pytest.mark.slow
def test_training_of_shards():
    run_processes(train_shards, 2, timeout=120)
