r"""Methods that train a norm and a direction instead of the weights: :math:`w = g\, v / \|v\|`.

The model is reparametrised in place by torch's own ``weight_norm``: autograd then computes the
gradients of the row norms g and of the directions v. The functions take a model for that reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import Adam, AdamW, Optimizer

from normcontrol.adamwn import AdamWN
from normcontrol.methods.hidden_matrices import hidden
from normcontrol.methods.registry import BETAS, Betas, method

MAGNITUDE, DIRECTION = (f"parametrizations.weight.original{i}" for i in (0, 1))
"""The names that torch gives to g and v."""


def _reparametrise(model: nn.Module, kinds: tuple[type[nn.Module], ...], names: set[str]) -> None:
    """Reparametrise the weights of these names, in modules of these kinds."""
    chosen = {
        f"{name}.weight".removeprefix("."): module
        for name, module in model.named_modules()
        if isinstance(module, kinds) and not hasattr(module, "parametrizations")
    }
    users = [(p, module) for module in model.modules() for p in module.parameters(recurse=False)]
    for name in chosen.keys() & names:
        weight: Any = chosen[name].weight
        kinds_of_users = [type(module).__name__ for p, module in users if p is weight]
        if len(kinds_of_users) > 1:
            raise ValueError(
                f"{name} is shared by several modules ({', '.join(kinds_of_users)}), and would no "
                "longer be: each of them would have its own. Give each a weight of its own first, "
                "such as module.weight = nn.Parameter(module.weight.clone())."
            )
        if not bool(weight.detach().flatten(1).norm(dim=1).all()):
            raise ValueError(
                f"{name} has rows of zeros, which have no direction to be trained. Initialise it "
                "with other values."
            )
    for name in names:
        if name in chosen:
            weight_norm(chosen[name])


def _directions(model: nn.Module, layer: str) -> list[tuple[str, nn.Parameter]]:
    """Return the directions, with their names."""
    found = [(name, p) for name, p in model.named_parameters() if name.endswith(DIRECTION)]
    if not found:
        raise ValueError(
            f"The model, {type(model).__name__}, has no {layer} whose weight could be normalised. "
            "Use AdamWN, which controls tensors of any module."
        )
    return found


def _check_model(model: Any, method: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{method} changes how a model computes its weights, so it needs the model, not "
            f"{type(model).__name__}."
        )


@method(
    "weight-norm",
    scope="row",
    target="rho_0 of directions",
    law="projection",
    reference="Salimans 2016, arXiv:1602.07868",
)
def weight_normalised(
    model: nn.Module, lr: float = 1e-3, betas: Betas = BETAS, **adam: Any
) -> AdamWN:
    r"""Weight normalisation, :math:`w = g\, v / \|v\|`, by torch's own parametrisation of every
    linear and convolutional layer.

    The norms of the directions v are kept constant. Otherwise they would grow, and the angle of a
    step would shrink. The model is changed in place. A head that is tied to an embedding before it
    is left alone.
    """
    _check_model(model, "Weight normalisation")
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    _reparametrise(model, kinds, {name for name, _ in model.named_parameters()})
    directions = _directions(model, "linear or convolutional layer")
    rest = [(name, p) for name, p in model.named_parameters() if not name.endswith(DIRECTION)]
    groups = [{"params": directions, "controlled": True}, {"params": rest, "controlled": False}]
    return AdamWN(groups, lr, betas, ratio=1.0, law="projection", scope="row", **adam)


@method(
    "Muown",
    scope="row",
    target="none",
    law="none: Adam on rho, Muon on directions",
    reference="Lion et al. 2026, arXiv:2605.10797",
    hidden=True,
)
def muown(
    model: nn.Module,
    lr: float = 1e-2,
    momentum: float = 0.95,
    adam_lr: float = 1e-3,
    betas: Betas = (0.9, 0.95),
    weight_decay: float = 0.0,
) -> list[Optimizer]:
    r"""Muown: Adam trains the norms g of the rows, and Muon the directions v, of
    :math:`W = g\, v / \|v\|`.

    It is meant for hidden matrices. All other parameters are trained by Adam with ``adam_lr``.
    ``weight_decay`` decays g. The model is changed in place; step all optimizers of the returned
    list. Muon's steps are scaled as the authors do, by :math:`0.2 \sqrt{\max(m, n)}`.
    """
    _check_model(model, "Muown")
    if not hasattr(torch.optim, "Muon"):
        raise ImportError(
            f"Muown uses torch.optim.Muon, which torch {torch.__version__} does not have. Use "
            "torch 2.9 or later."
        )
    names = {name for name, _ in hidden(model)[0]["params"]}
    _reparametrise(model, (nn.Linear,), names)
    directions = _directions(model, "hidden linear layer")
    named = list(model.named_parameters())
    magnitudes = [(name, p) for name, p in named if name.endswith(MAGNITUDE)]
    rest = [(name, p) for name, p in named if not name.endswith((MAGNITUDE, DIRECTION))]
    muon = torch.optim.Muon(
        directions,
        lr=lr,
        weight_decay=0.0,
        momentum=momentum,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = AdamW(magnitudes, lr, betas, weight_decay=weight_decay)
    return [muon, adam, *([Adam(rest, adam_lr, betas)] if rest else [])]
