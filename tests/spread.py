"""For the tests of sharding: their model, the layouts that spread it over processes, and one
training loop for all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from normcontrol import AdamWN, linear

SCOPES = ["global", "group", "tensor", "row", "col", (0, 1)]
ORDERS = ["after", "before"]
STEPS = 5


class Model(nn.Module):
    """Matrices whose rows and columns cannot be divided evenly among four ranks (7, 3), a stack of
    experts, biases, and a norm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)  # tensor parallelism splits its rows, and needs them even
        self.down = nn.Linear(12, 7)
        self.norm = nn.LayerNorm(7)
        self.experts = nn.Parameter(torch.zeros(3, 4, 7))
        self.head = nn.Linear(4, 3)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.4 * torch.randn(p.shape, generator=generator) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.down(torch.tanh(self.up(x))))
        return self.head(torch.tanh((self.experts @ x.T).mean(0).T))


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """This rank's part of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    return x.chunk(parts)[part], y.chunk(parts)[part]


def whole(tensor: Any) -> Tensor:
    """The whole tensor of a DTensor, and any other tensor as it is."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def clip(model: nn.Module, most: float) -> None:
    """Gradient clipping, mesh by mesh: torch refuses lists that mix meshes, or DTensors and plain
    tensors."""
    by_mesh: dict[Any, list[Any]] = {}
    for p in model.parameters():
        by_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p)
    norms = [
        whole(nn.utils.get_total_norm([p.grad for p in params])) for params in by_mesh.values()
    ]
    for params in by_mesh.values():
        nn.utils.clip_grads_with_norm_(params, most, torch.stack(norms).norm())


def train(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    part: int = 0,
    parts: int = 1,
    steps: range = range(STEPS),
) -> None:
    for step in steps:
        x, y = batch(step, part, parts)
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        clip(model, 0.5)
        opt.step()


def optimizer(model: nn.Module, scope: Any, order: str, **settings: Any) -> AdamWN:
    """AdamWN with three groups: matrices, experts, and the rest, which is controlled only if the
    scope fits vectors. The scope (0, 1) needs three axes, which only the experts have."""
    matrices = [(n, p) for n, p in model.named_parameters() if p.dim() > 1 and n != "experts"]
    experts = [(n, p) for n, p in model.named_parameters() if n == "experts"]
    rest = [(n, p) for n, p in model.named_parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "scope": "row" if scope == (0, 1) else scope},
        {"params": experts, "scope": scope},
        {
            "params": rest,
            "controlled": scope in ("global", "group", "tensor"),
            "scope": scope if isinstance(scope, str) else "row",
        },
    ]
    chosen = {"ratio": linear(1.0, 1.5, steps=6), "rate": 0.2, **settings}
    return AdamWN(groups, lr=1e-2, scope=scope, order=order, **chosen)


def shard(layout: str, model: nn.Module) -> tuple[int, int]:
    """Spread the model over all ranks. Returns (part, parts): this rank's share of each batch."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    # Without a mesh, FSDP2 would use the GPUs of a machine that has some.
    everyone = init_device_mesh("cpu", (ranks,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if layout == "fsdp":
        fully_shard(model, mesh=everyone)
    elif layout == "fsdp with ignored parameters":
        fully_shard(model, mesh=everyone, ignored_params={model.down.weight, model.down.bias})
        for p in (model.down.weight, model.down.bias):  # FSDP2 does not average their gradients
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(ranks)))
    elif layout == "hybrid":
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard")),
        )
    elif layout == "tensor parallel":
        parallelize_module(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)), plan)
        return 0, 1
    elif layout == "fsdp and tensor parallel":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        return mesh["dp"].get_local_rank(), 2
    return rank, ranks


def gathered(opt: AdamWN) -> dict[str, Tensor]:
    """The norms of ``opt.norms()``, which must be the same bits on all ranks."""
    norms = {name: reading.norm for name, reading in opt.norms().items()}
    mine = torch.cat([n.reshape(-1) for n in norms.values()])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    assert all(torch.equal(mine, other) for other in everyones)
    return norms


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()
