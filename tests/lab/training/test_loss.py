"""Compares the laboratory's cross-entropy with torch's: the kernel in Triton's interpreter on a
CPU, and eager or compiled on a GPU."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from normcontrol.lab.training import loss
from normcontrol.lab.training.loss import IGNORED, linear_cross_entropy

triton = pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def rows(vocab: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, vocab, generator=generator) * 4).to(dtype)
    logits[1, 3] = 60.0  # much larger than the others
    targets = torch.tensor([0, 3, IGNORED, vocab - 1, 2])
    return logits.to(device), targets.to(device)


@pytest.mark.skipif(
    not INTERPRETED, reason="tests/steppers/test_interpreted.py runs it in Triton's interpreter"
)
@pytest.mark.parametrize("vocab", [7, 4096, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_through_the_interpreter(vocab, dtype):
    logits, targets = rows(vocab, dtype)
    losses, gradients = torch.empty(5), logits.clone()
    loss.row_kernel[(5,)](gradients, targets, losses, vocab, GRADIENTS=True, BLOCK=4096, EACH=8)
    leaf = logits.float().requires_grad_()
    expected = F.cross_entropy(leaf, targets, reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gradients.float(), leaf.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("vocab", [50304, 1000, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_and_its_gradients_on_the_gpu(vocab, dtype, compiled):
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(n, 64, generator=generator).to("cuda", dtype) for n in (5, vocab)]
    targets = torch.tensor([0, 3, IGNORED, vocab - 1, 2], device="cuda")
    doubles = [t.double().requires_grad_() for t in given]
    expected = F.cross_entropy(F.linear(doubles[0] * 2, doubles[1]), targets) / 3
    expected.backward()

    def third(loss_of, x, weight):
        return loss_of(x * 2, weight, targets) / 3

    errors = []
    for loss_of in (
        linear_cross_entropy,
        lambda x, weight, t: F.cross_entropy(F.linear(x, weight).float(), t),
    ):
        leaves = [t.clone().requires_grad_() for t in given]
        loss = (torch.compile(third) if compiled else third)(loss_of, *leaves)
        with torch.no_grad():
            without_gradients = third(loss_of, *leaves)
            torch.testing.assert_close(without_gradients, loss, rtol=1e-5, atol=1e-5)
        loss.backward()
        pairs = [
            (loss, expected),
            *((x.grad, y.grad) for x, y in zip(leaves, doubles, strict=True)),
        ]
        errors.append([(mine.double() - exact).norm() / exact.norm() for mine, exact in pairs])
    for ours, torchs in zip(*errors, strict=True):  # as accurate as torch in this dtype
        assert ours < 1.3 * torchs + 1e-6


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_head_under_autocast_computes_as_torch_does_under_autocast():
    torch.manual_seed(0)
    x, weight = torch.randn(256, 64, device="cuda"), torch.randn(1000, 64, device="cuda") / 8
    targets = torch.randint(1000, (256,), device="cuda")
    gradients = []
    for loss_of in (linear_cross_entropy, lambda x, w, t: F.cross_entropy(F.linear(x, w), t)):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(*leaves, targets)
        loss.backward()
        gradients.append([loss.detach(), *(t.grad for t in leaves)])
    for mine, other in zip(*gradients, strict=True):
        assert mine.dtype == other.dtype == torch.float32
        assert (mine - other).norm() < 2e-2 * other.norm()
