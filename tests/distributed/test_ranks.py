"""Norms are summed over process groups of any backend, also those that torch tests itself with."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn import Parameter

from normcontrol import AdamWN
from normcontrol.distributed.ranks import Ranks, devices_of, sum_over_ranks


def sharded_step(mesh, scope) -> dict[str, float]:
    p = Parameter(distribute_tensor(torch.arange(1.0, 9.0).view(4, 2), mesh, [Shard(0)]))
    opt = AdamWN([p], lr=0.0, ratio=2.0, rate=1.0, scope=scope)
    p.grad = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    opt.step()
    return {name: reading.norm.tolist() for name, reading in opt.norms().items()}


def test_threads_in_place_of_processes():
    testing = pytest.importorskip("torch.testing._internal.common_distributed")
    found = []

    @testing.spawn_threads_and_init_comms(world_size=2)
    def work(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        found.append([sharded_step(mesh, scope) for scope in ("global", "row")])

    work(None)
    whole = torch.arange(1.0, 9.0, dtype=torch.float64).view(4, 2)
    assert len(found) == 2
    for joint, rows in found:
        assert joint["global"] == pytest.approx(2 * whole.norm().item())
        assert rows["group0.tensor0"] == pytest.approx((2 * whole.norm(dim=1)).tolist())


def test_a_group_that_only_pretends_to_communicate():
    """What other ranks would add is missing: the norm is that of the first shard."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=4)
    try:
        assert "cpu" in devices_of(dist.group.WORLD)
        norms = sharded_step(init_device_mesh("cpu", (4,)), "global")
        assert norms["global"] == pytest.approx(2 * 5**0.5)
    finally:
        dist.destroy_process_group()


def test_values_are_sent_from_where_they_are_if_the_devices_of_a_group_are_not_known(monkeypatch):
    group, sent = object(), []
    assert devices_of(group) == []
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: sent.append(values))
    values = torch.ones(2)
    assert sum_over_ranks(values, Ranks(group, frozenset({0}))) is values
    assert sent[0] is values
