"""Algorithm 1 of the paper, line by line, in float64 NumPy.

Written from ``paper.tex`` alone and sharing no code with the library: every path of the library
must agree with it. The paper's symbols are the names. Weights are a dict of arrays; which of them
share a norm is given as lists of views into these arrays, so that one loop serves the joint norm of
the paper and every other scope.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def shares(theta: dict[str, Array], groups: list[list[str]], scope: str) -> list[list[Array]]:
    """The controlled weights of ``groups``, as lists of views: the members of each list share one
    norm."""
    everything = [[theta[name] for name in group] for group in groups]
    if scope == "global":
        return [[w for group in everything for w in group]]
    if scope == "group":
        return everything
    if scope == "tensor":
        return [[w] for group in everything for w in group]
    if scope == "row":
        return [[row] for group in everything for w in group for row in w]
    raise ValueError(scope)


def algorithm_1(
    theta: dict[str, Array],
    gradient: Callable[[dict[str, Array], int], dict[str, Array]],
    steps: int,
    *,
    line: str,
    sharing: list[list[Array]],
    alpha: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    lam: float = 0.0,
    eta: Callable[[int], float] = lambda t: 1.0,
    r: Callable[[int], float] = lambda t: 1.0,
    k: Callable[[int], float] = lambda t: 1e-2,
    order: str = "after",
) -> None:
    """Train ``theta`` in place. ``line`` is the regularisation: "13.a", "13.b" or "13.c"."""
    m = {name: np.zeros_like(w) for name, w in theta.items()}
    v = {name: np.zeros_like(w) for name, w in theta.items()}
    theta_0 = [norm(members) for members in sharing]

    def regularise(t: int) -> None:
        for members, norm_0 in zip(sharing, theta_0, strict=True):
            if line == "13.a":
                factor = eta(t) * alpha * lam
            elif line == "13.b":
                factor = eta(t) * lam
            elif line == "13.c":
                factor = k(t) * (1 - r(t) * norm_0 / norm(members))
            for w in members:
                w -= factor * w

    for t in range(1, steps + 1):
        g = gradient(theta, t)
        if order == "before":
            regularise(t)
        for name in theta:
            m[name] = beta1 * m[name] + (1 - beta1) * g[name]
            v[name] = beta2 * v[name] + (1 - beta2) * g[name] ** 2
            m_hat = m[name] / (1 - beta1**t)
            v_hat = v[name] / (1 - beta2**t)
            theta[name] -= eta(t) * alpha * m_hat / (np.sqrt(v_hat) + epsilon)
        if order == "after":
            regularise(t)


def norm(members: list[Array]) -> float:
    """The Euclidean norm of several arrays taken as one vector."""
    return float(np.sqrt(sum(np.sum(w**2) for w in members)))
