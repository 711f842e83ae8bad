"""AdamWN in place of AdamW in the training code of nanoGPT and torchtitan: their groups, loops,
checkpoints and resumes, in short versions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run
from small import MATRICES, SmallModel, loss_at, matrices, total_norm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from normcontrol import AdamWN, linear

RATIO = linear(1.0, 1.5, steps=6)


# nanoGPT: two groups by dimension, a learning rate written into the groups, one checkpoint of
# everything


def configure_optimizers(model: nn.Module, kind: type, **ours: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return kind(groups, lr=1e-2, betas=(0.9, 0.95), **ours)


def get_lr(iteration: int, peak: float = 1e-2, warmup: int = 2, last: int = 12) -> float:
    if iteration < warmup:
        return peak * (iteration + 1) / (warmup + 1)
    return 0.1 * peak + 0.9 * peak * 0.5 * (
        1 + math.cos(math.pi * (iteration - warmup) / (last - warmup))
    )


def nanogpt(
    out: Path,
    *,
    resume: bool = False,
    scaled: bool = False,
    until: int = 12,
    kind: type = AdamWN,
    **ours: Any,
) -> Any:
    """nanoGPT's train.py in short: a compiled model, a GradScaler that may be off, two micro-steps,
    clipping, and a checkpoint at iteration 6."""
    model, start = SmallModel(), 0
    if resume:
        checkpoint = torch.load(out / "ckpt.pt", map_location="cpu")
        model.load_state_dict(
            {name.removeprefix("_orig_mod."): value for name, value in checkpoint["model"].items()}
        )
        start = checkpoint["iter_num"]
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**10)
    optimizer = configure_optimizers(model, kind, **ours)
    if resume:
        optimizer.load_state_dict(checkpoint["optimizer"])
    compiled = torch.compile(model, backend="eager")
    for iteration in range(start, until):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iteration)
        if iteration == 6 and not resume:
            saved = {
                "model": compiled.state_dict(),
                "optimizer": optimizer.state_dict(),
                "iter_num": iteration,
            }
            torch.save(
                {**saved, "best_val_loss": torch.tensor(1e9), "config": {"compile": True}},
                out / "ckpt.pt",
            )
        for micro in range(2):
            scaler.scale(loss_at(compiled, 2 * iteration + micro) / 2).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return model, optimizer


@pytest.mark.parametrize("scaled", [False, True], ids=["fp32", "GradScaler"])
@pytest.mark.parametrize("fused", [False, True], ids=["default", "fused"])
def test_nanogpt_controls_what_it_decayed_and_resumes_bit_for_bit(tmp_path, scaled, fused):
    ours = {"ratio": RATIO, "rate": 0.5, "fused": fused, "scaled": scaled}
    whole, optimizer = nanogpt(tmp_path, **ours)
    assert [group["control"]["controlled"] for group in optimizer.param_groups] == [True, False]
    assert total_norm(matrices(whole)) == pytest.approx(
        1.5 * total_norm(matrices(SmallModel())), rel=0.03
    )
    again, resumed = nanogpt(tmp_path, resume=True, **ours)
    for one, two in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    assert int(resumed.param_groups[0]["control"]["step"]) == 12


def test_a_nanogpt_run_that_began_with_adamw_continues_at_its_current_norm(tmp_path):
    nanogpt(tmp_path, kind=torch.optim.AdamW, until=7)
    saved = torch.load(tmp_path / "ckpt.pt")["model"]
    reached = total_norm(saved[f"_orig_mod.{name}"] for name in MATRICES)
    with pytest.warns(UserWarning, match="has no reference norms"):
        model, optimizer = nanogpt(tmp_path, resume=True, ratio=1.0, rate=1.0)
    assert total_norm(matrices(model)) == pytest.approx(reached)
    assert int(optimizer.param_groups[0]["control"]["step"]) == 6


# torchtitan: groups by pattern that carry all their settings and names, FSDP2, and a flat
# checkpoint by name of parameter


def titan_optimizer(model: nn.Module) -> AdamWN:
    """The optimizer as torchtitan's container constructs it: all settings are in the group, also
    the flags of the implementation, and none in the constructor."""
    settings = {
        "lr": 1e-2,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "fused": False,
        "foreach": False,
    }
    named = dict(model.named_parameters())
    ours = {"ratio": RATIO, "rate": 0.5, "controlled": "matrices"}
    return AdamWN(
        [{"params": list(named.values()), "param_names": list(named), **settings, **ours}]
    )


def flat_state(opt: AdamWN) -> dict[str, Any]:
    """The state with one level of names: ``state.NAME.KEY`` for the state of each parameter, and
    ``param_groups.NAME.KEY`` for the settings of its group."""
    packed = opt.state_dict()
    flat = {}
    for group in packed["param_groups"]:
        for number, name in zip(group["params"], group["param_names"], strict=True):
            flat |= {f"state.{name}.{key}": value for key, value in packed["state"][number].items()}
            flat |= {
                f"param_groups.{name}.{key}": value
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
    return flat


def load_flat_state(opt: AdamWN, flat: dict[str, Any]) -> None:
    """Load a flat state. Only the keys of the live optimizer are read, and the settings of a group
    by the name of its first parameter."""
    packed = opt.state_dict()
    for group in packed["param_groups"]:
        for number, name in zip(group["params"], group["param_names"], strict=True):
            packed["state"][number] = {
                key: flat[f"state.{name}.{key}"] for key in packed["state"][number]
            }
        for key in set(group) - {"params", "param_names"}:
            group[key] = flat[f"param_groups.{group['param_names'][0]}.{key}"]
    opt.load_state_dict(packed)


def fill_state(opt: AdamWN) -> None:
    """Make a step with a learning rate and gradients of zero, which creates the state."""
    params = [p for group in opt.param_groups for p in group["params"]]
    lrs = [group["lr"] for group in opt.param_groups]
    for p in params:
        p.grad = torch.zeros_like(p)
    for group in opt.param_groups:
        group["lr"] = 0.0
    opt.step()
    for group, lr in zip(opt.param_groups, lrs, strict=True):
        group["lr"] = lr
    opt.zero_grad()


def titan(folder: str, resume: bool) -> tuple[list[float], list[torch.Tensor]]:
    model = SmallModel(seed=7 if resume else 0)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    opt = titan_optimizer(model)
    if resume:
        fill_state(opt)
        state = {"model": model.state_dict(), "opt": flat_state(opt)}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        load_flat_state(opt, state["opt"])
    norms = []
    for step in range(6 if resume else 0, 12):
        if step == 6 and not resume:
            dcp.save({"model": model.state_dict(), "opt": flat_state(opt)}, checkpoint_id=folder)
        loss_at(model, 2 * step + dist.get_rank()).backward()
        opt.step()
        opt.zero_grad()
        norms.append(opt.norms()["global"].norm.item())
    return norms, [p.full_tensor().detach() for p in model.parameters()]


def test_torchtitans_groups_and_flat_checkpoint_resume_bit_for_bit(tmp_path):
    (norms, weights), (others, _) = run(titan, 2, str(tmp_path), False)
    assert norms == others
    assert norms[-1] == pytest.approx(1.5 * total_norm(matrices(SmallModel())), rel=0.03)
    again, resumed = run(titan, 2, str(tmp_path), True)[0]
    assert again == norms[6:]
    for one, two in zip(weights, resumed, strict=True):
        assert torch.equal(one, two)
