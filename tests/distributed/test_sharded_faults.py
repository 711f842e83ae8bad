"""When a rank dies or hangs: a clear error within the process group's timeout, and a resume on
fewer ranks to the same result."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run
from spread import Model, optimizer, relative, shard, train, whole
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

STEPS = 8
TIMEOUT = {"dies": 120, "hangs": 20}
"""In seconds. A rank that dies is noticed at once: then a slow machine has all the time it needs."""


def train_with_checkpoints(folder: str, fault: str | None) -> tuple[str, float] | list[Tensor]:
    """Resume from the last save if there is one, and train, saving after every second step. With a
    fault, the last rank fails in its sixth step."""
    model = Model()
    part = shard("fsdp", model)
    opt = optimizer(model, "global", "after")
    saved = sorted(
        int(path.name) for path in Path(folder).iterdir() if (path / ".metadata").exists()
    )
    if saved:
        weights, state = get_state_dict(model, opt)
        dcp.load({"model": weights, "opt": state}, checkpoint_id=Path(folder, str(saved[-1])))
        set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)
    for step in range(saved[-1] if saved else 0, STEPS):
        failing = fault is not None and step == 5
        if failing:
            opt.register_step_pre_hook(lambda *_: fail(fault))
        begun = time.monotonic()
        try:
            train(model, opt, *part, steps=range(step, step + 1))
        except RuntimeError as error:
            return str(error), time.monotonic() - begun
        if step % 2:
            weights, state = get_state_dict(model, opt)
            dcp.save({"model": weights, "opt": state}, checkpoint_id=Path(folder, str(step + 1)))
    return [whole(p) for p in model.parameters()]


def fail(fault: str | None) -> None:
    """Fail on the last rank, between the gradients and the norms: only the collective of the
    controller can notice it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        if fault == "hangs":
            time.sleep(2 * TIMEOUT[fault])
        os._exit(1)


@pytest.mark.parametrize("fault", ["dies", pytest.param("hangs", marks=pytest.mark.slow)])
def test_a_lost_rank_is_an_error_within_the_timeout_and_fewer_ranks_finish_the_run(tmp_path, fault):
    limit = TIMEOUT[fault]
    *others, _ = run(train_with_checkpoints, 4, str(tmp_path), fault, timeout=limit, died=(3,))
    for message, seconds in others:
        assert "The norms could not be summed over the ranks [0, 1, 2, 3]" in message
        assert "resume from the last checkpoint" in message
        assert seconds < 2 * limit
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4"]
    alone = Model()
    train(alone, optimizer(alone, "global", "after"), steps=range(STEPS))
    for resumed in run(train_with_checkpoints, 2, str(tmp_path), None):
        for p, q in zip(alone.parameters(), resumed, strict=True):
            assert relative(q, p.detach()) < 1e-6
