"""Classes of tensors: those that play the same part in every layer, such as all the ``c_fc`` of a
GPT.

A class is what a prediction, a calibration or a table of norms speaks of. Tensors are sorted into
classes by name, shape and group; what is done with them is said elsewhere.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normcontrol.distributed.shards import whole_norms
from normcontrol.distributed.sharing import Sharing
from normcontrol.groups.members import Members, marks_of_decay, members_of
from normcontrol.scope import SCOPES


@dataclass(frozen=True)
class TensorClass:
    """Regularised tensors of one kind: how many weights they have together, and the root mean
    square of these at the start.

    ``tied``: an embedding that is the output head as well. ``hidden``: not an embedding. ``group``:
    the optimizer's group that they are in, with its ``lr`` and ``weight_decay`` where it has them.
    """

    name: str
    count: int
    rms: float
    tied: bool = False
    hidden: bool = True
    group: int = 0
    lr: float | None = None
    weight_decay: float | None = None


def class_names(names: Sequence[str], params: Sequence[Tensor]) -> list[str]:
    """The class of every tensor: its name without the numbers of layers, with its shape where one
    such name has several.

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
    """The classes of the members of all groups: name, group, and which of all the tensors they are.
    No two have the same name."""
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


def regularised(optimizer: Optimizer) -> list[Members]:
    """The tensors of every group that the optimizer regularises, decided as AdamWN decides who is
    controlled."""
    marks = marks_of_decay(optimizer.param_groups, optimizer.defaults.get("weight_decay", 0.0))
    return members_of(
        [
            {"controlled": mark, **group}
            for group, mark in zip(optimizer.param_groups, marks, strict=True)
        ]
    )


def classes_of(
    weights: nn.Module | Optimizer | Iterable[TensorClass], tied: Sequence[str] = ()
) -> list[TensorClass]:
    """The classes of what a model or an optimizer regularises, with their present size; given
    classes stay as they are.

    Of a model these are the trained tensors of two or more dimensions. An embedding is seen to be
    tied if the model holds its weight under two names; one that is used as the head by hand must be
    named in ``tied`` (``*`` and ``?`` as in file names).

    >>> model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False))
    >>> model[3].weight = model[0].weight
    >>> [(c.name, c.count, c.tied) for c in classes_of(model)]
    [('*.weight 16x8', 128, True), ('*.weight 8x8', 128, False)]
    """
    groups: list[dict[str, Any]] = [{}]
    twice: set[int] = set()
    embeddings: set[int] = set()
    if isinstance(weights, nn.Module):
        kept = [
            (n, p)
            for n, p in weights.named_parameters()
            if p.requires_grad and p.dim() >= 2 and p.numel()
        ]
        members = [Members([n for n, _ in kept], [p for _, p in kept])]
        every = [id(p) for _, p in weights.named_parameters(remove_duplicate=False)]
        embeddings = {id(m.weight) for m in weights.modules() if isinstance(m, nn.Embedding)}
        twice = {i for i in embeddings if every.count(i) > 1}
    elif isinstance(weights, Optimizer):
        groups, members = weights.param_groups, regularised(weights)
    else:
        given = list(weights)
        if not all(isinstance(c, TensorClass) for c in given):
            raise TypeError(
                "Give a model, an optimizer, or a list of TensorClass(name, count, rms): there is "
                "nothing else to predict for."
            )
        _refuse_nothing(given)
        return given
    names, params = [n for m in members for n in m.names], [p for m in members for p in m.params]
    _refuse_nothing(params)
    for name, p in zip(names, params, strict=True):
        if p.is_meta:
            raise ValueError(
                f"{name} is on the meta device, so it has no norm yet. Initialise the model first, "
                "or give TensorClass(name, count, rms) "
                "for each kind of tensor."
            )
    for pattern in tied:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"tied={pattern!r} matches no regularised tensor; the names are such as "
                f"{', '.join(names[:3])}."
            )
    with torch.no_grad():
        norms = whole_norms(params, SCOPES["global"], Sharing(params)).tolist()
    found = []
    for label, group, indices in sort_members(members):
        count = sum(params[i].numel() for i in indices)
        is_tied = any(
            id(params[i]) in twice or any(fnmatch.fnmatchcase(names[i], t) for t in tied)
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


def _refuse_nothing(found: Sequence[Any]) -> None:
    if not found:
        raise ValueError(
            "Nothing is regularised: no trained tensor has two or more dimensions in a group that "
            "is decayed. Give a model, or an "
            "optimizer, with weights whose norm can be predicted."
        )
