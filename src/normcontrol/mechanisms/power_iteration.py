"""The largest singular values of matrices that change little at a step (``size="spectral"``).

A decomposition of every matrix at every step would take much longer than the step. Here a vector
is stored for every matrix, and one round of power iteration, two products with the matrix, makes
it follow the first right singular vector. This file knows nothing about targets, laws or
optimizers.

The result is never above the largest singular value ``s1``, apart from rounding. How far it can be
below: let ``q = (s2 / s1)^2``, and let a step change the matrix by at most ``d * s1`` (in spectral
norm). The first singular vector then turns by at most ``a = d / (1 - s2 / s1 - d)``, and every
round reduces the angle between it and the stored vector by the factor ``q``. The angle stays below
``a / (1 - q)`` while that is small, and the relative error of the result below half its square.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

VECTORS, ROUNDS = 8, 60
"""How a first vector is found."""


class PowerIteration:
    """Follows the largest singular value of every matrix.

    Args:
        params: the matrices. A tensor of more dimensions is a matrix with a row for each output.
        stored: their vectors, one after the other, as a checkpoint has them. If they do not fit,
            many rounds are made at once.

    >>> matrix = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    >>> PowerIteration([matrix])([matrix])
    tensor([4.], dtype=torch.float64)
    """

    @torch.no_grad()
    def __init__(self, params: Sequence[Tensor], stored: Tensor | None = None) -> None:
        columns = [p.numel() // p.shape[0] for p in params]
        if stored is None or stored.numel() != sum(columns):
            stored = torch.cat([first_vector(p) for p in params])
        self.vectors = stored.to(params[0].device)
        """The vectors, one after the other. Every call updates them in place."""
        self._each = self.vectors.split(columns)

    def __call__(self, params: Sequence[Tensor]) -> Tensor:
        """Make one round for every matrix; return the singular values."""
        return torch.stack([follow_(p, v) for p, v in zip(params, self._each, strict=True)])


def first_vector(p: Tensor) -> Tensor:
    """Return the first right singular vector, nearly: from rounds with several vectors at once."""
    matrix = p.flatten(1).float()
    if not bool(torch.isfinite(matrix).all()):
        return any_vectors(matrix[0], 1)[:, 0]
    space = any_vectors(matrix[0], min(VECTORS, *matrix.shape))
    for _ in range(ROUNDS):
        space = torch.linalg.qr(matrix.T @ (matrix @ space)).Q
    return space @ torch.linalg.svd(matrix @ space, full_matrices=False).Vh[0]


def follow_(p: Tensor, vector: Tensor) -> Tensor:
    """Return the largest singular value of ``p``; ``vector`` follows the singular vector."""
    matrix = p.flatten(1).float()
    with torch.no_grad():
        left = matrix @ vector
        left = left / torch.linalg.vector_norm(left)
    right = matrix.T @ left
    value = torch.linalg.vector_norm(right)
    with torch.no_grad():
        # A matrix of zeros, or not finite, gives NaN: its weights are left alone at this step.
        found = torch.isfinite(value) & (value > 0)
        vector.copy_(torch.where(found, right / value, any_vectors(vector, 1)[:, 0]))
    return value.double()


def any_vectors(like: Tensor, count: int) -> Tensor:
    """Return unit vectors as columns, orthogonal to no singular vector but by chance."""
    rows = torch.arange(1.0, like.numel() + 1, device=like.device)
    waves = torch.cos(torch.outer(rows, rows.new_ones(count).cumsum(0)))
    return waves / torch.linalg.vector_norm(waves, dim=0)
