"""How many outputs a tensor of weights has: what a gain is relative to.

A matrix of gain g has the norm ``g * sqrt(outputs)``: its rows have the norm g on average, and it
keeps the variance of what flows through it if g is 1 (``torch.nn.init.calculate_gain`` uses the
word so). The outputs are the first axis of a linear layer or a convolution, and the tokens of an
embedding. This file knows shapes and modules, and nothing about targets or norms.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

Axes = tuple[int, ...] | None
"""The axes that count outputs; None for the rule, and no axes where none counts them."""

BY_MODULE: dict[tuple[str, int], Axes] = {
    ("Bilinear", 3): (0,),
    ("Conv1d", 3): (0,),
    ("Conv1D", 2): (1,),  # Hugging Face's linear layer, which is stored transposed
    ("ConvTranspose1d", 3): (1,),
    ("ConvTranspose2d", 4): (1,),
    ("ConvTranspose3d", 5): (1,),
}
"""The outputs of a module's weight, where the rule does not know them or is wrong, by the module's
class and the dimensions of the weight. A class stands for its subclasses too: FSDP2 makes one for
the modules that it shards."""


def as_axes(given: Any) -> Axes:
    """Check the setting ``outputs=``: None, an axis, or a tuple of axes."""
    if given is None:
        return None
    axes = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if all(type(a) is int for a in axes):
        return axes
    raise ValueError(
        f"outputs={given!r} is not known: give the axis that counts the outputs (0 for a linear "
        "layer, 1 for one that is stored transposed), or a tuple of axes."
    )


def outputs_of(name: str, p: Tensor, axes: Axes = None) -> int:
    """Return the number of outputs of a tensor.

    >>> import torch
    >>> outputs_of("head", torch.ones(50, 8)), outputs_of("experts", torch.ones(4, 16, 8), (0, 1))
    (50, 64)
    """
    shape = tuple(p.shape)
    if p.dim() < 2:
        raise ValueError(
            f"A gain is the norm of a matrix in units of sqrt(outputs), but {name} has the shape "
            f"{shape}: it has no inputs. Give it a norm= or rms= in a group of its own, or leave "
            "it out with controlled=False."
        )
    if axes is None and p.dim() == 3:
        raise ValueError(
            f"{name} has the shape {shape}, of which the outputs cannot be known: give outputs=0 "
            "in its group for a convolution, outputs=(0, 1) for a stack of matrices (expert, "
            "output, input), or outputs=(0, 2) for (expert, input, output)."
        )
    if axes == ():
        raise ValueError(
            f"{name} has the shape {shape}, and no axis that counts its outputs, as a transposed "
            "convolution in groups has none, nor the norms that weight normalisation stores of its "
            "inputs. Give it a norm= or rms= in a group of its own, or leave it out with "
            "controlled=False."
        )
    axes = axes or (0,)
    check_outputs(name, p, axes)
    if len(axes) == p.dim():
        raise ValueError(
            f"outputs={axes} names every axis of {name}, whose shape is {shape}: it would have no "
            "inputs. Put it into a group of its own, where outputs= names the axes of its outputs."
        )
    return math.prod(shape[axis] for axis in axes)


def check_outputs(name: str, p: Tensor, axes: tuple[int, ...]) -> None:
    """Refuse axes that a tensor does not have."""
    shape = tuple(p.shape)
    if any(not -p.dim() <= axis < p.dim() for axis in axes):
        raise ValueError(
            f"outputs={axes} names an axis that {name} does not have: its shape is {shape}."
        )
    if len({axis % p.dim() for axis in axes}) < len(axes):
        raise ValueError(f"outputs={axes} names an axis of {name} twice: its shape is {shape}.")


def is_known(p: Tensor, axes: Axes) -> bool:
    """Return whether the number of outputs of a tensor is known."""
    if axes is None:
        return p.dim() >= 2 and p.dim() != 3
    return p.dim() > len(axes) > 0


def split_by_outputs(groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups, with those tensors in groups of their own that need ``outputs=``.

    They are recognised by their modules. A group that gives ``outputs`` itself is left as it is.
    The tensors that are not recognised get no ``outputs``, so that the optimizer's own is theirs.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ConvTranspose2d(4, 8, 3))
    >>> for group in split_by_outputs([{"params": list(model.named_parameters())}], model):
    ...     print([name for name, _ in group["params"]], group.get("outputs"))
    ['0.weight', '0.bias', '1.bias'] None
    ['1.weight'] (1,)
    """
    axes = {
        id(p): found
        for module in model.modules()
        for p, found in _axes_of_weight(module)
        if found is not None
    }
    split: list[dict[str, Any]] = []
    for group in groups:
        kinds: dict[Axes, list[int]] = {}
        for i, item in enumerate(group["params"]):
            p = item[1] if isinstance(item, tuple) else item
            kinds.setdefault(axes.get(id(p)), []).append(i)
        if "outputs" in group or set(kinds) <= {None}:
            split.append(group)
            continue
        lists = [key for key in ("params", "param_names") if key in group]
        for kind, indices in kinds.items():
            own: dict[str, Any] = {key: [group[key][i] for i in indices] for key in lists}
            told = {} if kind is None else {"outputs": kind}
            split.append({**group, **own, **told})
    return split


def _axes_of_weight(module: nn.Module) -> list[tuple[Tensor, Axes]]:
    """Return the tensors that a module's weight is, or is computed from, with their axes.

    torch's parametrisations store one tensor of the weight's shape, or norms and a direction. What
    counts the outputs in the direction counts them in the norms too, if they have that axis; norms
    of the inputs have none. Tensors of other shapes are not recognised.
    """
    own = dict(module.named_parameters(recurse=False))
    names = ("weight", "weight_orig", "weight_v", "weight_g")
    tensors: list[Tensor] = [own[name] for name in names if name in own]
    computed: Any = getattr(module, "parametrizations", None)
    if isinstance(computed, nn.ModuleDict) and "weight" in computed:
        tensors += computed["weight"].parameters(recurse=False)
    if not tensors:
        return []
    whole = max(tensors, key=Tensor.numel)
    axes = _axes_of(module, whole)
    found: list[tuple[Tensor, Axes]] = []
    for p in tensors:
        sizes = zip(p.shape, whole.shape, strict=False)
        fits = p.dim() == whole.dim() and all(a in (1, b) for a, b in sizes)
        counted = fits and all(p.shape[a] == whole.shape[a] for a in axes or (0,)[: p.dim()])
        found.append((p, axes if counted else () if fits else None))
    return found


def _axes_of(module: nn.Module, weight: Tensor) -> Axes:
    """Return the axes of the outputs of a module's weight, if the rule does not give them."""
    keys = ((kind.__name__, weight.dim()) for kind in type(module).__mro__)
    axes = next((BY_MODULE[key] for key in keys if key in BY_MODULE), None)
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    if isinstance(module, transposed) and module.groups > 1:
        # The shape is (inputs, outputs / groups, ...).
        return (0, 1) if module.groups == module.in_channels else ()
    return axes
