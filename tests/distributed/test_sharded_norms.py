"""Norms under sharding: equal to values computed by hand, the same on all ranks, with at most one
collective in each step."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from spread import Model, gathered, optimizer, relative, shard, train, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from normcontrol import AdamWN, NormControl, NormTrace, predict, reproject_
from normcontrol.watch import trackers

W = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 12.0]])  # rows of norms 5, 0 and 12: 13 together


def controlled(*weights: torch.Tensor, **settings: Any) -> tuple[list[nn.Parameter], NormControl]:
    # Cloned, because a replicated DTensor shares the memory of W, which would be scaled.
    params = [nn.Parameter(w.clone()) for w in weights]
    for p in params:
        p.grad = torch.zeros_like(p)
    return params, NormControl(torch.optim.SGD(params, lr=1.0), law="projection", **settings)


def unequal_shards() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    (p,), opt = controlled(distribute_tensor(W, mesh, [Shard(0)]), norm=26.0)
    # Rank 0 has two rows and the local norm 5; rank 1 has one row and the local norm 12.
    assert p.to_local().tolist() == W.tolist()[2 * rank : 2 * rank + 2]
    opt.step()
    assert opt.norms()["global"].norm.item() == 26
    assert opt.norms()["global"].scale.item() == 2  # not 26/5 on one rank and 26/12 on the other
    assert p.to_local().tolist() == (2 * W).tolist()[2 * rank : 2 * rank + 2]

    # The norms of columns are summed over both ranks; those of rows are not. The row of zeros has
    # no direction and does not change.
    (p,), opt = controlled(distribute_tensor(W, mesh, [Shard(0)]), norm=1.0, scope="col")
    opt.step()
    assert torch.equal(whole(p), W / torch.tensor([3.0, 160.0**0.5]))
    (p,), opt = controlled(distribute_tensor(W, mesh, [Shard(0)]), norm=10.0, scope="row")
    opt.step()
    assert torch.allclose(whole(p), torch.tensor([[6.0, 8.0], [0.0, 0.0], [0.0, 10.0]]))
    assert opt.norms()["group0.tensor0"].norm.tolist() == [10.0, 0.0, 10.0]
    assert opt.norms()["group0.tensor0"].target.tolist() == [10.0, 10.0, 10.0]

    # One row, of which rank 1 has no elements, a replica, and a tensor that is not a DTensor: each
    # has norm 13 and is counted once.
    one_row = distribute_tensor(
        torch.full((1, 2), 13 / 2**0.5, dtype=torch.float64), mesh, [Shard(0)]
    )
    params, opt = controlled(
        one_row, distribute_tensor(W, mesh, [Replicate()]), W, norm=13.0 * 3**0.5 * 4
    )
    assert abs(opt.norms()["global"].norm.item() - 13 * 3**0.5) < 1e-12
    opt.step()
    assert torch.allclose(whole(params[1]), 4 * W)
    assert torch.allclose(params[2], 4 * W)
    assert params[0].to_local().shape == ((1, 2) if rank == 0 else (0, 2))

    # With a norm for each tensor, DTensors of the same shape are not confused.
    params, opt = controlled(
        distribute_tensor(W, mesh, [Shard(0)]),
        distribute_tensor(3 * W, mesh, [Shard(0)]),
        norm=13.0,
        scope="tensor",
    )
    opt.step()
    assert all(relative(whole(p), W) < 1e-7 for p in params)


def test_norms_of_unequal_shards_are_those_computed_by_hand():
    run(unequal_shards, 2)


def replicas() -> None:
    """On a 2-D mesh every placement is counted once: seven DTensors of norm 13, and one tensor that
    is not a DTensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ways = [
        (Shard(0), Shard(1)),
        (Shard(1), Replicate()),
        (Replicate(), Shard(0)),
        (Replicate(), Replicate()),
        (Shard(0), Shard(0)),
    ]
    spread = [distribute_tensor(W, mesh, way) for way in ways]
    spread += [
        distribute_tensor(W, mesh["dp"], [Shard(0)]),
        distribute_tensor(W, mesh["tp"], [Shard(0)]),
        W,
    ]
    params, opt = controlled(*spread, ratio=2.0)
    opt.step()
    with CommDebugMode() as comm:
        opt.step()
    assert comm.get_total_counts() == 1
    # Norms of single tensors are summed in float32.
    assert abs(opt.norms()["global"].norm.item() - 2 * 13 * 8**0.5) < 1e-5
    assert all(torch.equal(whole(p), 2 * W) for p in params)
    for scope in ("tensor", "row", "col"):
        params, opt = (
            controlled(*spread, ratio=2.0, scope="tensor")
            if scope == "tensor"
            else controlled(*spread, norm=2.0, scope=scope)
        )
        opt.step()
        if scope == "tensor":
            assert all(abs(r.norm.item() - 26) < 1e-5 for r in opt.norms().values())
        dims = {"tensor": (0, 1), "row": (1,), "col": (0,)}[scope]
        for p in params:
            norms = torch.linalg.vector_norm(whole(p), dim=dims)
            assert torch.allclose(
                norms[norms > 0], torch.tensor(26.0 if scope == "tensor" else 2.0)
            )
        gathered(opt)  # the same bits on all ranks

    # Replicas in another form: two separate meshes of half the ranks each.
    half = mesh["tp"]
    (p,), opt = controlled(distribute_tensor(W, half, [Shard(0)]), ratio=2.0)
    opt.step()
    assert opt.norms()["global"].norm.item() == 26


def test_every_placement_on_a_two_dimensional_mesh_counts_once():
    run(replicas, 4)


def collectives() -> None:
    ranks = dist.get_world_size()
    layouts = (
        ["fsdp", "hybrid", "tensor parallel", "fsdp and tensor parallel"]
        if ranks == 4
        else ["fsdp with ignored parameters"]
    )
    for layout in layouts:
        model = Model()
        shard(layout, model)
        named = dict(model.named_parameters())
        for p in named.values():
            p.grad = torch.ones_like(p)
        # The scopes that need no sum over ranks: rows of row shards, and in "mixed" the tensors
        # that tensor parallelism splits along the axes of their scope.
        local_scopes = {"tensor parallel": ("mixed",), "fsdp and tensor parallel": ()}
        free = local_scopes.get(layout, ("row",))
        for scope in ("global", "group", "tensor", "row", "col", "mixed"):
            if scope == "mixed":  # four sets of four scopes
                owns = [("up", "row"), ("down", "col"), ("experts", "tensor"), ("head", "group")]
                opt = AdamWN(
                    [
                        {
                            "params": [p for n, p in named.items() if n.startswith(name)],
                            "scope": own,
                        }
                        for name, own in owns
                    ]
                )
            else:
                opt = optimizer(model, scope, "after")
            opt.step()
            with CommDebugMode() as comm:
                opt.step()
            assert comm.get_total_counts() == (0 if scope in free else 1), (
                layout,
                scope,
                comm.get_comm_counts(),
            )
            with CommDebugMode() as comm:
                opt.norms()
            assert comm.get_total_counts() == 0 or scope in ("row", "mixed", "col"), (layout, scope)

        # Clipping within the step uses the norm of all gradients, whatever their placements.
        opt = AdamWN(model.parameters(), max_grad_norm=0.5)
        opt.step()
        elements = sum(p.numel() for p in named.values())
        assert abs(opt.grad_norm.item() - elements**0.5) < 1e-5, layout
        assert all(
            torch.allclose(whole(p.grad), torch.tensor(0.5 / elements**0.5)) for p in named.values()
        )


def test_one_collective_serves_all_norms_of_a_step_and_rows_on_row_shards_need_none():
    run(collectives, 4)
    run(collectives, 2)


def settings_and_tools() -> None:
    """Uses of an optimizer besides training: reports, freezing, averages, traces, low precision."""
    ranks = dist.get_world_size()

    def both(scope: str = "global", freeze: bool = False, **settings: Any):
        for layout in (None, "fsdp"):
            model = Model()
            part = (0, 1) if layout is None else shard(layout, model)
            opt = optimizer(model, scope, "after", **settings)
            train(model, opt, *part, steps=range(3))
            if freeze:
                model.up.weight.requires_grad_(False)
                model.up.weight.grad = None
                for _ in range(3):
                    for p in model.parameters():
                        p.grad = torch.ones_like(p) if p.requires_grad else None
                    opt.step()
            yield model, opt

    for settings in ({"rms": 0.7, "ratio": None}, {"norm": 4.0, "ratio": None}, {"law": "upper"}):
        for scope in ("global", "tensor", "row", "col"):
            (alone, one), (model, opt) = both(scope, **settings)
            assert all(
                relative(whole(p), q.detach()) < 1e-6
                for p, q in zip(model.parameters(), alone.parameters(), strict=True)
            )
            # The first paragraph names the implementation, which differs.
            assert opt.report().split("\n\n")[1:] == one.report().split("\n\n")[1:]
            assert trackers.values(opt) == pytest.approx(trackers.values(one), rel=1e-6)
    (alone, one), (model, opt) = both(freeze=True)
    assert all(
        relative(whole(p), q.detach()) < 1e-6
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    )
    assert relative(opt.norms()["global"].ratio, one.norms()["global"].ratio) < 1e-6

    # An average of the weights is scaled back to the target.
    for scope in ("global", "row"):
        _, (model, opt) = both(scope)
        average = Model()
        shard("fsdp", average)
        with torch.no_grad():
            for p, q in zip(average.parameters(), model.parameters(), strict=True):
                p.copy_(0.7 * q)
        reproject_(average, model, opt)
        for name, p in average.named_parameters():
            if name == "down.weight":
                target = opt.norms()["down.weight" if scope == "row" else "global"].target
                found = (
                    torch.linalg.vector_norm(whole(p), dim=1).double() if scope == "row" else None
                )
                assert found is None or relative(found, target) < 1e-6
        if scope == "global":
            total = torch.stack([whole(p).double().norm() for p in average.parameters()]).norm()
            assert relative(total, opt.norms()["global"].target) < 1e-6

    # The trace of a sharded run has the norms of the whole weights.
    traces, predictions = [], []
    for layout in (None, "fsdp"):
        model = Model()
        part = (0, 1) if layout is None else shard(layout, model)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        traces.append(NormTrace(adamw, angles=True))
        predictions.append(predict.adamw(adamw, steps=100).ratio)
        train(model, adamw, *part, steps=range(3))
    assert max(abs(a / b - 1) for a, b in zip(traces[0].norms, traces[1].norms, strict=True)) < 1e-6
    assert (
        max(abs(a / b - 1) for a, b in zip(traces[0].angles, traces[1].angles, strict=True)) < 1e-3
    )
    assert abs(predictions[0] / predictions[1] - 1) < 1e-6
    for ours, theirs in zip(traces[0].classes.values(), traces[1].classes.values(), strict=True):
        assert ours.count == theirs.count
        assert max(abs(a / b - 1) for a, b in zip(ours.norms, theirs.norms, strict=True)) < 1e-6

    # Low-precision weights round as the whole tensor would.
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(7, 6, generator=generator).bfloat16()
    mesh = init_device_mesh("cpu", (ranks,))
    for scope in ("global", "row", "col"):
        found = []
        for w in (values.clone(), *(distribute_tensor(values, mesh, [Shard(d)]) for d in (0, 1))):
            p = nn.Parameter(w)
            p.grad = torch.zeros_like(p)
            opt = NormControl(torch.optim.SGD([p], lr=1.0), ratio=1.3, rate=0.013, scope=scope)
            for _ in range(5):
                opt.step()
            found.append(whole(p))
        assert torch.equal(found[0], found[1]), scope
        assert torch.equal(found[0], found[2]), scope
        assert not torch.equal(found[0], values)


def test_settings_reports_averages_traces_and_rounding_are_those_of_whole_tensors():
    run(settings_and_tools, 2)


def overflow() -> None:
    """An overflow on one rank skips the step on all ranks, also with ``fused``, where GradScaler
    calls the step and passes ``found_inf``."""
    for fused in (False, True):
        model = Model()
        shard("fsdp", model)
        opt = AdamWN(model.parameters(), ratio=2.0, rate=0.5, fused=fused)
        train(model, opt, dist.get_rank(), dist.get_world_size(), steps=range(1))
        before = [whole(p).clone() for p in model.parameters()]
        norm = opt.norms()["global"].norm.clone()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.zeros(()))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        if dist.get_rank() == 1:
            model.up.weight.grad.to_local().fill_(torch.inf)
        scaler.step(opt)
        scaler.update()
        assert scaler.get_scale() == 1.0, fused
        assert all(
            torch.equal(whole(p), q) for p, q in zip(model.parameters(), before, strict=True)
        ), fused
        assert relative(opt.norms()["global"].norm, norm) < 1e-7
        assert int(opt.param_groups[0]["control"]["step"]) == 1


def test_overflow_on_one_rank_leaves_all_weights_alone():
    run(overflow, 2)


def unknown() -> None:
    """Norms of shards are summed over the ranks in steps alone: after a state was loaded or a group
    added, the sums are not known. The reference norms were told in their place."""
    for scope in ("global", "tensor", "row"):
        model = Model()
        shard("fsdp", model)
        opt = AdamWN(model.parameters(), ratio=2.0, rate=0.5, scope=scope)
        first = [r.ratio.mean().item() for r in opt.norms().values()]
        assert first == [1.0] * len(first)
        train(model, opt, dist.get_rank(), dist.get_world_size(), steps=range(1))
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        for reading in opt.norms().values():
            assert reading.norm.isnan().all()
            assert reading.ratio.isnan().all()
            assert not reading.target.isnan().any()
        assert "NaN" in opt.report()
        train(model, opt, dist.get_rank(), dist.get_world_size(), steps=range(1, 2))
        assert not any(reading.norm.isnan().any() for reading in opt.norms().values())


def test_norms_of_shards_are_not_told_where_they_are_not_known():
    run(unknown, 2)


def refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="its values are partial sums"):
        NormControl(
            torch.optim.SGD([nn.Parameter(DTensor.from_local(W, mesh, [Partial()]))], lr=1.0)
        )
    ragged = DTensor.from_local(
        W[: 1 + dist.get_rank()], mesh, [Shard(0)], shape=torch.Size((3, 2)), stride=(2, 1)
    )
    _, opt = controlled(ragged, ratio=2.0)
    opt.step()
    # Rank 0 has a row of norm 5; rank 1 has rows of norms 5 and 0.
    assert abs(opt.norms()["global"].norm.item() - 2 * 50**0.5) < 1e-12
    with pytest.raises(ValueError, match=r"not how torch.chunk splits it"):
        controlled(ragged, norm=2.0, scope="row")


def test_dtensors_without_a_norm_are_refused():
    run(refused, 2)


def copies() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Model()
        shard("tensor parallel", model)
        opt = optimizer(model, "global", "after")
        train(model, opt, steps=range(2))
        twin, opt2 = copy.deepcopy((model, opt))
        train(model, opt, steps=range(2, 4))
        train(twin, opt2, steps=range(2, 4))
    assert all(
        torch.equal(
            p.to_local() if hasattr(p, "to_local") else p,
            q.to_local() if hasattr(q, "to_local") else q,
        )
        for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_a_copy_of_a_sharded_optimizer_continues_in_the_same_bits():
    run(copies, 2)
