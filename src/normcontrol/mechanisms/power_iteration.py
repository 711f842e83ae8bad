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

import math
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
        rows = [p.shape[0] for p in params]
        columns = [p.numel() // n for p, n in zip(params, rows, strict=True)]
        if stored is None or stored.numel() != sum(columns):
            stored = torch.cat([first_vector(p) for p in params])
        self.vectors = stored.to(params[0].device)
        """The vectors, one after the other. Every call updates them in place."""
        self._each = self.vectors.split(columns)
        self.others = torch.cat([any_vectors(v, 1)[:, 0] for v in self._each])
        """What is tried after a matrix that has no singular vector, of zeros or not finite."""
        self._rows, self._row_of = rows, self._matrix_of(rows)
        self._column_of = self._matrix_of(columns)

    def _matrix_of(self, counts: list[int]) -> Tensor:
        """Return to which matrix each element of concatenated vectors belongs."""
        repeats = torch.tensor(counts, device="cpu")
        of = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), repeats)
        return of.to(self.vectors.device)

    def __call__(self, params: Sequence[Tensor]) -> Tensor:
        """Make one round for every matrix; return the singular values.

        Beside the two products with each matrix, the operations are on all vectors at once: their
        number does not depend on that of the matrices.
        """
        matrices = [p.flatten(1).float() for p in params]
        with torch.no_grad():
            lefts = [m @ v for m, v in zip(matrices, self._each, strict=True)]
            flat = torch.cat(lefts) / norms_of(lefts)[self._row_of]
        pairs = zip(matrices, flat.split(self._rows), strict=True)
        rights = [m.T @ left for m, left in pairs]
        values = norms_of(rights)
        with torch.no_grad():
            # A matrix of zeros, or not finite, gives NaN: its weights are left alone at this step.
            known = values[self._column_of]
            found = (known > 0) & (known < math.inf)
            self.vectors.copy_(torch.where(found, torch.cat(rights) / known, self.others))
        return values.double()


def norms_of(vectors: list[Tensor]) -> Tensor:
    """Return the norm of every vector."""
    return torch.stack(torch._foreach_norm(vectors))


def first_vector(p: Tensor) -> Tensor:
    """Return the first right singular vector, nearly: from rounds with several vectors at once."""
    matrix = p.flatten(1).float()
    if not bool(torch.isfinite(matrix).all()):
        return any_vectors(matrix[0], 1)[:, 0]
    space = any_vectors(matrix[0], min(VECTORS, *matrix.shape))
    for _ in range(ROUNDS):
        space = torch.linalg.qr(matrix.T @ (matrix @ space)).Q
    return space @ torch.linalg.svd(matrix @ space, full_matrices=False).Vh[0]


def any_vectors(like: Tensor, count: int) -> Tensor:
    """Return unit vectors as columns, orthogonal to no singular vector but by chance."""
    rows = torch.arange(1.0, like.numel() + 1, device=like.device)
    waves = torch.cos(torch.outer(rows, rows.new_ones(count).cumsum(0)))
    return waves / torch.linalg.vector_norm(waves, dim=0)
