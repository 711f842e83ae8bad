"""Gains and ``set_norm_`` under sharding: outputs are those of the whole tensor, on every rank."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from processes import run
from spread import shard, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from normcontrol import AdamWN, NormControl, set_norm_
from normcontrol.set_norm import WHOLE

FLAT = "_fsdp_flattened"


def spread_over_two() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    w = torch.randn(5, 4)  # three rows on the first rank and two on the second

    # The outputs are the five rows of the tensor, not those of a shard, whatever axis is cut.
    for placement in (Shard(0), Shard(1)):
        for scope, expected in (("global", math.sqrt(5)), ("row", 1.0), ("col", math.sqrt(5 / 4))):
            p = nn.Parameter(distribute_tensor(w.clone(), mesh, [placement]))
            p.grad = torch.zeros_like(p)
            opt = NormControl(torch.optim.SGD([p], lr=1.0), gain=0.5, rate=1.0, scope=scope)
            opt.step()
            (reading,) = opt.norms().values()
            wanted = torch.full_like(reading.norm, 0.5 * expected)
            assert torch.allclose(reading.norm, wanted, rtol=1e-6), (placement, scope)
            axis = {"global": None, "row": 1, "col": 0}[scope]
            norm = whole(p).norm() if axis is None else whole(p).norm(dim=axis)
            assert torch.allclose(norm.double(), wanted, rtol=1e-6), (placement, scope)

    # A model under FSDP2 is set to the same weights as on one process, and a second call changes
    # nothing.
    alone = nn.Sequential(nn.Linear(8, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    several = copy.deepcopy(alone)
    shard("fsdp", several)
    for scope in ("global", "tensor", "row"):
        set_norm_(alone, gain=0.8, scope=scope)
        set_norm_(several, gain=0.8, scope=scope)
        for p, q in zip(alone.parameters(), several.parameters(), strict=True):
            assert torch.allclose(whole(q), p, rtol=1e-6), scope
        before = [whole(q).clone() for q in several.parameters()]
        set_norm_(several, gain=0.8, scope=scope)
        assert all(map(torch.equal, before, map(whole, several.parameters()))), scope
    held = AdamWN(several.parameters(), gain=0.8).norms()["global"]
    assert (
        held.target.item() == AdamWN(alone.parameters(), gain=0.8).norms()["global"].target.item()
    )

    # Zeros are refused on all ranks, also if only one of them has the row of zeros.
    zero_row = torch.ones(4, 3)
    zero_row[3] = 0.0
    p = nn.Parameter(distribute_tensor(zero_row, mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="is zero, in whole or in a part"):
        set_norm_([p], gain=1.0, scope="row")
    assert torch.equal(whole(p), zero_row)

    # Shards that are plain tensors are refused, with advice that can be followed.
    for mark, shape in (("tensor_model_parallel", (4, 3)), ("ds_id", (4, 3)), (FLAT, (12,))):
        p = nn.Parameter(torch.ones(shape))
        setattr(p, mark, True)
        says = "is a flat parameter of FSDP1" if mark == FLAT else "is this rank's shard of"
        with pytest.raises(ValueError, match=f"tensor0 {says}") as caught:
            set_norm_([p], norm=1.0)
        assert str(caught.value).endswith(WHOLE)
        assert torch.equal(p, torch.ones(shape))
    p = nn.Parameter(torch.ones(0))
    p.ds_shape = (4, 3)
    with pytest.raises(ValueError, match="a parameter of DeepSpeed's ZeRO-3") as caught:
        set_norm_([p], norm=1.0)
    assert str(caught.value).endswith(WHOLE)

    # Stages of a pipeline: the norm is that of both, and so are the outputs of the target and of
    # the report.
    stage = nn.Parameter(torch.ones(4 if dist.get_rank() == 0 else 12, 9))
    opt = NormControl(
        torch.optim.SGD([stage], lr=1.0), gain=0.5, rate=0.5, norm_group=dist.group.WORLD
    )
    for gain in (3.0, 1.75):  # half of the way from 3 to 0.5
        *_, line = opt.report().splitlines()
        assert line.split()[3:] == [
            f"{12:.4g}",
            f"{4 * gain:.4g}",
            f"{gain:.4f}",
            f"{gain / 3:.4f}",
            "2",
        ]
        stage.grad = torch.zeros_like(stage)
        opt.step()


def test_a_gain_counts_the_outputs_of_whole_tensors():
    run(spread_over_two, 2)
