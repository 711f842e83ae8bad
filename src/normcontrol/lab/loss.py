"""The loss over a large vocabulary. Its logits are the largest tensor of a step, and on a GPU passes over them a tenth of
its time: these kernels make one pass forwards and one backwards, where the compiler's own take twice as long.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU needs none
    triton = None

IGNORED = -100
"""The target that is left out of the mean."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """``F.cross_entropy`` of rows of logits, through the kernels where there is a GPU.

    >>> logits, targets = torch.randn(3, 7), torch.tensor([6, IGNORED, 2])
    >>> torch.equal(cross_entropy(logits, targets), F.cross_entropy(logits, targets))
    True
    """
    if triton is None or not logits.is_cuda:
        return F.cross_entropy(logits, targets)
    losses, _ = row_losses(logits, targets)
    return losses.sum() / (targets != IGNORED).sum()


if triton is not None:

    @triton.jit
    def _forward(logits, targets, losses, sums, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """The log of the sum of exponentials of one row, in one pass: every lane has a largest value and a sum of its own."""
        row = tl.program_id(0).to(tl.int64)
        target = tl.load(targets + row)
        largest = tl.full((BLOCK,), -1e30, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for i in range(0, vocab, BLOCK):
            at = i + tl.arange(0, BLOCK)
            x = tl.load(logits + row * vocab + at, at < vocab, other=-1e30).to(tl.float32)
            larger = tl.maximum(largest, x)
            total = total * tl.exp(largest - larger) + tl.exp(x - larger)
            largest = larger
        top = tl.max(largest)
        log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top)))
        right = tl.load(logits + row * vocab + tl.maximum(target, 0)).to(tl.float32)
        tl.store(sums + row, log_sum)
        tl.store(losses + row, tl.where(target >= 0, log_sum - right, 0.0))

    @triton.jit
    def _backward(logits, targets, sums, grads, out, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """The gradient of a part of a row: its softmax, less one at the target."""
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        target = tl.load(targets + row)
        grad = tl.where(target >= 0, tl.load(grads + row), 0.0)
        x = tl.load(logits + row * vocab + at, at < vocab, other=-1e30).to(tl.float32)
        softmax = tl.exp(x - tl.load(sums + row))
        tl.store(out + row * vocab + at, ((softmax - (at == target)) * grad).to(out.dtype.element_ty), at < vocab)

    @torch.library.triton_op("normcontrol::row_losses", mutates_args={})
    def row_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of every row, zero where it is ignored, and the log of its sum of exponentials."""
        rows, vocab = logits.shape
        losses, sums = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
        torch.library.wrap_triton(_forward)[(rows,)](logits.contiguous(), targets, losses, sums, vocab, BLOCK=4096, num_warps=8)
        return losses, sums

    @torch.library.triton_op("normcontrol::row_gradients", mutates_args={})
    def row_gradients(logits: Tensor, targets: Tensor, sums: Tensor, grads: Tensor) -> Tensor:
        rows, vocab = logits.shape
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        grid = (rows, triton.cdiv(vocab, 4096))
        torch.library.wrap_triton(_backward)[grid](logits.contiguous(), targets, sums, grads, out, vocab, BLOCK=4096, num_warps=8)
        return out

    def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[1])

    def _differentiate(ctx: Any, grad_losses: Tensor, grad_sums: Tensor) -> tuple[Tensor, None]:
        return row_gradients(*ctx.saved_tensors, grad_losses.contiguous()), None

    row_losses.register_autograd(_differentiate, setup_context=_keep)
