"""Tests of what a run logs about its weights at each evaluation: norms of classes of tensors, the
angle of a step, and the effective decay."""

from __future__ import annotations

import math

import pytest
import torch

from normcontrol.lab.training import checkpoint, metrics
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.optimizers import lr_at

CLASSES = {"wte", "wpe", "h.*.attn.c_attn", "h.*.attn.c_proj", "h.*.mlp.c_fc", "h.*.mlp.c_proj"}


def evaluated(out):
    return [line for line in metrics.read(out) if "val_loss" in line]


def test_norms_by_class_are_logged_at_every_evaluation(config, tmp_path):
    assert train(config, tmp_path / "run")
    lines = evaluated(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 6, 12]
    assert all({k[5:-7] for k in line if k.startswith("norm/")} == CLASSES for line in lines)
    weights = checkpoint.load(checkpoint.latest(tmp_path / "run/checkpoints"))["model"]
    assert lines[-1]["norm/wte.weight"] == pytest.approx(
        weights["wte.weight"].norm().item(), rel=1e-6
    )
    ratio = next(
        line["ratio"] for line in reversed(metrics.read(tmp_path / "run")) if "ratio" in line
    )
    first, last = (
        math.sqrt(sum(v**2 for k, v in line.items() if k.startswith("norm/")))
        for line in (lines[0], lines[-1])
    )
    assert last / first == pytest.approx(ratio, rel=1e-6)


def test_the_angle_of_a_step_is_logged(config, tmp_path):
    config = config.with_(steps=6, eval_every=5, checkpoint_every=5)
    assert train(config, tmp_path / "run")
    before, after = sorted((tmp_path / "run/checkpoints").glob("step-*.pt"))
    flat = [
        torch.cat(
            [w.double().flatten() for w in checkpoint.load(p)["model"].values() if w.dim() > 1]
        )
        for p in (before, after)
    ]
    angle = torch.acos(torch.dot(*flat) / flat[0].norm() / flat[1].norm())
    assert evaluated(tmp_path / "run")[-1]["angle"] == pytest.approx(angle.item(), rel=1e-3)


def test_the_effective_decay_is_logged_under_norm_control(config, tmp_path):
    for name, changes in (
        ("AdamW", {}),
        ("AdamWN", {"ratio": 1.0, "ramp": 0}),
        ("AdamC", {"weight_decay": 0.3}),
    ):
        assert train(config.with_(optimizer=name, **changes), tmp_path / name)
    assert "decay" not in evaluated(tmp_path / "AdamW")[-1]  # its decay is in the config
    lr = lr_at(config, 6)
    assert evaluated(tmp_path / "AdamC")[1]["decay"] == pytest.approx(
        0.3 * lr / config.optim.lr, rel=1e-3
    )
    assert evaluated(tmp_path / "AdamWN")[1]["decay"] > 0.3  # without control the norm would grow
