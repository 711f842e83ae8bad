"""torch.distributed.checkpoint: a run saved on some number of ranks and resumed on another ends in
the same result, and the reference norms are restored exactly."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run
from spread import Model, optimizer, relative, shard, train, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from normcontrol import AdamWN, NormControl

HALF, STEPS = 4, 8
CASES = [("global", "after", False), ("row", "before", True)]  # and flattened or not


def spread_over_all(model: nn.Module) -> tuple[int, int]:
    """Spread the model with FSDP2 if there are several ranks. Returns this rank's share of each
    batch."""
    return shard("fsdp", model) if dist.get_world_size() > 1 else (0, 1)


def references(opt: AdamWN) -> list[Tensor]:
    return [group["control"]["reference"].clone() for group in opt.param_groups]


def save_half_way(folder: str) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Train and save half-way. Returns the references and final weights of the uninterrupted
    runs."""
    results = []
    for scope, order, flatten in CASES:
        model = Model()
        part = spread_over_all(model)
        opt = optimizer(model, scope, order)
        train(model, opt, *part, steps=range(HALF))
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        weights, state = get_state_dict(model, opt, options=options)
        dcp.save({"model": weights, "opt": state}, checkpoint_id=Path(folder, scope))
        train(model, opt, *part, steps=range(HALF, STEPS))
        results.append((references(opt), [whole(p) for p in model.parameters()]))
    return results


def resume(folder: str, expected: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    for (scope, order, flatten), (norms, final) in zip(CASES, expected, strict=True):
        model = Model()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3.0)
        part = spread_over_all(model)
        opt = optimizer(model, scope, order, ratio=1.0, rate=0.5)  # replaced by the stored settings
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        weights, state = get_state_dict(model, opt, options=options)
        dcp.load({"model": weights, "opt": state}, checkpoint_id=Path(folder, scope))
        set_state_dict(
            model, opt, model_state_dict=weights, optim_state_dict=state, options=options
        )
        assert all(torch.equal(a, b) for a, b in zip(references(opt), norms, strict=True)), scope
        assert all(int(group["control"]["step"]) == HALF for group in opt.param_groups)
        train(model, opt, *part, steps=range(HALF, STEPS))
        for (name, p), q in zip(model.named_parameters(), final, strict=True):
            assert relative(whole(p), q) < 1e-6, (scope, name)


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [
        (4, [2, 1]),
        pytest.param(2, [4], marks=pytest.mark.slow),
        pytest.param(1, [4, 2], marks=pytest.mark.slow),
    ],
)
def test_a_run_saved_on_some_ranks_resumes_on_others_to_the_same_result(
    tmp_path, saved_on, loaded_on
):
    expected = run(save_half_way, saved_on, str(tmp_path))[0]
    for ranks in loaded_on:
        run(resume, ranks, str(tmp_path), expected)


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    """A state dict with one level of names, and with whole tensors in place of DTensors."""
    if isinstance(state, dict):
        return {
            k: v for key, value in state.items() for k, v in flat(value, f"{prefix}.{key}").items()
        }
    if isinstance(state, list) and prefix.endswith("param_groups"):
        return {
            k: v for i, value in enumerate(state) for k, v in flat(value, f"{prefix}.{i}").items()
        }
    if isinstance(state, tuple):
        state = list(state)  # torch turns tuples such as betas into lists
    return {prefix: whole(state).cpu().clone() if isinstance(state, Tensor) else state}


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The names under which two states differ."""
    both = [k for k in a if k in b]
    return [k for k in {**a, **b} if k not in both] + [
        k
        for k in both
        if not (torch.equal(a[k], b[k]) if isinstance(a[k], Tensor) else a[k] == b[k])
    ]


def every_option() -> dict[Any, Any]:
    """Get the state with every combination of options, and set it with each combination that torch
    supports for its own AdamW. Returns the full states of rank 0."""
    rank = dist.get_rank()
    whole_states = {}
    for scope, layout in ((0, 1), "fsdp"), ("global", "tensor parallel"):
        model = Model()
        part = shard(layout, model)
        opt = optimizer(model, scope, "after")
        train(model, opt, *part, steps=range(3))
        before = flat(get_optimizer_state_dict(model, opt))
        weights = [whole(p).clone() for p in model.parameters()]
        for full, offload, flatten, broadcast in itertools.product((False, True), repeat=4):
            if broadcast and not full:
                continue  # torch: only a full state can be broadcast
            options = StateDictOptions(
                full_state_dict=full,
                cpu_offload=offload,
                flatten_optimizer_state_dict=flatten,
                broadcast_from_rank0=broadcast,
            )
            state = get_optimizer_state_dict(model, opt, options=options)
            if full and offload:
                assert bool(state) == (rank == 0)
            if full and flatten:  # torch can set these states in a single process only
                whole_states[scope, layout, offload, broadcast] = dict(state)
                continue
            if full and offload and not broadcast:
                continue  # the other ranks have no state, and it is not broadcast to them
            other = Model()
            with torch.no_grad():
                for p in other.parameters():
                    p.mul_(2.0)
            shard(layout, other)
            fresh = optimizer(other, scope, "after", rate=0.9)
            was = [whole(p).clone() for p in other.parameters()]
            set_optimizer_state_dict(
                other, fresh, {} if broadcast and rank > 0 else state, options=options
            )
            case = (scope, layout, full, offload, flatten, broadcast)
            assert not differences(flat(get_optimizer_state_dict(other, fresh)), before), case
            assert all(
                torch.equal(whole(p), q) for p, q in zip(other.parameters(), was, strict=True)
            ), case  # the dummy step moved nothing
        assert not differences(flat(get_optimizer_state_dict(model, opt)), before)
        assert all(
            torch.equal(whole(p), q) for p, q in zip(model.parameters(), weights, strict=True)
        )
        whole_states[scope, layout] = before
    return whole_states


def test_every_option_of_the_state_dict_restores_the_same_state():
    states = run(every_option, 2)[0]
    flattened = [key for key in states if len(key) == 4]
    assert len(flattened) == 2 * 4
    for scope, layout, offload, broadcast in flattened:
        state = states[scope, layout, offload, broadcast]
        model = Model()
        opt = optimizer(model, scope, "after", rate=0.9)
        set_optimizer_state_dict(
            model, opt, state, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )
        assert not differences(flat(get_optimizer_state_dict(model, opt)), states[scope, layout]), (
            scope,
            layout,
        )


def dummy_step() -> None:
    """Getting the state before the first step, or at any time if the optimizer has no state, makes
    torch run a dummy step. It must change nothing."""
    kinds: list[Any] = [
        lambda m: AdamWN(m.parameters(), ratio=2.0, rate=1.0),
        lambda m: AdamWN(m.parameters(), lr=torch.tensor(1e-3), ratio=2.0, rate=1.0),
        lambda m: AdamWN(m.parameters(), ratio=2.0, rate=1.0, order="before", scope="row"),
        lambda m: NormControl(torch.optim.SGD(m.parameters(), lr=0.1), ratio=2.0, rate=1.0),
    ]
    for make in kinds:
        model = Model()
        part = shard("fsdp", model)
        opt = make(model)
        for step in range(2):
            before = [whole(p).clone() for p in model.parameters()]
            calls = int(opt.param_groups[0]["control"]["step"])
            opt.zero_grad()
            get_optimizer_state_dict(model, opt)
            assert all(
                torch.equal(whole(p), q) for p, q in zip(model.parameters(), before, strict=True)
            )
            assert int(opt.param_groups[0]["control"]["step"]) == calls == step
            train(model, opt, *part, steps=range(step, step + 1))
        assert not torch.equal(whole(model.up.weight), before[0])
    # A step with a learning rate of zero is not a dummy step, on any rank. Rank 1 has no elements
    # of this matrix and its gradient.
    for rate in (0.0, 0.1):
        model = nn.Linear(4, 1, bias=False)
        initial = model.weight.detach().clone()
        shard("fsdp", model)
        opt = NormControl(torch.optim.SGD(model.parameters(), lr=rate), ratio=2.0, rate=1.0)
        model(torch.zeros(2, 4) if rate else torch.ones(2, 4)).sum().backward()
        opt.step()
        assert relative(whole(model.weight), 2 * initial) < 1e-6


def test_the_dummy_step_of_a_checkpoint_does_not_move_weights():
    run(dummy_step, 2)


def save_in_the_background(folder: str) -> None:
    model = Model()
    part = shard("fsdp", model)
    opt = optimizer(model, "global", "after")
    train(model, opt, *part, steps=range(HALF))
    weights, state = get_state_dict(model, opt)
    expected = flat(state), flat(weights)
    # A separate process group, so that the collectives of training and of the save do not mix.
    group = dist.new_group(backend="gloo")
    saving = dcp.async_save(
        {"model": weights, "opt": state}, checkpoint_id=folder, process_group=group
    )
    train(model, opt, *part, steps=range(HALF, STEPS))  # while the checkpoint is being written
    saving.result()

    model = Model()
    shard("fsdp", model)
    opt = optimizer(model, "global", "after")
    weights, state = get_state_dict(model, opt)
    dcp.load({"model": weights, "opt": state}, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)
    assert not differences(flat(get_optimizer_state_dict(model, opt)), expected[0])
    assert not differences(flat(get_model_state_dict(model)), expected[1])
    assert int(opt.param_groups[0]["control"]["step"]) == HALF


def test_a_save_in_the_background_contains_the_state_at_the_call(tmp_path):
    run(save_in_the_background, 2, str(tmp_path))
