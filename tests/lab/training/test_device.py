"""Tests of what a run asks of its device. Settings of torch are read and written without one."""

from __future__ import annotations

import pytest
import torch

from normcontrol.lab.errors import LabError
from normcontrol.lab.training.config import preset
from normcontrol.lab.training.device import choose, fast_kernels
from normcontrol.lab.training.loop import train


def settings() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cuda.math_sdp_enabled()


def a_run_that_fails(device: str) -> None:
    with fast_kernels(torch.device(device)):
        raise RuntimeError(f"in {torch.get_float32_matmul_precision()}")


@pytest.mark.parametrize(("device", "precision"), [("cpu", "highest"), ("cuda", "high")])
def test_a_run_leaves_the_settings_of_the_process_as_it_found_them(device, precision):
    before = settings()
    with pytest.raises(RuntimeError, match=f"in {precision}$"):
        a_run_that_fails(device)
    assert settings() == before == ("highest", True)


def test_bf16_stream_is_refused_where_the_run_computes_in_fp32(tmp_path):
    config = preset("tiny").with_(bf16_stream=True, device="cpu", precision="fp32")
    with pytest.raises(LabError, match="computes in fp32, where it has no effect"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("device", ["mps", "meta", "xla:1"])
def test_a_device_that_torch_cannot_compute_on_is_refused(device, config, tmp_path):
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(
        LabError, match=rf"device='{device}(:0)?' cannot be used here \(.+Give auto"
    ):
        train(config.with_(device=device), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, rank in (("cuda:2", 0), ("cuda", 3), ("auto", 3)):
        with pytest.raises(LabError, match="the highest GPU that torch finds is cuda:1"):
            choose(name, rank)
