"""Tests of what a run asks of its device. Settings of torch are read and written without one."""

from __future__ import annotations

import pytest
import torch

from normcontrol.lab.errors import LabError
from normcontrol.lab.training.config import preset
from normcontrol.lab.training.device import fast_kernels
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
