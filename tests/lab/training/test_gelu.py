"""Compares the laboratory's GELU with torch's in float64: the kernel in Triton's interpreter on a
CPU, and eager or compiled on a GPU."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from normcontrol.lab.training import gelu as module
from normcontrol.lab.training.gelu import gelu

triton = pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def expected(x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.double().requires_grad_()
    result = F.gelu(leaf)
    result.backward(gradient.double())
    return result.detach(), leaf.grad


@pytest.mark.skipif(
    not INTERPRETED, reason="tests/steppers/test_interpreted.py runs it in Triton's interpreter"
)
def test_the_kernel_is_exact_to_the_error_of_its_formula():
    x = torch.cat([torch.linspace(-9, 9, 5000), torch.tensor([0.0, -0.0, 1e-20, 200.0, -200.0])])
    gradient = torch.linspace(-2, 2, len(x))
    value, slope = expected(x, gradient)
    for backward, right in ((False, value), (True, slope)):
        result = torch.full_like(x, torch.nan)
        programs = (triton.cdiv(len(x), 1024),)
        module.gelu_kernel[programs](x, gradient, result, len(x), BACKWARD=backward, BLOCK=1024)
        # half of the formula's 1.5e-7, and a few of float32's roundings
        allowed = (0.75e-7 + 2**-22) * (gradient if backward else x).abs() + 1e-30
        assert ((result - right).abs() <= allowed).all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_and_its_gradient_are_as_accurate_as_torchs_on_the_gpu(dtype, compiled):
    x = (torch.randn(37, 1001, device="cuda") * 3).to(dtype)
    gradient = torch.randn_like(x)
    right = expected(x, gradient)
    errors = []
    for function in (gelu, F.gelu):
        leaf = x.clone().requires_grad_()
        result = (torch.compile(function) if compiled else function)(leaf)
        result.backward(gradient)
        pairs = zip((result.detach(), leaf.grad), right, strict=True)
        errors.append([(mine.double() - exact).norm() / exact.norm() for mine, exact in pairs])
        assert result.dtype == leaf.grad.dtype == dtype
    for ours, torchs in zip(*errors, strict=True):
        assert ours < 1.01 * torchs


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_transposed_tensor_is_as_right_as_a_contiguous_one():
    x = torch.randn(64, 48, device="cuda", dtype=torch.bfloat16)
    leaf = x.t().detach().requires_grad_()
    gelu(leaf).backward(torch.ones(64, 48, device="cuda", dtype=torch.bfloat16).t())
    plain = x.t().contiguous().requires_grad_()
    F.gelu(plain).backward(torch.ones_like(plain))
    torch.testing.assert_close(gelu(leaf.detach()), F.gelu(plain.detach()))
    torch.testing.assert_close(leaf.grad, plain.grad)
