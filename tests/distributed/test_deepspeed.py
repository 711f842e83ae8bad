"""DeepSpeed's ZeRO: its way to step an optimizer, imitated on tensors of our own, and DeepSpeed
itself where it is installed."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from spread import Model, batch, relative
from torch import Tensor, nn

from normcontrol import AdamWN
from normcontrol.watch.trackers import values

SETTINGS: dict[str, Any] = {"lr": 1e-2, "ratio": 1.5, "rate": 0.2}
SHAPES: list[tuple[int, ...]] = [(5, 3), (4, 2), (3,), (2,)]
HALF, STEPS = 3, 6


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups_of(params: list[Any], **rest: Any) -> list[dict[str, Any]]:
    """The matrices, which are controlled, and the vectors, which are not."""
    return [
        {"params": params[:2], "controlled": True},
        {"params": params[2:], "controlled": False, **rest},
    ]


def gradients(params: list[Tensor], step: int) -> list[Tensor]:
    """Gradients of a function of single weights, so that they can be computed for shards."""
    generator = torch.Generator().manual_seed(100 + step)
    return [0.1 * p.detach() + torch.randn(p.shape, generator=generator) for p in params]


def on_one_process(**settings: Any) -> list[Tensor]:
    params = weights()
    opt = AdamWN(groups_of(params), **{**SETTINGS, **settings})
    for step in range(STEPS):
        for p, grad in zip(params, gradients(params, step), strict=True):
            p.grad = grad
        opt.step()
    return [p.detach() for p in params]


class Zero:
    """What DeepSpeed does: the optimizer gets this rank's shard of each group as one vector, and
    steps every group in a call of its own. In stage 3 a group may be stepped in several pieces.
    With ``init`` the parameters are empty already when the optimizer is constructed."""

    def __init__(self, stage: int, init: bool = False, pieces: int = 1, **settings: Any) -> None:
        self.stage, self.pieces = stage, pieces
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        params = weights()
        self.weights = [p.detach().clone() for p in params]
        if init:
            for p in params:
                p.ds_id, p.ds_shape, p.ds_numel = id(p), p.shape, p.numel()
                p.data = torch.empty(0)
        rest = settings.pop("rest", {})
        self.opt = AdamWN(groups_of(params, **rest), **{**SETTINGS, **settings})
        self.flat = [
            [nn.Parameter(self.shard(part)) for part in torch.chunk(self.joined(i), pieces)]
            for i in range(2)
        ]
        for group, flat in zip(self.opt.param_groups, self.flat, strict=True):
            group["params"] = flat if stage < 3 else []

    def joined(self, group: int, tensors: list[Tensor] | None = None) -> Tensor:
        mine = (tensors or self.weights)[2 * group : 2 * group + 2]
        return torch.cat([t.reshape(-1) for t in mine])

    def shard(self, vector: Tensor) -> Tensor:
        padded = nn.functional.pad(vector, (0, -len(vector) % self.ranks))
        return padded.chunk(self.ranks)[self.rank].clone()

    def gathered(self, flat: Tensor) -> Tensor:
        everyones = [torch.empty_like(flat) for _ in range(self.ranks)]
        if self.ranks == 1:
            return flat.detach().clone()
        dist.all_gather(everyones, flat.detach())
        return torch.cat(everyones)

    def step(self, step: int) -> None:
        grads = gradients(self.weights, step)
        for i in range(2):
            parts = torch.chunk(self.joined(i, grads), self.pieces)
            whole = []
            for flat, grad in zip(self.flat[i], parts, strict=True):
                flat.grad = self.shard(grad)
                self.call(i, flat)
                whole.append(self.gathered(flat)[: len(grad)])
            sizes = [t.numel() for t in self.weights[2 * i : 2 * i + 2]]
            for t, new in zip(self.weights[2 * i :], torch.cat(whole).split(sizes), strict=False):
                t.copy_(new.view_as(t))

    def call(self, i: int, flat: nn.Parameter) -> None:
        groups = self.opt.param_groups
        if self.stage < 3:
            self.opt.param_groups = [groups[i]]
            self.opt.step()
            self.opt.param_groups = groups
        else:
            groups[i]["params"] = [flat]
            self.opt.step()
            groups[i]["params"] = []

    def saved(self) -> dict[str, Any]:
        """DeepSpeed shows all vectors while it saves or loads."""
        self.show(True)
        state = copy.deepcopy(self.opt.state_dict())
        self.show(False)
        return state

    def load(self, state: dict[str, Any], tensors: list[Tensor]) -> None:
        for t, new in zip(self.weights, tensors, strict=True):
            t.copy_(new)
        for i in range(2):
            self.flat[i][0].data.copy_(self.shard(self.joined(i)))
        self.show(True)
        self.opt.load_state_dict(state)
        self.show(False)

    def show(self, shown: bool) -> None:
        for group, flat in zip(self.opt.param_groups, self.flat, strict=True):
            group["params"] = flat if shown or self.stage < 3 else []


def compare(expected: list[tuple[dict[str, Any], list[Tensor]]]) -> None:
    together = {"norm_group": dist.group.WORLD}
    for settings, alone in expected:
        for stage, init in ((2, False), (3, False), (3, True)):
            zero = Zero(stage, init, **together, **settings)
            for step in range(HALF):
                zero.step(step)
            half = zero.saved(), [t.clone() for t in zero.weights]
            for step in range(HALF, STEPS):
                zero.step(step)
            for t, p in zip(zero.weights, alone, strict=True):
                assert relative(t, p) < 1e-6, (stage, init, settings)
            assert all(int(g["control"]["step"]) == STEPS for g in zero.opt.param_groups)
            again = Zero(stage, init, **together, **{**settings, "rate": 0.9})
            again.load(*half)
            for step in range(HALF, STEPS):
                again.step(step)
            assert all(
                torch.equal(t, p) for t, p in zip(again.weights, zero.weights, strict=True)
            ), (stage, init, settings)
    refusals(together)


def refusals(together: dict[str, Any]) -> None:
    def refused(words: str, *args: Any, **settings: Any) -> None:
        with pytest.raises(ValueError, match=words):
            Zero(*args, **settings).step(0)

    # ZeRO-3 empties the parameters: they are not left alone in silence.
    refused("parameter of DeepSpeed's ZeRO-3.*Give norm_group", 3, True)
    refused("parameter of DeepSpeed's ZeRO-3.*scope='global'", 3, True, scope="tensor", **together)
    matrices = {"controlled": "matrices"}
    refused("parameter of DeepSpeed's ZeRO-3.*controlled=True", 3, True, rest=matrices, **together)
    if dist.get_world_size() > 1:  # while its values are gathered, a parameter looks whole
        gathered = nn.Parameter(torch.ones(2, 2))
        gathered.ds_id = 0
        with pytest.raises(ValueError, match="a tensor that DeepSpeed's ZeRO-3 splits"):
            AdamWN([gathered])
    # Several controlled groups, pieces of one, and clipping within a step need all tensors at once.
    for scope in ("global", "group"):
        rest = {"controlled": True}
        refused("1 of them, as DeepSpeed's ZeRO", 2, rest=rest, scope=scope, **together)
        refused("1 of them, as DeepSpeed's ZeRO", 3, True, rest=rest, scope=scope, **together)
    refused("sub_group_size", 3, True, 2, **together)
    refused("max_grad_norm was given", 2, max_grad_norm=1.0, **together)
    refused("needs whole tensors", 2, scope="tensor", **together)


CASES: list[dict[str, Any]] = [{}, {"order": "before"}, {"start": 2}, {"norm": 4.0, "ratio": None}]


def test_zero_steps_the_groups_one_by_one_and_trains_as_one_process():
    expected = [(settings, on_one_process(**settings)) for settings in CASES]
    run(compare, 2, expected)
    run(compare, 1, expected[:1])


def test_zero_on_one_process_needs_no_norm_group_and_refuses_what_it_cannot_see():
    zero = Zero(2)
    for step in range(STEPS):
        if step == HALF:
            zero.load(zero.saved(), zero.weights)
        zero.step(step)
    for t, p in zip(zero.weights, on_one_process(), strict=True):
        assert relative(t, p) < 1e-6
    assert len(values(zero.opt)) == 3
    for scope in ("tensor", "row"):
        params = weights()[:2]
        opt = AdamWN([{"params": params, "controlled": True}], scope=scope)
        flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in params]))
        flat.grad = torch.ones_like(flat)
        opt.param_groups[0]["params"] = [flat]
        with pytest.raises(ValueError, match="If they are this rank's shards now, as under ZeRO"):
            opt.step()
    named = [(str(i), p) for i, p in enumerate(weights())]
    opt = AdamWN(named, controlled=lambda name, p: name == "0")
    opt.param_groups[0]["params"] = [nn.Parameter(torch.ones(8))]
    with pytest.raises(ValueError, match=r"selects 0 by name, but the group has 4 names, and 1 as"):
        opt.step()
    opt.param_groups[0]["param_names"] = ["0"]  # as the sentence says, for a change by hand
    opt.step()
    opt = AdamWN(weights())  # the matrices, which a vector is not
    opt.param_groups[0]["params"] = [nn.Parameter(torch.ones(8))]
    opt.param_groups[0]["params"][0].grad = torch.ones(8)
    with pytest.raises(ValueError, match=r"had 2 norms to control, and now it has 0"):
        opt.step()


def test_values_of_an_optimizer_that_controls_nothing_are_none():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert values(AdamWN([nn.Parameter(torch.ones(3))])) == {}


def by_name(model: nn.Module) -> list[dict[str, Any]]:
    """The groups of a model by names, since the shapes are not known under zero.Init."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        is_matrix = name == "experts" or (name.endswith("weight") and "norm" not in name)
        (matrices if is_matrix else others).append(p)
    return [{"params": others, "controlled": False}, {"params": matrices, "controlled": True}]


def with_deepspeed(folder: str) -> None:
    import deepspeed

    rank, ranks = dist.get_rank(), dist.get_world_size()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    alone = Model()
    one = AdamWN(by_name(alone), **SETTINGS)
    for i in range(STEPS):
        x, y = batch(i)
        one.zero_grad()
        (alone(x) - y).square().mean().backward()
        one.step()

    def engine(stage: int) -> tuple[Any, AdamWN]:
        config = {
            "train_micro_batch_size_per_gpu": 8 // ranks,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
        }
        model = Model()
        if stage == 3:
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = Model()
            # Its initialisation has seen empty parameters.
            with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
                for p, q in zip(model.parameters(), Model().parameters(), strict=True):
                    p.data.copy_(q)
        opt = AdamWN(by_name(model), norm_group=dist.group.WORLD, **SETTINGS)
        return deepspeed.initialize(model=model, optimizer=opt, config=config)[0], opt

    def train(trained: Any, steps: range) -> None:
        for i in steps:
            x, y = batch(i, rank, ranks)
            trained.backward((trained(x) - y).square().mean())
            trained.step()

    for stage in (1, 2, 3):
        first, _ = engine(stage)
        train(first, range(HALF))
        first.save_checkpoint(folder, tag=str(stage))
        second, opt = engine(stage)
        second.load_checkpoint(folder, tag=str(stage))
        train(second, range(HALF, STEPS))
        with deepspeed.zero.GatheredParameters(list(second.module.parameters())):
            for p, q in zip(second.module.parameters(), alone.parameters(), strict=True):
                assert relative(p.detach(), q.detach()) < 1e-6, stage
        assert relative(opt.norms()["global"].norm, one.norms()["global"].norm) < 1e-6
        assert int(opt.param_groups[0]["control"]["step"]) == STEPS


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="no DeepSpeed")
def test_deepspeed_itself_trains_as_one_process_in_every_stage(tmp_path):
    run(with_deepspeed, 2, str(tmp_path), DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
