"""Tests of the training loop on a GPU, where the optimizer step is launched before the host has
checked that the loss is finite. They need CUDA."""

from __future__ import annotations

import math

import pytest
import torch

from normcontrol.lab.training import checkpoint, loop, metrics
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.model import GPT

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.fixture
def poisoned(monkeypatch):
    """Patches the model so that the loss of the third step is NaN."""
    calls, forward = [0], GPT.forward

    def poison(model, tokens, targets=None):
        loss = forward(model, tokens, targets)
        calls[0] += model.training
        return loss * math.nan if model.training and calls[0] % 12 == 3 else loss

    monkeypatch.setattr(GPT, "forward", poison)


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamWN", "AdamH", "CPR-kI0", "SGD"])
def test_steps_launched_before_the_check_give_the_same_weights(
    optimizer, config, tmp_path, monkeypatch, poisoned
):
    ends = []
    for early in (True, False):
        if not early:
            monkeypatch.setattr(loop, "steps_early", lambda optimizers, device: False)
        out = tmp_path / str(early)
        assert train(
            config.with_(optimizer=optimizer, device="cuda", compile=False, precision="fp32"), out
        )
        assert [line["skipped"] for line in metrics.read(out) if "skipped" in line] == [1]
        ends.append(checkpoint.load(checkpoint.latest(out / "checkpoints"))["model"])
    assert all(torch.isfinite(weight).all() for weight in ends[0].values())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


def test_the_loss_of_a_compiled_run_in_bf16_falls(config, tmp_path):
    assert train(config.with_(optimizer="AdamWN", device="cuda", steps=40), tmp_path / "run")
    losses = [line["val_loss"] for line in metrics.read(tmp_path / "run") if "val_loss" in line]
    assert losses[-1] < 0.8 * losses[0]


def test_a_run_leaves_the_precision_of_matrix_products_as_it_found_it(config, tmp_path):
    before = torch.get_float32_matmul_precision()
    assert train(config.with_(device="cuda", compile=False), tmp_path / "run")
    assert torch.get_float32_matmul_precision() == before == "highest"
