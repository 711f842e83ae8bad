"""Training with several processes under torchrun: ranks, the rows of each rank, DDP and FSDP2.

A single process uses the same calls, as a world of size 1. Checkpoints contain whole tensors, so
that a run can be resumed with another number of processes. This file may not know about data, the
training loop or the run folder.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from normcontrol.lab.errors import LabError
from normcontrol.lab.training.model import GPT


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of processes."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """True for rank 0, the process that writes files."""
        return self.rank == 0

    def share(self, rows: int, micro: int) -> tuple[slice, int]:
        """The rows of a batch that belong to this process, and the size of its micro-batch, at most
        the number of these rows."""
        mine = rows // self.size
        if rows % self.size:
            raise LabError(
                f"A batch of {rows} sequences cannot be divided equally among {self.size} "
                "processes. Set tokens_per_step to a multiple of context * processes."
            )
        micro = min(micro, mine)
        if mine % micro:
            fitting = next(m for m in range(micro, 0, -1) if mine % m == 0)
            raise LabError(
                f"micro_batch={micro} does not divide the {mine} sequences that a process has in a "
                f"step. Use --micro-batch {fitting}: the results do not depend on it."
            )
        return slice(self.rank * mine, (self.rank + 1) * mine), micro

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(value)
            value /= self.size
        return value

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def any(self, flag: bool, device: torch.device) -> bool:
        """True if the flag is true in any process."""
        return (
            flag
            if self.size == 1
            else bool(self.total(torch.tensor(float(flag), device=device)) > 0)
        )

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            dist.barrier()


def is_first() -> bool:
    """True if this process has rank 0, the one that prints and writes files. Reads torchrun's
    environment variable, so it works before :func:`join`."""
    return os.environ.get("RANK", "0") == "0"


def join(device: str) -> World:
    """Join the process group of torchrun, if this process was started by it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return World()
    world = World(
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        int(os.environ.get("LOCAL_RANK", "0")),
    )
    if not dist.is_initialized():
        gpu = device != "cpu" and torch.cuda.is_available()
        if gpu:
            torch.cuda.set_device(world.local_rank)
        dist.init_process_group("nccl" if gpu else "gloo")
    return world


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def exit_now(status: int) -> NoReturn:
    """Run the exit handlers and end this process without finalising the Python interpreter.

    After DDP or FSDP, threads of gloo still run when the process group has been destroyed. If one
    of them frees its last tensor after the interpreter was finalised, it aborts the process.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def shard(
    model: GPT, world: World, parallel: str, dtype: torch.dtype | None, device: torch.device
) -> None:
    """Shard the parameters of the model in place, block by block. Does nothing unless ``parallel``
    is "fsdp" and there is more than one process."""
    if parallel != "fsdp" or world.size == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def replicate(model: nn.Module, world: World, parallel: str, device: torch.device) -> nn.Module:
    """The model to call: wrapped for DDP if ``parallel`` is "ddp" and there is more than one
    process."""
    if parallel != "ddp" or world.size == 1:
        return model
    return nn.parallel.DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None
    )


def gradient_sync(model: nn.Module, last: bool) -> Any:
    """A context for the backward pass of a micro-batch: gradients are reduced over the processes
    only in the last micro-batch of a step."""
    if isinstance(model, nn.parallel.DistributedDataParallel) and not last:
        return model.no_sync()
    if is_sharded(model):
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
    return contextlib.nullcontext()


def whole(value: Tensor) -> Tensor:
    """The full tensor of a sharded tensor; any other tensor itself."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def reshard(model: nn.Module) -> None:
    """Shard the parameters again that a forward pass without a backward pass left unsharded."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


def is_sharded(model: nn.Module) -> bool:
    return any(hasattr(p, "full_tensor") for p in model.parameters())


def state_of(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """The state of the model and the optimizers, as whole tensors. All processes must call this."""
    saved = [o.state_dict() for o in optimizers]
    if not is_sharded(model):
        return {"model": model.state_dict(), "optimizers": saved}
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizers": [_map(state, whole) for state in saved],
    }


def load_state(model: nn.Module, optimizers: list[Optimizer], state: dict[str, Any]) -> None:
    """Load what :func:`state_of` returned, whatever the number of processes was then."""
    if not is_sharded(model):
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, state["model"], options=StateDictOptions(full_state_dict=True))
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        sharded = {
            index: {key: _like(value, params[index]) for key, value in own.items()}
            for index, own in saved["state"].items()
        }
        optimizer.load_state_dict({**saved, "state": sharded})


def _map(value: Any, function: Any) -> Any:
    """Apply the function to all tensors in nested dicts and lists."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in value.items()}
    return [_map(item, function) for item in value] if isinstance(value, list) else value


def _like(value: Any, param: Any) -> Any:
    """Shard a state tensor like its parameter. Values of another shape, such as step counts, are
    returned unchanged."""
    if (
        not isinstance(value, Tensor)
        or value.shape != param.shape
        or not hasattr(param, "placements")
    ):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(param.device), param.device_mesh, param.placements)
