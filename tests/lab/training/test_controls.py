"""The controls of studies do what their names say."""

from __future__ import annotations

import json
import math

import pytest
import torch

from normcontrol.lab.errors import LabError
from normcontrol.lab.training.config import Config, Model
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.model import GPT
from normcontrol.lab.training.optimizers import build, lr_at


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def last(folder, key):
    return [line[key] for line in lines(folder) if key in line][-1]


def stepped(config, lr=0.5):
    """The matrices before and after a step without gradients: what is left is the decay."""
    model = GPT.initialised(config.model, 64)
    (opt,) = build(config, model)
    for group in opt.param_groups:
        group["lr"] = lr
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = [p.detach().clone() for p in model.matrices()]
    opt.step()
    return before, list(model.matrices())


SHAPE = Config(Model(layers=1, heads=1, width=8, context=4))


def test_the_decay_follows_the_root_of_the_learning_rate():
    config = SHAPE.with_(optimizer="AdamW-sqrt", lr=2.0, weight_decay=0.1)
    before, after = stepped(config)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new.detach(), old * (1 - 0.1 * math.sqrt(2.0 * 0.5)))


def test_weights_shrink_and_grow_as_recorded_whatever_the_learning_rate_is():
    config = SHAPE.with_(optimizer="AdamW-replay", replay=(-0.25, 0.25), steps=2)
    before, after = stepped(config)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new.detach(), old * 1.25)


def test_a_replay_of_a_run_with_its_own_seed_repeats_it(config, tmp_path):
    run = config.with_(optimizer="AdamWN", gain=0.6, init_gain=0.8, steps=30)
    assert train(run, tmp_path / "run")
    shrinks = tuple(
        line["decay"] * lr_at(run, line["step"])
        for line in lines(tmp_path / "run")
        if "decay" in line
    )
    assert len(shrinks) == 30
    replay = run.with_(optimizer="AdamW-replay", gain=None, replay=shrinks)
    assert train(replay, tmp_path / "replay")
    assert train(replay.with_(replay=(0.0,)), tmp_path / "nothing")
    ends = {name: last(tmp_path / name, "ratio") for name in ("run", "replay", "nothing")}
    assert ends["replay"] == pytest.approx(ends["run"], rel=1e-5)
    assert ends["nothing"] > 1.1 * ends["run"]
    assert last(tmp_path / "replay", "val_loss") == pytest.approx(
        last(tmp_path / "run", "val_loss"), abs=1e-4
    )


def test_a_stopped_replay_goes_on_where_it_was(config, tmp_path):
    replay = config.with_(optimizer="AdamW-replay", replay=tuple(0.01 * i for i in range(1, 13)))
    assert train(replay, tmp_path / "whole")
    assert train(replay, tmp_path / "again")
    for path in sorted((tmp_path / "again/checkpoints").iterdir())[1:]:
        if path.is_file():
            path.unlink()
    assert train(replay, tmp_path / "again", resume=True)
    assert lines(tmp_path / "again") == lines(tmp_path / "whole")


def test_steps_are_relative_to_the_norm_of_the_weights():
    moved = {}
    for scale in (1.0, 3.0):
        config = SHAPE.with_(optimizer="AdamW-angle", gain=0.5, weight_decay=0.0, init_scale=scale)
        model = GPT.initialised(config.model, 64)
        with torch.no_grad():
            for p in model.matrices():
                p.mul_(scale)
        (opt,) = build(config, model)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = [p.detach().clone() for p in model.matrices()]
        opt.step()
        pairs = zip(before, model.matrices(), strict=True)
        moved[scale] = [(new.detach() - old).norm() / old.norm() for old, new in pairs]
    torch.testing.assert_close(moved[1.0], moved[3.0], rtol=1e-3, atol=0)


def test_the_norm_is_that_of_the_path_after_every_step():
    config = SHAPE.with_(optimizer="AdamWN-follow", path=(1.5, 0.5, 2.0), steps=6)
    model = GPT.initialised(config.model, 64)
    (opt,) = build(config, model)
    matrices = list(model.matrices())

    def norm():
        return torch.stack([p.detach().norm() for p in matrices]).norm()

    first, ratios = norm(), []
    for _ in range(6):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
        ratios.append(float(norm() / first))
    assert ratios == pytest.approx([1.5, 1.5, 1.0, 0.5, 1.25, 2.0], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("AdamW-replay", "has nothing to replay. Give as"),
        ("AdamW-angle", "needs the gain of the"),
        ("AdamWN-follow", "has no path to follow. Give as"),
    ],
)
def test_a_control_without_what_it_needs_is_refused(name, sentence):
    with pytest.raises(LabError, match=sentence):
        build(SHAPE.with_(optimizer=name), GPT.initialised(SHAPE.model, 64))
