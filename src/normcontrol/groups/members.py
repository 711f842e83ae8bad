"""Which weights are controlled: the default rule, marks in existing groups, rules by name.

A group's ``controlled`` is True (all tensors), False (none), "matrices" (tensors with two or more
dimensions), or a tuple of names. "matrices" is the default; it leaves biases and norm layers alone,
as the paper does (section 4 and appendix). This file knows nothing about targets, rates or scopes.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from normcontrol.distributed.layouts import is_flat_shard, refuse_flat_shard
from normcontrol.distributed.ranks import is_dtensor
from normcontrol.groups.outputs import split_by_outputs
from normcontrol.weights.memory import overlaps, view_of

CONTROL = "control"
"""The key of a group under which the controller stores its settings and state."""

Controlled = bool | str | tuple[str, ...] | Callable[[str, Tensor], bool]
"""The type of ``controlled``: True, False, "matrices", names, or a function of name and tensor."""


class Members(NamedTuple):
    """The controlled tensors of a group, and their names."""

    names: list[str]
    params: list[Tensor]


def as_rule(controlled: Controlled, group: Mapping[str, Any]) -> bool | str | tuple[str, ...]:
    """Return ``controlled`` as a group stores it: a function as the names that it selects."""
    if isinstance(controlled, bool) or controlled == "matrices":
        return controlled
    if isinstance(controlled, str) or not (callable(controlled) or isinstance(controlled, tuple)):
        raise ValueError(
            f"controlled={controlled!r} is not known: give True, False, 'matrices' for two and "
            "more dimensions, or a function of name and tensor."
        )
    names = group.get("param_names")
    if names is None:
        raise ValueError(
            f"controlled={controlled!r} selects tensors by name, but they have no names. Give the "
            "optimizer model.named_parameters() in place of model.parameters()."
        )
    if isinstance(controlled, tuple):
        return controlled
    return tuple(
        name for name, p in zip(names, group["params"], strict=True) if controlled(name, p)
    )


def rule_of(group: Mapping[str, Any]) -> bool | str | tuple[str, ...]:
    """Return which tensors of a group are controlled, as it is stored."""
    rule: bool | str | tuple[str, ...] = group.get(CONTROL, group).get("controlled", "matrices")
    return rule


def controlled_params(group: Mapping[str, Any], index: int = 0) -> list[tuple[str, Tensor]]:
    """Return the tensors that the group's ``controlled`` includes, with their names.

    A tensor without elements has no norm, and those of a quantised model cannot be scaled.
    """
    rule = rule_of(group)
    found = []
    for j, p in enumerate(group["params"]):
        name = name_of(group, index, j)
        chosen = name in rule if isinstance(rule, tuple) else rule is True or p.dim() >= 2
        if rule and chosen and p.numel() > 0 and can_be_scaled(p):
            found.append((name, p))
    return found


def can_be_scaled(p: Tensor) -> bool:
    """Return whether the elements of a tensor are numbers of 16 bits or more with fractions."""
    return (p.is_floating_point() or p.is_complex()) and p.element_size() > 1


def members_of(groups: Sequence[Mapping[str, Any]]) -> list[Members]:
    """Return the controlled tensors of every group; a tied tensor counts once."""
    refuse_overlaps(groups)
    seen: set[Any] = set()
    found = []
    for index, group in enumerate(groups):
        members = Members([], [])
        for name, p in controlled_params(group, index):
            # A DTensor has no address of its own, and its shard on this rank may be empty.
            memory = id(p) if is_dtensor(p) else view_of(p) or id(p)
            if memory not in seen:
                members.names.append(name)
                members.params.append(p)
            seen.add(memory)
        found.append(members)
    return found


def refuse_overlaps(groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a controlled tensor that has only some of its elements in common with another one."""
    controlled = {id(p) for group in groups for _, p in controlled_params(group)}
    everyone = [
        (name_of(group, index, j), p)
        for index, group in enumerate(groups)
        for j, p in enumerate(group["params"])
        if not is_dtensor(p)
    ]
    for pair in overlaps([p for _, p in everyone]):
        (name, p), (other, q) = (everyone[position] for position in pair)
        if view_of(p) != view_of(q) and not controlled.isdisjoint((id(p), id(q))):
            raise ValueError(
                f"{name} of shape {tuple(p.shape)} and {other} of shape {tuple(q.shape)} are "
                "different views of the same memory: the weights that they share would be counted "
                "in the norm and scaled twice. Give the optimizer one of them, or two copies."
            )


def refuse_flat_shards(groups: Sequence[Mapping[str, Any]], members: Sequence[Members]) -> None:
    """Refuse flat shards that the rule for matrices would leave alone in silence.

    Where some are controlled, the other ones were sorted out by hand.
    """
    if any(is_flat_shard(p) for _, params in members for p in params):
        return
    for index, group in enumerate(groups):
        for j, p in enumerate(group["params"]):
            if is_flat_shard(p) and rule_of(group) == "matrices":
                refuse_flat_shard(name_of(group, index, j))


def name_of(group: Mapping[str, Any], index: int, j: int) -> str:
    """Return the name of a group's tensor, as the model or its position gives it."""
    names = group.get("param_names") or ()
    # A tensor that was added to the list by hand has no name. If some were removed, the names are
    # those of other tensors.
    is_named = j < len(names) <= len(group["params"])
    return names[j] if is_named else f"group{index}.tensor{j}"


def marks_of_decay(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the value of ``controlled`` for every group, from its ``weight_decay``.

    Where some groups decay and others do not, those that decay are controlled, and the others are
    not. If all decay, or none does, that marks nothing, and the matrices are controlled. The value
    of a decay does not matter.

    >>> nanogpt = [{"weight_decay": 0.1}, {"weight_decay": 0.0}]
    >>> marks_of_decay(nanogpt)
    [True, False]
    >>> one_decay_for_all = [{"weight_decay": 0.1}]
    >>> marks_of_decay(one_decay_for_all)
    ['matrices']
    >>> huggingface_default = [{"weight_decay": 0.0}, {"weight_decay": 0.0}]
    >>> marks_of_decay(huggingface_default)
    ['matrices', 'matrices']
    """
    decays = [bool(group.get("weight_decay", 0.0)) for group in groups]
    if any(decays) and not all(decays):
        return decays
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
    if not isinstance(model, nn.Module) or not isinstance(rules, Mapping):
        raise TypeError(
            f"param_groups takes a model and a dict of patterns, but got a {type(model).__name__} "
            f"and a {type(rules).__name__}. Call it as param_groups(model, {{'head.*': None}})."
        )
    for pattern, settings in rules.items():
        if settings is not None and not isinstance(settings, Mapping):
            raise TypeError(
                f"The pattern {pattern!r} has the settings {settings!r}, which are no dict. Give "
                "a dict such as {'scope': 'tensor'}, or None to leave its tensors alone."
            )
    named = list(model.named_parameters())
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
        as_given = {"params": [p for _, p in won], "param_names": [name for name, _ in won]}
        as_given["controlled"] = as_rule(group["controlled"], as_given)
        if settings is not None and not controlled_params(as_given):
            raise ValueError(
                f"The pattern {pattern!r} matches {', '.join(name for name, _ in won[:3])}, none "
                "of which has two or more dimensions, so nothing there would be controlled. Add "
                "controlled=True to its settings to control them anyway, or give None to leave "
                "them alone."
            )
        groups.append(group)
    if left:
        groups.append({"params": left, "controlled": "matrices", **rest})
    return split_by_outputs(groups, model)


def _matched_before(pattern: str, named: list[tuple[str, Any]]) -> str:
    """Say what a pattern that has no parameters matches: nothing, or those of earlier patterns."""
    found = [name for name, _ in named if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        return "no parameter"
    return f"only parameters that an earlier pattern matches, such as {found[0]}"
