"""Parameter groups for methods that control hidden matrices and leave embeddings and heads alone.

It looks at a model's modules and the names of its parameters. It knows nothing about optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

OUTSIDE = ("embed", "wte", "wpe", "head", "output", "classifier", "router")
"""A tensor whose name contains one of these words is not hidden: embeddings, heads, routers."""


def hidden(
    model: nn.Module, is_hidden: Callable[[str, Tensor], bool] | None = None
) -> list[dict[str, Any]]:
    """Return two parameter groups: the hidden matrices, which are controlled, and all other
    parameters, which are not.

    Embeddings are found by their modules, heads and routers by their names (:data:`OUTSIDE`).

    Args:
        model: the model.
        is_hidden: a function of a parameter's name and the parameter that replaces this rule.

    >>> model = nn.ModuleDict(
    ...     {"wte": nn.Embedding(9, 4), "fc": nn.Linear(4, 4), "lm_head": nn.Linear(4, 9)}
    ... )
    >>> [[name for name, _ in group["params"]] for group in hidden(model)]
    [['fc.weight'], ['wte.weight', 'fc.bias', 'lm_head.weight', 'lm_head.bias']]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            "hidden looks at the modules of a model, but got a "
            f"{type(model).__name__}. Give the model itself, as in adamh(hidden(model))."
        )
    embeddings = {
        p
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for p in module.parameters()
    }

    def rule(name: str, p: Tensor) -> bool:
        return (
            p.dim() >= 2
            and p not in embeddings
            and not any(part in name.lower() for part in OUTSIDE)
        )

    chosen = is_hidden or rule
    inside = [(name, p) for name, p in model.named_parameters() if chosen(name, p)]
    outside = [(name, p) for name, p in model.named_parameters() if not chosen(name, p)]
    if not inside:
        raise ValueError(
            "No matrix of the model counts as hidden. Choose them with is_hidden=lambda name, p: "
            "..."
        )
    return [
        {"params": inside, "controlled": True},
        *([{"params": outside, "controlled": False}] if outside else []),
    ]
