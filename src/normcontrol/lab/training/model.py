"""GPT-2 as nanoGPT (Karpathy) builds and initialises it: pre-norm blocks, learned positions, and an
output head tied to the token embedding. It may not know about data, optimizers or devices.

Parameters have nanoGPT's names, without the prefix that is common to all of them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normcontrol.lab import seeds
from normcontrol.lab.training.config import Model
from normcontrol.lab.training.gelu import gelu
from normcontrol.lab.training.loss import linear_cross_entropy

INIT_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention, all heads in one matrix product."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.c_attn = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.c_proj = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            t.view(batch, time, self.heads, -1).transpose(1, 2)
            for t in self.c_attn(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        y = y.transpose(1, 2).reshape(batch, time, width)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(gelu(self.c_fc(x))), self.dropout, self.training)


class Block(nn.Module):
    """Attention and MLP, each with a LayerNorm before it and a residual connection around it."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The model. ``vocab`` is the number of rows of the token embedding.

    >>> from normcontrol.lab.training.config import Model
    >>> with torch.device("meta"):
    ...     gpt2 = GPT(Model(), vocab=50304)
    >>> matrices = [p for p in gpt2.parameters() if p.dim() >= 2]
    >>> len(matrices), f"{sum(p.numel() for p in matrices):,}"
    (50, '124,354,560')
    """

    def __init__(self, config: Model, vocab: int) -> None:
        super().__init__()
        self.config, self.vocab = config, vocab
        self.wte = nn.Embedding(vocab, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width, bias=config.bias)

    @classmethod
    def initialised(cls, config: Model, vocab: int) -> GPT:
        """A model with its initial weights, on the CPU. It is created on the meta device, which
        skips the default initialisation of torch's layers."""
        with torch.device("meta"):
            model = cls(config, vocab)
        model.to_empty(device="cpu").initialise(config.init_seed)
        return model

    def initialise(self, seed: int) -> None:
        """nanoGPT's initialisation: normal with std 0.02, and 0.02 / sqrt(2 * layers) for the
        projections into the residual stream.

        The numbers are drawn on the CPU from a separate generator, so that every device and every
        optimizer starts from the same weights.
        """
        generator = seeds.for_torch(seed)
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                std = (
                    INIT_STD / math.sqrt(2 * self.config.layers)
                    if name.endswith("c_proj.weight")
                    else INIT_STD
                )
                nn.init.normal_(p, std=std, generator=generator)
            else:
                nn.init.zeros_(p) if name.endswith("bias") else nn.init.ones_(p)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean loss if targets are given, else the logits of the last position."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        x = F.dropout(x, self.config.dropout, self.training)
        if self.config.bf16_stream and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return F.linear(x[:, -1], self.wte.weight)
        return linear_cross_entropy(x.flatten(0, 1), self.wte.weight, targets.flatten())

    def matrices(self) -> list[nn.Parameter]:
        """The tensors of two or more dimensions: those that nanoGPT decays and the paper
        controls."""
        return [p for p in self.parameters() if p.dim() >= 2]

    def flops_per_token(self) -> int:
        """FLOPs of the forward and backward pass per token, as in appendix B of PaLM: 6 per weight,
        and 12 * layers * width * context for attention."""
        weights = sum(p.numel() for p in self.parameters()) - self.wpe.weight.numel()
        return 6 * weights + 12 * self.config.layers * self.config.width * self.config.context
