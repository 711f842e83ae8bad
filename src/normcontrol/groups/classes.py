"""Classes of tensors: the tensors with the same function in every layer, such as all ``c_fc`` of a
GPT. Predictions, calibrations and tables of norms are made by class.

Tensors are sorted into classes by name, shape and group. This file may not know how classes are
used.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normcontrol.distributed.shards import whole_norms
from normcontrol.distributed.sharing import Sharing
from normcontrol.groups.members import (
    CONTROL,
    Members,
    marks_of_decay,
    members_of,
    refuse_flat_shards,
)
from normcontrol.scope import SCOPES


@dataclass(frozen=True)
class TensorClass:
    """A class of regularised tensors.

    Attributes:
        name: the name of the class.
        count: the number of weights in all tensors of the class.
        rms: the root mean square of the weights.
        tied: True for an embedding that is also the output head.
        hidden: True if the tensors are not embeddings.
        group: the index of their parameter group.
        lr: the learning rate of the group, if it has one.
        weight_decay: the weight decay of the group, if it has one. Under norm control it has none.
    """

    name: str
    count: int
    rms: float
    tied: bool = False
    hidden: bool = True
    group: int = 0
    lr: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.count, Integral) and self.count > 0):
            raise ValueError(
                f"{self.name} has count={self.count!r}: it is the number of weights of the class. "
                "Give a whole number, 1 or more."
            )
        if not (hasattr(self.rms, "__float__") and math.isfinite(self.rms) and self.rms >= 0):
            raise ValueError(
                f"{self.name} has rms={self.rms!r}: it is the root mean square of the weights. "
                "Give a finite number, 0 or more, or initialise the model first."
            )


def class_names(names: Sequence[str], params: Sequence[Tensor]) -> list[str]:
    """The name of the class of every tensor: its own name with ``*`` for numbers, and its shape if
    tensors of several shapes would have the same name.

    >>> linears = [torch.ones(4, 2), torch.ones(4, 2), torch.ones(2, 4)]
    >>> class_names(["h.0.up.weight", "h.1.up.weight", "h.0.down.weight"], linears)
    ['h.*.up.weight', 'h.*.up.weight', 'h.*.down.weight']
    >>> class_names(["0.weight", "1.weight", "2.weight"], linears)
    ['*.weight 4x2', '*.weight 4x2', '*.weight 2x4']
    """
    patterns = [
        "" if re.fullmatch(r"group\d+\.tensor\d+", name) else re.sub(r"\d+", "*", name)
        for name in names
    ]
    shapes = ["x".join(map(str, p.shape)) for p in params]
    seen: dict[str, set[str]] = {}
    for pattern, shape in zip(patterns, shapes, strict=True):
        seen.setdefault(pattern, set()).add(shape)
    return [
        a if a and len(seen[a]) == 1 else f"{a} {shape}".strip()
        for a, shape in zip(patterns, shapes, strict=True)
    ]


def sort_members(members: Sequence[Members]) -> list[tuple[str, int, list[int]]]:
    """The classes of the members of all groups: name, group, and indices of the tensors. Names are
    unique."""
    labels = class_names(
        [n for m in members for n in m.names], [p for m in members for p in m.params]
    )
    groups = [i for i, m in enumerate(members) for _ in m.params]
    found: dict[tuple[str, int], list[int]] = {}
    for i, key in enumerate(zip(labels, groups, strict=True)):
        found.setdefault(key, []).append(i)
    alone = {label for label in labels if sum(label == other for other, _ in found) == 1}
    return [
        (label if label in alone else f"{label}, group {group}", group, indices)
        for (label, group), indices in found.items()
    ]


def regularised(optimizer: Optimizer, trained: bool = True) -> list[Members]:
    """The tensors of every group that the optimizer regularises: those that AdamWN would
    control. No optimizer moves frozen ones: they are left out, or returned alone with
    ``trained=False``."""
    marks = marks_of_decay(optimizer.param_groups)
    groups = [
        {"controlled": mark, **group}
        for group, mark in zip(optimizer.param_groups, marks, strict=True)
    ]
    members = members_of(groups)
    refuse_flat_shards(groups, members)
    found = []
    for names, params in members:
        kept = [i for i, p in enumerate(params) if p.requires_grad is trained]
        found.append(Members([names[i] for i in kept], [params[i] for i in kept]))
    return found


def classes_of(
    weights: nn.Module | Optimizer | Iterable[TensorClass], tied: Sequence[str] = ()
) -> list[TensorClass]:
    """The classes of the regularised tensors of a model or an optimizer, with their current rms. A
    list of classes is returned unchanged.

    In a model, the regularised tensors are the trained ones of two or more dimensions. An embedding
    is recognised as tied if the model has its weight under two names. If the model uses it as the
    head in another way, it must be named in ``tied`` (``*`` and ``?`` as in file names).

    >>> head = nn.Linear(8, 16, bias=False)
    >>> model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8), head)
    >>> head.weight = model[0].weight
    >>> [(c.name, c.count, c.tied) for c in classes_of(model)]
    [('*.weight 16x8', 128, True), ('*.weight 8x8', 128, False)]
    """
    check_patterns(tied)
    if not isinstance(weights, (nn.Module, Optimizer)):
        return _given_classes(weights)
    groups: Sequence[Mapping[str, Any]] = [{}]
    embeddings: set[int] = set()
    tied_ids: set[int] = set()
    if isinstance(weights, nn.Module):
        members, embeddings, tied_ids = _members_of_model(weights)
    else:
        members = regularised(weights)
        replaced = {"weight_decay": None}
        groups = [{**g, **(replaced if CONTROL in g else {})} for g in weights.param_groups]
    names, params = [n for m in members for n in m.names], [p for m in members for p in m.params]
    _check_not_empty(params)
    _check_tensors(names, params, tied)
    with torch.no_grad():
        norms = whole_norms(params, SCOPES["global"], Sharing(params)).tolist()
    found = []
    for label, group, indices in sort_members(members):
        count = sum(params[i].numel() for i in indices)
        is_tied = any(
            id(params[i]) in tied_ids or any(fnmatch.fnmatchcase(names[i], t) for t in tied)
            for i in indices
        )
        lr, decay = (
            None if groups[group].get(key) is None else float(groups[group][key])
            for key in ("lr", "weight_decay")
        )
        hidden = not is_tied and not any(id(params[i]) in embeddings for i in indices)
        rms = math.sqrt(sum(norms[i] ** 2 for i in indices) / count)
        found.append(TensorClass(label, count, rms, is_tied, hidden, group, lr, decay))
    return found


def _given_classes(weights: Any) -> list[TensorClass]:
    given = list(weights) if isinstance(weights, Iterable) else [weights]
    if not all(isinstance(c, TensorClass) for c in given):
        raise TypeError(
            "Give a model, an optimizer, or a list of TensorClass(name, count, rms). Nothing else "
            "is accepted."
        )
    _check_not_empty(given)
    return given


def check_patterns(tied: Sequence[str]) -> None:
    """Refuse one name in place of a list, which would be read letter by letter."""
    if isinstance(tied, str):
        raise TypeError(f"tied={tied!r} is one name: give a list of names, tied=[{tied!r}].")


def _members_of_model(model: nn.Module) -> tuple[list[Members], set[int], set[int]]:
    """The regularised tensors of a model, the ids of its embeddings, and the ids of those that it
    has under two names."""
    found = [
        (n, p)
        for n, p in model.named_parameters()
        if p.requires_grad and p.dim() >= 2 and p.numel()
    ]
    ids = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tied = {i for i in embeddings if ids.count(i) > 1}
    return [Members([n for n, _ in found], [p for _, p in found])], embeddings, tied


def _check_tensors(names: Sequence[str], params: Sequence[Tensor], tied: Sequence[str]) -> None:
    for name, p in zip(names, params, strict=True):
        if p.is_meta:
            raise ValueError(
                f"{name} is on the meta device, so it has no norm yet. Initialise the model first, "
                "or give TensorClass(name, count, rms) for each class of tensors."
            )
    for pattern in tied:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"tied={pattern!r} matches no regularised tensor. Names are, for example, "
                f"{', '.join(names[:3])}."
            )


def _check_not_empty(found: Sequence[Any]) -> None:
    if not found:
        raise ValueError(
            "Nothing is regularised: no trained tensor has two or more dimensions in a group that "
            "is decayed. Give a model or an optimizer with such tensors."
        )
