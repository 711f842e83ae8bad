"""The small model that the tests train: an embedding tied to the head, matrices, biases and a norm
layer."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, WIDTH = 11, 8
MATRICES = ["embed.weight", "up.weight", "down.weight"]


class SmallModel(nn.Module):
    """A smooth function of its weights, so that two implementations of the same step stay close for
    hundreds of steps."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.copy_(0.3 * drawn if p.dim() > 1 else 0.1 * drawn + (p is self.norm.weight))
        self.to(dtype)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.down(self.norm(torch.tanh(self.up(self.embed(words))))))


def loss_at(model: nn.Module, step: int) -> Tensor:
    """The loss on the batch of this step, a pure function of its number."""
    generator = torch.Generator().manual_seed(1000 + step)
    words = torch.randint(WORDS, (16, 2), generator=generator)
    words = words.to(next(model.parameters()).device)
    return F.cross_entropy(model(words[:, 0]), words[:, 1])


def scaled_step(model, optimizer, scaler, t, overflow=False) -> None:
    """A step with GradScaler; ``overflow`` makes a gradient infinite."""
    optimizer.zero_grad()
    scaler.scale(loss_at(model, t)).backward()
    if overflow:
        model.up.weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, scheduler=None, step=None
) -> None:
    """A training loop; ``step`` may be a compiled ``optimizer.step``."""
    for t in steps:
        optimizer.zero_grad()
        loss_at(model, t).backward()
        (step or optimizer.step)()
        if scheduler is not None:
            scheduler.step()


def eta(t: int) -> float:
    """A learning-rate multiplier with warm-up and cosine decay to a tenth; steps count from 1."""
    return min(1.0, t / 10) * (0.1 + 0.9 * (1 + math.cos(math.pi * min(t / 200, 1))) / 2)


def with_eta(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """torch's scheduler for :func:`eta`; it counts from 0."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: eta(i + 1))


def total_norm(tensors) -> float:
    """The joint norm in float64, computed without the library."""
    return math.sqrt(
        sum(
            t.detach()
            .to(torch.complex128 if t.is_complex() else torch.float64)
            .abs()
            .square()
            .sum()
            .item()
            for t in tensors
        )
    )


def matrices(model: nn.Module) -> list[Tensor]:
    """The parameters of two or more dimensions."""
    return [p for p in model.parameters() if p.dim() >= 2]
