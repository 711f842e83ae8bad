"""Optional mechanisms and laws with memory under sharding: the weights are those of one process,
what a start or a law remembers survives a checkpoint, and settings drawn at random agree too."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run
from spread import Model, gathered, relative, shard, train, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from normcontrol import AdamWN, NormControl, linear, lr_times
from normcontrol.mechanisms import start

Settings = dict[str, Any]
Trained = tuple[list[Tensor], dict[str, Tensor], list[Tensor]]

HALF, STEPS = 6, 12
START: Settings = {"start": 3, "ratio": 1.2, "rate": 0.3}
INFLECTION: Settings = {"start": "inflection", "ratio": 0.9, "rate": 0.5, "law": "upper"}
CAUTIOUS: Settings = {"cautious": True, "ratio": 0.0, "rate": lr_times(3.0)}
INTEGRAL: Settings = {"law": "integral", "ratio": 0.5, "rate": 0.02}
SCOPES = ["global", "group", "tensor", "row", "col"]
STAGE = {"up": 0, "down": 0, "norm": 1, "experts": 1, "head": 1}
"""The pipeline stage of every layer, for the layout "stages"."""


@pytest.fixture(autouse=True)
def _samples_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "SAMPLED_EVERY", 2)


def controlled(model: nn.Module, settings: Settings, layout: str = "whole") -> AdamWN:
    """AdamWN with the matrices and the experts in a group each; the rest is not controlled."""
    named = list(model.named_parameters())
    if layout == "stages":
        named = [(n, p) for n, p in named if STAGE[n.split(".")[0]] == dist.get_rank()]
    by_dim: list[list[Any]] = [[(n, p) for n, p in named if p.dim() == dim] for dim in (1, 2, 3)]
    if layout == "stages":  # torch refuses an empty group beside one with names
        by_dim = [[p for _, p in some] for some in by_dim]
    rest, matrices, experts = by_dim
    groups = [
        {"params": matrices, **settings},
        {"params": experts, **settings},
        {"params": rest, "controlled": False},
    ]
    if layout != "stages":
        return AdamWN(groups, lr=1e-2)
    opt = AdamWN(groups, lr=1e-2, norm_group=dist.group.WORLD)

    def broadcast(*_: Any) -> None:
        for n, p in model.named_parameters():
            dist.broadcast(p.detach(), src=STAGE[n.split(".")[0]])
            p.grad = None  # also those of the other stage, which are clipped together

    opt.register_step_post_hook(broadcast)
    return opt


def result(model: nn.Module, opt: NormControl) -> Trained:
    """The weights, the norms, and what the groups store of every norm."""
    stored = [
        group["control"][name].clone()
        for group in opt.state_dict()["param_groups"]
        for name in ("reference", "memory")
        if name in group["control"]
    ]
    norms = {name: reading.norm for name, reading in opt.norms().items()}
    return [whole(p).clone() for p in model.parameters()], norms, stored


def on_one_process(settings: Settings) -> Trained:
    model = Model()
    opt = controlled(model, settings)
    train(model, opt, steps=range(STEPS))
    return result(model, opt)


def assert_close(got: Trained, expected: Trained, case: Any) -> None:
    weights, norms, stored = expected
    for p, q in zip(got[0], weights, strict=True):
        assert relative(p, q) < 1e-6, case
    for name, norm in got[1].items():
        assert relative(norm, norms[name]) < 1e-6, (case, name)
    for p, q in zip(got[2], stored, strict=True):
        if case[0] == "stages" and p.shape != q.shape:  # one norm for each group
            q = q.norm().reshape(1)
        assert p.shape == q.shape, case
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-7), case


def save(model: nn.Module, opt: NormControl, folder: Path) -> None:
    weights, state = get_state_dict(model, opt)
    dcp.save({"model": weights, "opt": state}, checkpoint_id=folder)


def resume(model: nn.Module, opt: NormControl, folder: Path) -> None:
    weights, state = get_state_dict(model, opt)
    dcp.load({"model": weights, "opt": state}, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)


Case = tuple[str, Settings]


def compare(cases: Sequence[tuple[Case, Trained]], folder: str | None = None) -> None:
    """Train every case. With a folder save it half-way, and resume it to the same bits."""
    start.SAMPLED_EVERY = 2
    for i, (case, alone) in enumerate(cases):
        layout, settings = case
        model = Model()
        part = (0, 1) if layout == "stages" else shard(layout, model)
        opt = controlled(model, settings, layout)
        train(model, opt, *part, steps=range(HALF))
        if folder is not None and layout != "stages":
            save(model, opt, Path(folder, str(i)))
        half = copy.deepcopy((model.state_dict(), opt.state_dict()))
        train(model, opt, *part, steps=range(HALF, STEPS))
        got = result(model, opt)
        assert_close(got, alone, case)
        gathered(opt)
        if folder is None:
            continue

        again = Model()
        if layout != "stages":
            shard(layout, again)
        opt = controlled(again, {**settings, "ratio": 3.0}, layout)  # replaced by what was saved
        if layout == "stages":
            again.load_state_dict(half[0])
            opt.load_state_dict(half[1])
        else:
            resume(again, opt, Path(folder, str(i)))
        train(again, opt, *part, steps=range(HALF, STEPS))
        (weights, _, stored) = result(again, opt)
        assert all(torch.equal(p, q) for p, q in zip(weights, got[0], strict=True)), case
        assert all(torch.equal(p, q) for p, q in zip(stored, got[2], strict=True)), case


def resume_whole(cases: Sequence[tuple[Case, Trained]], folder: str) -> None:
    """Resume on one process what two have saved."""
    start.SAMPLED_EVERY = 2
    for i, (case, alone) in enumerate(cases):
        if case[0] != "stages":
            model = Model()
            opt = controlled(model, case[1])
            resume(model, opt, Path(folder, str(i)))
            train(model, opt, steps=range(HALF, STEPS))
            assert_close(result(model, opt), alone, case)


def test_starts_and_laws_with_memory_are_those_of_one_process_and_survive_a_checkpoint(tmp_path):
    layouts = [("fsdp", "global"), ("fsdp", "tensor"), ("fsdp", "row"), ("stages", "group")]
    cases: list[Case] = [
        (layout, {**settings, "scope": scope})
        for layout, scope in layouts
        for settings in (START, INFLECTION)
    ]
    cases += [("tensor parallel", {**INTEGRAL, "scope": scope}) for scope in ("row", "col")]
    expected = [(case, on_one_process(case[1])) for case in cases]
    stored = next(e[2] for c, e in expected if c[1] == {**INFLECTION, "scope": "row"})
    started = stored[1][-1]
    assert started.any()  # some rows have started, and some not yet
    assert not started.all()
    run(compare, 2, expected, str(tmp_path))
    run(resume_whole, 1, expected, str(tmp_path))


def draw(seed: int) -> Case:
    """Settings that can be used together, by chance."""
    rng = random.Random(seed)
    layout = rng.choice(["fsdp", "fsdp with ignored parameters", "tensor parallel", "stages"])
    scope = rng.choice(SCOPES[:2] if layout == "stages" else SCOPES)
    target = rng.choice([{"ratio": 1.3}, {"ratio": linear(1.0, 0.6, steps=8)}, {"rms": 0.5}])
    laws = ["proportional", "upper", "lower", "band(0.5)", "projection", "integral"]
    law = rng.choice(laws)
    rate = 0.02 if law == "integral" else rng.choice([0.05, 0.3, lr_times(10.0)])
    settings: Settings = {**target, "scope": scope, "law": law, "rate": rate}
    if "ratio" in target:
        settings["start"] = rng.choice([0, 0, 3, "inflection"])
    if rng.random() < 0.3:
        return layout, {**settings, "cautious": True}
    return layout, {**settings, "order": rng.choice(["after", "before"])}


def test_settings_drawn_at_random_train_as_on_one_process():
    cases: list[Case] = [("fsdp", {**CAUTIOUS, "scope": scope}) for scope in SCOPES]
    cases += [("stages", {**CAUTIOUS, "scope": "global"}), *map(draw, range(16))]
    run(compare, 2, [(case, on_one_process(case[1])) for case in cases])


def on_kernels(cases: Sequence[tuple[Case, Trained]]) -> None:
    compare(cases)
    model = Model()
    shard("fsdp", model)
    assert controlled(model, START).implementation == "Triton kernels"


@pytest.mark.slow
def test_the_kernels_start_alike_with_shards_under_the_interpreter():
    pytest.importorskip("triton")
    chosen = ((START, "global"), (INFLECTION, "tensor"), (CAUTIOUS, "global"))
    cases = [("fsdp", {**settings, "scope": scope}) for settings, scope in chosen]
    expected = [(case, on_one_process(case[1])) for case in cases]
    run(on_kernels, 2, expected, TRITON_INTERPRET="1")


def refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    for settings in ({"relative_step": 0.1}, {"size": "spectral", "scope": "tensor"}):
        with pytest.raises(ValueError, match="cannot be used for weights that are spread over"):
            NormControl(torch.optim.SGD([p], lr=0.1), ratio=1.0, **settings)


def test_mechanisms_that_need_whole_tensors_are_refused():
    run(refused, 2)


def changed(how: str, mesh: Any = None) -> list[Tensor]:
    """Weights that are trained relative to their rows at step 2, and whose list is changed then."""

    def weights(rows: int) -> nn.Parameter:
        values = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        return nn.Parameter(values if mesh is None else distribute_tensor(values, mesh, [Shard(0)]))

    params = [weights(5), weights(6)]
    opt = NormControl(torch.optim.SGD(params, lr=0.1), start=2, ratio=0.9, rate=0.5, scope="row")
    listed = opt.param_groups[0]["params"]
    for step in range(6):
        if step == 4:
            if how == "replaced after a group was added":  # whose sets have made no step
                opt.add_param_group({"params": [weights(2)], "controlled": False})
            listed[:] = {
                "added": [*listed, weights(3)],
                "removed": listed[1:],
            }.get(how, [weights(7), listed[1]])
        for p in listed:
            p.grad = p.detach().clone()
        opt.step()
    return [whole(p).clone() for p in listed]


def compare_changed(expected: dict[str, list[Tensor]]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for how, alone in expected.items():
        for p, q in zip(changed(how, mesh), alone, strict=True):
            assert relative(p, q) < 1e-6, how


def test_references_of_a_start_are_carried_over_when_sharded_tensors_change() -> None:
    """Each rank knows those of its own rows: they are gathered before the list is read."""
    ways = "added", "replaced", "removed", "replaced after a group was added"
    run(compare_changed, 2, {how: changed(how) for how in ways})
