"""Cases for the tests of the Triton kernels: on a GPU, or on a CPU through Triton's interpreter.

The interpreter must be chosen before Triton is imported. Without a GPU, ``test_interpreted.py``
therefore runs them in a process of their own.
"""

import os

import pytest
import torch
from torch import nn

from normcontrol import AdamWN

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"
STEPS = 100 if CUDA else 3
RAGGED = [1, 2, 3, 31, 127, 128, 511, 512, 513, 1000, 2047, 2048, 2049, 4095, 4097, 5000]
FEW = [1, 127, 511, 513, 2049]
"""Of those, the sizes that take Triton's interpreter seconds and not minutes."""
SOME = [3, 513, 2100] if CUDA else [3, 70, 513]
LR, BETAS = 3e-3, (0.9, 0.95)

here = pytest.mark.skipif(
    not CUDA and not INTERPRETED,
    reason="tests/steppers/test_interpreted.py runs it in Triton's interpreter",
)
on_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU: make gpu-test")
if INTERPRETED:
    from quick_interpreter import quicken

    quicken()
slow_if_interpreted = () if CUDA else pytest.mark.slow


def tensors(sizes=SOME, dtype=torch.float32, shift=0) -> list[nn.Parameter]:
    """One parameter of each size. ``shift`` moves them away from the 16-byte boundary at which
    allocations start."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for n in sizes:
        memory = torch.zeros(n + shift, dtype=dtype, device=DEVICE)
        memory[shift:] = 0.1 * torch.randn(n, generator=generator, dtype=torch.float64).to(
            DEVICE, dtype
        )
        made.append(nn.Parameter(memory[shift:]))
    return made


def gradients(params: list[nn.Parameter], t: int) -> list[torch.Tensor]:
    """The gradients of step ``t``, random but the same in every run."""
    generator = torch.Generator().manual_seed(t)
    return [
        torch.randn(p.shape, generator=generator, dtype=torch.float64).to(DEVICE, p.dtype)
        for p in params
    ]


def run(opt: AdamWN, params: list[nn.Parameter], steps=range(1, STEPS + 1)) -> None:
    for t in steps:
        for p, g in zip(params, gradients(params, t), strict=True):
            p.grad = g
        opt.step()


def everything(params: list[nn.Parameter]) -> list[dict]:
    """One group in which all tensors are controlled, also vectors."""
    return [{"params": params, "controlled": True}]


def kernels(params: list[nn.Parameter], groups=None, **settings) -> AdamWN:
    """AdamWN with the Triton kernels."""
    opt = AdamWN(groups or everything(params), LR, BETAS, fused=True, **settings)
    assert opt.implementation == "Triton kernels"
    return opt


def worst(a, b) -> float:
    """The largest relative difference of two lists of tensors."""
    return max(
        ((x.detach().double() - y.detach().double()).norm() / y.detach().double().norm()).item()
        for x, y in zip(a, b, strict=True)
    )
