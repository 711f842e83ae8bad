"""GELU in one short Triton kernel, for bf16 and fp16 on a GPU. It may not know about the model.

GELU(x) is x times the normal distribution function of x, which torch computes with ``erf`` in
float32. That is so much arithmetic that its kernel is slower than the memory. Here it is one
exponential, one division and a polynomial: formula 7.1.26 of Abramowitz and Stegun (1964), whose
error is at most 1.5e-7, far below what bf16 and fp16 can hold. The derivative needs the same
exponential.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # not needed on a CPU
    triton = None


def gelu(x: Tensor) -> Tensor:
    """``F.gelu(x)``. bf16 and fp16 tensors on a GPU go through the kernel.

    >>> x = torch.linspace(-3, 3, 7)
    >>> torch.equal(gelu(x), F.gelu(x))
    True
    """
    if triton is None or not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return F.gelu(x)
    return gelu_forward(x)


if triton is not None:
    BLOCK, WARPS = 4096, 8
    """Elements that a program computes, and its warps: two loads of 16 bytes for each thread."""

    @triton.jit
    def gelu_kernel(  # type: ignore[no-untyped-def]
        xs, gradients, into, count, BACKWARD: tl.constexpr, BLOCK: tl.constexpr
    ):
        """Write GELU of a block of ``xs``; with BACKWARD, its derivative times ``gradients``."""
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(xs + at, at < count, other=0.0).to(tl.float32)
        bell = tl.exp2(x * x * -0.72134752)  # e to the power of -x**2 / 2
        t = 1.0 / (1.0 + 0.231641888 * tl.abs(x))
        tail = 1.061405429 * t - 1.453152027
        tail = tail * t + 1.421413741
        tail = tail * t - 0.284496736
        tail = (tail * t + 0.254829592) * t * bell * 0.5  # the probability beyond |x|
        below = tl.where(x >= 0, 1.0 - tail, tail)
        if BACKWARD:
            gradient = tl.load(gradients + at, at < count, other=0.0).to(tl.float32)
            result = gradient * (below + x * bell * 0.39894228)
        else:
            result = x * below
        tl.store(into + at, result.to(into.dtype.element_ty), at < count)

    @torch.library.triton_op("normcontrol::gelu_forward", mutates_args={})
    def gelu_forward(x: Tensor) -> Tensor:
        """GELU of every element."""
        x = x.contiguous()
        result = torch.empty_like(x)
        torch.library.wrap_triton(gelu_kernel)[(triton.cdiv(x.numel(), BLOCK),)](
            x, x, result, x.numel(), BACKWARD=False, BLOCK=BLOCK, num_warps=WARPS
        )
        return result

    @torch.library.triton_op("normcontrol::gelu_backward", mutates_args={})
    def gelu_backward(x: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of every element of x."""
        x, gradient = x.contiguous(), gradient.contiguous()
        result = torch.empty_like(x)
        torch.library.wrap_triton(gelu_kernel)[(triton.cdiv(x.numel(), BLOCK),)](
            x, gradient, result, x.numel(), BACKWARD=True, BLOCK=BLOCK, num_warps=WARPS
        )
        return result

    def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def _backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gelu_backward(ctx.saved_tensors[0], gradient)

    gelu_forward.register_autograd(_backward, setup_context=_setup_context)
