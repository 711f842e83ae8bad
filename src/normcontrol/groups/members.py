"""Who is controlled: the default rule, the marks in existing parameter groups, rules by name.

A group's ``controlled`` is True (all tensors), False (none), or "matrices": tensors with two or
more dimensions. The last is the default; it leaves biases and norm layers alone, as the paper does
(section 4 and appendix). This file knows nothing about targets, rates or scopes.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from normcontrol.distributed.ranks import is_dtensor


class Members(NamedTuple):
    """The controlled tensors of a group, and their names."""

    names: list[str]
    params: list[Tensor]


def is_controlled(group: Mapping[str, Any], param: Tensor) -> bool:
    """Return whether the group's ``controlled`` includes this tensor.

    A tensor without elements has no norm.
    """
    rule = group.get("controlled", "matrices")
    return bool(rule) and param.numel() > 0 and (rule is True or param.dim() >= 2)


def members_of(groups: Sequence[Mapping[str, Any]]) -> list[Members]:
    """Return the controlled tensors of every group; a tied tensor counts once."""
    seen: set[Any] = set()
    found = []
    for index, group in enumerate(groups):
        members = Members([], [])
        names = group.get("param_names")
        for j, p in enumerate(group["params"]):
            if not is_controlled(group, p):
                continue
            # A DTensor has no address of its own, and its shard on this rank may be empty.
            by_identity = p.is_meta or is_dtensor(p)
            memory = id(p) if by_identity else (p.device, p.data_ptr(), p.shape, p.stride())
            if memory not in seen:
                members.names.append(names[j] if names else f"group{index}.tensor{j}")
                members.params.append(p)
            seen.add(memory)
        found.append(members)
    return found


def marks_of_decay(groups: Iterable[Mapping[str, Any]], default_decay: float) -> list[Any]:
    """Return the value of ``controlled`` for every group, from its ``weight_decay``.

    If groups set their own decay, those with a decay are controlled, and those with zero are not.
    If no group sets its own, or all are zero, the matrices are controlled.

    >>> nanogpt = [{"weight_decay": 0.1}, {"weight_decay": 0.0}]
    >>> marks_of_decay(nanogpt, default_decay=0.01)
    [True, False]
    >>> huggingface_default = [{"weight_decay": 0.0}, {"weight_decay": 0.0}]
    >>> marks_of_decay(huggingface_default, default_decay=0.01)
    ['matrices', 'matrices']
    >>> one_decay_for_all = [{"weight_decay": 0.1}]
    >>> marks_of_decay(one_decay_for_all, default_decay=0.1)
    ['matrices']
    """
    decays = [float(group.get("weight_decay", 0.0)) for group in groups]
    if any(d != default_decay for d in decays) and any(decays):
        return [d != 0 for d in decays]
    return ["matrices"] * len(decays)


def param_groups(
    model: nn.Module, rules: Mapping[str, Mapping[str, Any] | None], **rest: Any
) -> list[dict[str, Any]]:
    """Return parameter groups by name pattern, for any optimizer.

    Each rule maps a pattern (``*`` and ``?`` as in file names) to the settings of a group, or to
    None to leave those tensors alone. The first pattern that matches a name wins; a pattern that
    wins nothing is an error. What no pattern matches forms a last group with the settings ``rest``.
    In every group the matrices are controlled, unless its settings say ``controlled=True``.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    >>> groups = param_groups(model, {"0.*": None, "2.*": {"scope": "row", "lr": 1e-4}})
    >>> for group in groups:
    ...     print(group["controlled"], [name for name, _ in group["params"]])
    False ['0.weight']
    matrices ['2.weight', '2.bias']
    matrices ['1.weight', '1.bias']
    """
    named = [(name, p) for name, p in model.named_parameters()]
    groups: list[dict[str, Any]] = []
    left = named
    for pattern, settings in rules.items():
        won = [(name, p) for name, p in left if fnmatch.fnmatchcase(name, pattern)]
        if not won:
            raise ValueError(
                f"The pattern {pattern!r} matches {_matched_before(pattern, named)}. The names are "
                f"such as {', '.join(name for name, _ in named[:3])}; correct the pattern or "
                "remove it."
            )
        left = [(name, p) for name, p in left if not fnmatch.fnmatchcase(name, pattern)]
        group = {
            "params": won,
            "controlled": False if settings is None else "matrices",
            **(settings or {}),
        }
        if settings is not None and not any(is_controlled(group, p) for _, p in won):
            raise ValueError(
                f"The pattern {pattern!r} matches {', '.join(name for name, _ in won[:3])}, none "
                "of which has two or more dimensions, so nothing there would be controlled. Add "
                "controlled=True to its settings to control them anyway, or give None to leave "
                "them alone."
            )
        groups.append(group)
    if left:
        groups.append({"params": left, "controlled": "matrices", **rest})
    return groups


def _matched_before(pattern: str, named: list[tuple[str, Any]]) -> str:
    """Say what a pattern that has no parameters matches: nothing, or those of earlier patterns."""
    found = [name for name, _ in named if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        return "no parameter"
    return f"only parameters that an earlier pattern matches, such as {found[0]}"
