"""The laboratory's loss against torch's: through Triton's interpreter on the CPU, and compiled on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from normcontrol.lab import loss as lab
from normcontrol.lab.loss import IGNORED, cross_entropy

triton = pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def rows(vocab: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, vocab, generator=generator) * 4).to(dtype)
    logits[1, 3] = 60.0  # one that dwarfs the others
    targets = torch.tensor([0, 3, IGNORED, vocab - 1, 2])
    return logits.to(device), targets.to(device)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the tests below run here")
def test_the_kernels_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own, under Triton's interpreter")
@pytest.mark.parametrize("vocab", [7, 4096, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_through_the_interpreter(vocab, dtype):
    logits, targets = rows(vocab, dtype)
    losses, sums, out = torch.empty(5), torch.empty(5), torch.empty_like(logits)
    lab._forward[(5,)](logits, targets, losses, sums, vocab, BLOCK=4096)
    grads = torch.full((5,), 0.25)
    lab._backward[(5, triton.cdiv(vocab, 4096))](logits, targets, sums, grads, out, vocab, BLOCK=4096)
    wanted = logits.float().requires_grad_()
    loss = F.cross_entropy(wanted, targets, reduction="none")
    (loss.sum() / 4).backward()
    torch.testing.assert_close(losses, loss.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.float(), wanted.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("vocab", [50304, 1000, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_and_its_gradient_on_the_gpu(vocab, dtype, compiled):
    logits, targets = rows(vocab, dtype, "cuda")
    ours, theirs = logits.clone().requires_grad_(), logits.float().requires_grad_()

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return cross_entropy(x * 2, targets) / 3

    loss = (torch.compile(doubled) if compiled else doubled)(ours)
    wanted = F.cross_entropy(theirs * 2, targets) / 3
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)
