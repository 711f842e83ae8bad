"""Layouts whose shards are plain tensors: with ``norm_group`` the norms are right, and without it
the layouts that can be recognised are refused."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from spread import Model, batch, gathered, relative, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.debug import CommDebugMode

from normcontrol import AdamWN, NormControl, NormTrace, linear, set_norm_

SETTINGS: dict[str, Any] = {"lr": 1e-2, "ratio": linear(1.0, 1.5, steps=5), "rate": 0.2}
STEPS = 6


def backward(model: nn.Module, step: int, part: int = 0, parts: int = 1) -> None:
    x, y = batch(step, part, parts)
    (model(x) - y).square().mean().backward()


def one_process(*models: nn.Module, **settings: Any) -> AdamWN:
    """Train whole models in one process: the result that the layouts must give."""
    opt = AdamWN([p for model in models for p in model.parameters()], **{**SETTINGS, **settings})
    for step in range(STEPS):
        opt.zero_grad()
        for model in models:
            backward(model, step)
        opt.step()
    return opt


def assert_close(model: Any, alone: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert relative(whole(p), q[1].detach()) < 1e-6, name


def refusal(function: Any, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        function()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def pipeline() -> None:
    """Two stages, one for each rank. In this test both ranks compute the whole model, and each
    optimizer has the weights of its own stage."""
    rank = dist.get_rank()
    for settings in ({}, {"rms": 0.6, "ratio": None}, {"scope": "group", "order": "before"}):
        alone, model = Model(), Model()
        one = one_process(alone, **settings)
        stages = [
            [*model.up.parameters(), *model.down.parameters()],
            [*model.norm.parameters(), model.experts, *model.head.parameters()],
        ]
        opt = AdamWN(stages[rank], norm_group=dist.group.WORLD, **{**SETTINGS, **settings})
        for step in range(STEPS):
            model.zero_grad()
            backward(model, step)
            opt.step()
            for p in (p for stage in stages for p in stage):
                dist.broadcast(p.detach(), src=0 if any(p is q for q in stages[0]) else 1)
        if "scope" not in settings:
            assert_close(model, alone)
            assert relative(opt.norms()["global"].norm, one.norms()["global"].norm) < 1e-6
        else:  # the groups of the stages form one group
            assert relative(opt.norms()["group 0"].norm, one.norms()["group 0"].norm) < 1e-6
        gathered(opt)
        assert "all of them" in opt.report()
        model.zero_grad()
        with CommDebugMode() as comm:
            opt.step()
        assert comm.get_total_counts() == 1

    # Copies lose the process group, and refuse to step instead of using this rank's norm for all.
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        refusal(twin.step, "norm_group is lost", "opt.norm_group")
        twin.norm_group = dist.group.WORLD
        twin.step()
    opt.param_groups[0]["params"][0].requires_grad_(False)
    refusal(opt.step, "frozen or unfrozen", "norm_group")

    # A rank without controlled weights takes part in the sum. If no rank has any, all ranks refuse.
    weights = [nn.Linear(2, 2, bias=False).weight, nn.Parameter(torch.ones(2))]
    opt = AdamWN([weights[rank]], norm_group=dist.group.WORLD, norm=3.0, law="projection")
    for p in weights:
        p.grad = torch.zeros_like(p)
    opt.step()
    assert abs(opt.norms()["global"].norm.item() - 3) < 1e-12
    assert abs(weights[0].norm().item() - (3 if rank == 0 else weights[0].norm().item())) < 1e-6
    assert torch.equal(weights[1], torch.ones(2))
    refusal(
        lambda: AdamWN([weights[1]], norm_group=dist.group.WORLD), "nothing would be controlled"
    )


def test_pipeline_stages_train_as_one_process():
    run(pipeline, 2)


def sharded_pipeline() -> None:
    """Stages that are sharded themselves: two models are the two stages, each under FSDP2 over two
    of four ranks."""
    alone = Model(), Model()
    with torch.no_grad():
        for p in alone[1].parameters():
            p.mul_(1.7)
    models = copy.deepcopy(alone)
    one = one_process(*alone)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    stage, part = mesh.get_coordinate()
    model = models[stage]
    fully_shard(model, mesh=mesh["shard"], ignored_params={model.experts})
    model.experts.register_post_accumulate_grad_hook(
        lambda p: dist.all_reduce(p.grad.div_(2), group=mesh.get_group("shard"))
    )
    opt = AdamWN(model.parameters(), norm_group=dist.group.WORLD, **SETTINGS)
    for step in range(STEPS):
        opt.zero_grad()
        backward(model, step, part, 2)
        opt.step()
    assert_close(model, alone[stage])
    assert relative(opt.norms()["global"].norm, one.norms()["global"].norm) < 1e-6
    gathered(opt)
    refusal(
        lambda: AdamWN(model.parameters(), norm_group=mesh.get_group("stage")),
        "DTensors on the mesh of ranks",
    )


def test_sharded_pipeline_stages_train_as_one_process():
    run(sharded_pipeline, 4)


def zero_redundancy() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone = Model()
    one = one_process(alone)

    def trained(make: Any) -> tuple[nn.Module, Any]:
        model = Model()
        spread = nn.parallel.DistributedDataParallel(model)
        opt = make(model)
        for step in range(STEPS):
            opt.zero_grad()
            backward(spread, step, rank, ranks)
            opt.step()
        return model, opt

    # Given as a keyword, ZeroRedundancyOptimizer would put the process group into its state.
    grouped = functools.partial(AdamWN, norm_group=dist.group.WORLD)
    model, inside = trained(lambda m: ZeroRedundancyOptimizer(m.parameters(), grouped, **SETTINGS))
    assert_close(model, alone)
    assert relative(inside.optim.norms()["global"].norm, one.norms()["global"].norm) < 1e-6
    settings = {k: v for k, v in SETTINGS.items() if k != "lr"}
    model, around = trained(
        lambda m: NormControl(
            ZeroRedundancyOptimizer(m.parameters(), torch.optim.Adam, lr=1e-2), **settings
        )
    )
    assert_close(model, alone)
    assert relative(around.norms()["global"].norm, one.norms()["global"].norm) < 1e-6
    gathered(around)
    unshared = Model()
    inside_without_group = ZeroRedundancyOptimizer(unshared.parameters(), AdamWN, **SETTINGS)
    backward(unshared, 1)
    refusal(inside_without_group.step, "ZeroRedundancyOptimizer", "norm_group")

    # Saved on one rank, loaded on all.
    inside.consolidate_state_dict(to=0)
    saved = [inside.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    again = ZeroRedundancyOptimizer(
        [nn.Parameter(2 * p.detach()) for p in Model().parameters()], grouped, **SETTINGS
    )
    assert not torch.equal(
        again.optim.param_groups[0]["control"]["reference"],
        inside.optim.param_groups[0]["control"]["reference"],
    )
    again.load_state_dict(saved[0])
    assert torch.equal(
        again.optim.param_groups[0]["control"]["reference"],
        inside.optim.param_groups[0]["control"]["reference"],
    )
    assert int(again.optim.param_groups[0]["control"]["step"]) == STEPS


def test_inside_and_around_zero_redundancy_optimizer_it_trains_as_one_process():
    run(zero_redundancy, 2)


def fsdp1() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for use_orig_params in (True, False):
        alone, model = Model(), Model()
        spread = FullyShardedDataParallel(
            model, use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        refusal(
            lambda s=spread: AdamWN([{"params": s.parameters(), "controlled": True}]),
            "FSDP1's flat parameters",
            "norm_group",
        )
        refusal(
            lambda s=spread: NormTrace(
                torch.optim.AdamW(
                    [
                        {"params": s.parameters(), "weight_decay": 0.1},
                        {"params": [nn.Parameter(torch.ones(1))], "weight_decay": 0.0},
                    ]
                )
            ),
            "flat",
        )
        settings = {"norm_group": dist.group.WORLD, **SETTINGS}
        refusal(
            lambda s=spread, t=settings: AdamWN(s.parameters(), **t),
            "nothing would be controlled",
            "controlled=True",
        )
        refusal(
            lambda s=spread, t=settings: AdamWN(
                [{"params": s.parameters(), "controlled": True, "scope": "tensor"}], **t
            ),
            "whole tensors",
        )

        def groups(m: nn.Module, by_name: bool = use_orig_params) -> list[dict[str, Any]]:
            if not by_name:
                return [{"params": list(m.parameters()), "controlled": True}]
            wide = [
                p
                for n, p in m.named_parameters()
                if n.endswith(("weight", "experts")) and "norm" not in n
            ]
            return [
                {"params": wide, "controlled": True},
                {"params": [p for p in m.parameters() if all(p is not q for q in wide)]},
            ]

        one = AdamWN(groups(alone), **SETTINGS)
        opt = AdamWN(groups(spread), **settings)
        for step in range(STEPS):
            for m, o, at in ((alone, one, (0, 1)), (spread, opt, (rank, ranks))):
                o.zero_grad()
                backward(m, step, *at)
                m.clip_grad_norm_(0.5) if m is spread else nn.utils.clip_grad_norm_(
                    m.parameters(), 0.5
                )
                o.step()
        assert relative(opt.norms()["global"].norm, one.norms()["global"].norm) < 1e-6
        gathered(opt)
        with FullyShardedDataParallel.summon_full_params(spread):
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                assert relative(p.detach().view_as(q), q.detach()) < 1e-6

        # FSDP1's own state dict has one reference norm for each group, on all ranks.
        saved = FullyShardedDataParallel.optim_state_dict(spread, opt)
        assert saved["param_groups"][0]["control"]["reference"].numel() == 1
        norm0 = opt.param_groups[0]["control"]["reference"].clone()
        opt.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(spread, opt, saved))
        assert torch.equal(opt.param_groups[0]["control"]["reference"], norm0)
        assert int(opt.param_groups[0]["control"]["step"]) == STEPS


def of_all_ranks() -> dict[str, Any]:
    return {"norm_group": dist.group.WORLD}


def fsdp1_inside() -> None:
    """Some modules are wrapped and others are not, whose matrices could be controlled."""
    for use_orig_params in (True, False):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1] = FullyShardedDataParallel(
            model[1], use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        initial = model[0].weight.detach().clone()
        refusal(lambda m=model: AdamWN(m.named_parameters()), "1._fsdp_wrapped", "controlled=True")
        refusal(lambda m=model: set_norm_(m, norm=2.0), "flat parameter of FSDP1", "before the")
        assert torch.equal(model[0].weight, initial)
        refusal(lambda m=model: NormTrace(torch.optim.AdamW(m.parameters())), "flat parameter of")
        refusal(
            lambda m=model: AdamWN(m.named_parameters(), controlled=True, **of_all_ranks()),
            "0.weight is outside of FSDP1's wrapping",
            "once for each rank",
        )
        # A norm of its own, or left alone by the group's own word.
        AdamWN(
            [
                {"params": model[0].weight, "scope": "tensor"},
                {"params": model[1].parameters(), "controlled": True},
            ],
            **of_all_ranks(),
        )
        opt = AdamWN(
            [
                {"params": model[0].parameters()},
                {"params": model[1].parameters(), "controlled": False},
            ]
        )
        assert [s.params[0].shape for s in opt.sets] == [(4, 4)]


def test_fsdp1_around_some_modules_is_not_left_alone_in_silence():
    run(fsdp1_inside, 2)


def test_fsdp1_needs_norm_group_and_then_trains_as_one_process():
    run(fsdp1, 2)


def zero_partitions() -> None:
    """What ZeRO does after construction: it replaces the optimizer's tensors by this rank's shard
    of one long vector."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone, model = Model(), Model()
    one = AdamWN([{"params": alone.parameters(), "controlled": True}], **SETTINGS)
    params = list(model.parameters())

    def partition(opt: AdamWN) -> nn.Parameter:
        flat = torch.cat([p.detach().reshape(-1) for p in params])
        mine = nn.Parameter(flat.chunk(ranks)[rank].clone())
        opt.param_groups[0]["params"] = [mine]
        return mine

    without_group = AdamWN([{"params": params, "controlled": True}], **SETTINGS)
    mine = partition(without_group)
    mine.grad = torch.ones_like(mine)
    refusal(without_group.step, "its tensors or its settings were changed", "norm_group")

    opt = AdamWN([{"params": params, "controlled": True}], norm_group=dist.group.WORLD, **SETTINGS)
    mine = partition(opt)
    for step in range(STEPS):
        for m, o in ((alone, one), (model, opt)):
            m.zero_grad()
            backward(m, step)
            if m is model:
                mine.grad = torch.cat([p.grad.reshape(-1) for p in params]).chunk(ranks)[rank]
            o.step()
        sizes = [c.numel() for c in torch.arange(sum(p.numel() for p in params)).chunk(ranks)]
        everyones = [torch.empty(max(sizes)) for _ in sizes]
        dist.all_gather(everyones, nn.functional.pad(mine.detach(), (0, max(sizes) - mine.numel())))
        flat = torch.cat([e[:n] for e, n in zip(everyones, sizes, strict=True)])
        with torch.no_grad():
            for p, values in zip(params, flat.split([p.numel() for p in params]), strict=True):
                p.copy_(values.view_as(p))
    assert_close(model, alone)
    gathered(opt)

    megatron = nn.Parameter(torch.ones(2, 2))
    megatron.tensor_model_parallel = True
    refusal(lambda: AdamWN([megatron]), "Megatron", "norm_group")


def test_partitions_of_zero_need_norm_group_and_then_train_as_one_process():
    run(zero_partitions, 2)


def changes_by_hand() -> None:
    """Plain tensors on several ranks, as under DDP. ZeRO has no part in what is changed."""

    def stepped(opt: AdamWN) -> AdamWN:
        for p in opt.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        opt.step()
        return opt

    def made() -> AdamWN:
        return AdamWN([nn.Parameter(torch.ones(*shape)) for shape in ((3, 4), (5, 4), (4,))])

    # Settings that give another number of norms, before the first step.
    opt = made()
    opt.param_groups[0]["control"]["scope"] = "row"
    assert [len(r.norm) for r in stepped(opt).norms().values()] == [3, 5]
    opt = made()
    opt.param_groups[0]["control"]["controlled"] = True
    assert "controlled, 36 weights" in stepped(opt).report()

    # Another number of tensors. The new one may be a shard, and nothing shows it.
    for opt in (made(), stepped(made())):
        opt.param_groups[0]["params"].append(nn.Parameter(torch.ones(6, 4)))
        words = "had 2 norms to control, and now it has 3", "If the tensors are whole, construct"
        refusal(lambda opt=opt: stepped(opt), *words)


def test_tensors_that_are_changed_by_hand_on_several_ranks_are_not_said_to_be_those_of_zero():
    run(changes_by_hand, 2)


@pytest.mark.parametrize("given", ["world", 0])
def test_a_norm_group_that_is_no_process_group_is_refused(given):
    with pytest.raises(TypeError, match=r"it must be a process group: give torch.distributed"):
        AdamWN(nn.Linear(2, 2).parameters(), norm_group=given)
