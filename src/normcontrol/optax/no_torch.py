"""Errors for torch objects that are given to the JAX side of the package.

Without them such a mistake would fail deep inside JAX. This file knows which types are torch's, and
nothing about norm control.
"""

from __future__ import annotations

from typing import Any

import jax
import torch

from normcontrol.schedule import Schedule


def refuse_torch(name: str, value: Any) -> None:
    """Raise an error if the argument ``name`` is a torch object or a schedule for torch."""
    if isinstance(value, Schedule):
        raise TypeError(
            f"{name}={value!r} is a schedule for torch, and this is JAX: give an optax schedule, "
            "such as optax.linear_schedule(1.0, 2.0, 2500)."
        )
    if isinstance(value, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)):
        raise TypeError(
            f"{name} is a torch {type(value).__name__}, and normcontrol.optax is for JAX: give JAX "
            "arrays, or use normcontrol.AdamWN and normcontrol.NormControl, which are for torch."
        )


def refuse_torch_weights(params: Any) -> None:
    """Raise an error that names the leaf if a leaf of ``params`` is a torch object."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        refuse_torch(f"params{jax.tree_util.keystr(path)}", leaf)
