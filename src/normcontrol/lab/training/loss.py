"""Cross-entropy of a linear head with a large vocabulary. On a GPU it uses a Triton kernel.

The logits are the largest tensor of a training step, and passes over them took a tenth of its time
on a GPU. The kernel computes the loss and, in the same forward pass, replaces the logits by their
gradient while they are in the cache. The backward pass is then two matrix products. This file may
not know about the model.
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

IGNORED = -100
"""The target of positions that do not count in the mean, as in ``F.cross_entropy``."""


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """``F.cross_entropy(F.linear(x, weight), targets)`` for two-dimensional x. CUDA tensors go
    through the kernel.

    >>> x, weight, targets = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([6, IGNORED, 2])
    >>> expected = F.cross_entropy(F.linear(x, weight), targets)
    >>> torch.equal(linear_cross_entropy(x, weight, targets), expected)
    True
    """
    if triton is None or not x.is_cuda:
        return F.cross_entropy(F.linear(x, weight), targets)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, weight = x.to(dtype), weight.to(dtype)
    losses = (
        head_losses(x, weight, targets)[0]
        if torch.is_grad_enabled()
        else row_losses(x @ weight.t(), targets)
    )
    return losses.sum() / (targets != IGNORED).sum()


if triton is not None:
    BLOCK, EACH, WARPS = 8192, 8, 16
    """Logits that a program processes at a time, logits per thread (16 bytes of bf16), and warps
    per program. With these values few rows are processed at once, so that all of them fit in the
    cache. They were the fastest of those measured on an H200."""

    @triton.jit
    def row_kernel(  # type: ignore[no-untyped-def]
        logits,
        targets,
        losses,
        vocab,
        GRADIENTS: tl.constexpr,
        BLOCK: tl.constexpr,
        EACH: tl.constexpr,
    ):
        """Compute the loss of one row, zero if its target is ignored. With GRADIENTS, overwrite the
        logits with their gradient: softmax, minus one at the target.

        Every thread keeps its own maximum and sum, so that each logit costs little more than one
        exponential."""
        row = tl.program_id(0).to(tl.int64)
        target = tl.load(targets + row)
        log2_e: tl.constexpr = 1.4426950408889634
        # The logit of the target is read first: after the reductions below, which synchronise all
        # threads, another thread may already have overwritten it with a gradient.
        right = tl.load(logits + row * vocab + tl.maximum(target, 0)).to(tl.float32) * log2_e
        within = tl.arange(0, BLOCK // EACH)[:, None] * EACH + tl.arange(0, EACH)[None, :]
        largest = tl.full((BLOCK // EACH,), -1e30, tl.float32)
        total = tl.zeros((BLOCK // EACH,), tl.float32)
        for i in range(0, vocab, BLOCK):
            at = i + within
            x = tl.load(logits + row * vocab + at, at < vocab, other=-1e30).to(tl.float32) * log2_e
            larger = tl.maximum(largest, tl.max(x, axis=1))
            total = total * tl.exp2(largest - larger) + tl.sum(tl.exp2(x - larger[:, None]), axis=1)
            largest = larger
        top = tl.max(largest)
        log_sum = top + tl.log2(tl.sum(total * tl.exp2(largest - top)))
        tl.store(losses + row, tl.where(target >= 0, (log_sum - right) / log2_e, 0.0))
        if GRADIENTS:
            counts = (target >= 0).to(tl.float32)
            for back in range(0, vocab, BLOCK):  # the end was read last
                at = (vocab - 1) // BLOCK * BLOCK - back + within
                x = (
                    tl.load(logits + row * vocab + at, at < vocab, other=-1e30).to(tl.float32)
                    * log2_e
                )
                gradient = (tl.exp2(x - log_sum) - (at == target).to(tl.float32)) * counts
                gradient = gradient.to(logits.dtype.element_ty)
                # Evict gradients first, to leave room in the cache for rows not yet processed.
                tl.store(
                    logits + row * vocab + at, gradient, at < vocab, eviction_policy="evict_first"
                )

    @torch.library.triton_op("normcontrol::row_losses", mutates_args={})
    def row_losses(logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of every row of logits, zero for ignored targets."""
        losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        arguments = (logits, targets, losses, logits.shape[1])
        torch.library.wrap_triton(row_kernel)[(len(logits),)](
            *arguments, GRADIENTS=False, BLOCK=BLOCK, EACH=EACH, num_warps=WARPS
        )
        return losses

    @torch.library.triton_op("normcontrol::head_losses", mutates_args={})
    def head_losses(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of every row of x, and its gradient with respect to the logits."""
        logits = x @ weight.t()
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        arguments = (logits, targets, losses, logits.shape[1])
        torch.library.wrap_triton(row_kernel)[(len(x),)](
            *arguments, GRADIENTS=True, BLOCK=BLOCK, EACH=EACH, num_warps=WARPS
        )
        return losses, logits

    def _setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]
    ) -> None:
        ctx.save_for_backward(*inputs[:2], output[1])

    def _backward(ctx: Any, grad_losses: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, gradients = ctx.saved_tensors
        by_row = grad_losses[:, None]
        return (
            ((gradients @ weight) * by_row).to(x.dtype),
            gradients.t() @ (x * by_row).to(x.dtype),
            None,
        )

    head_losses.register_autograd(_backward, setup_context=_setup_context)
