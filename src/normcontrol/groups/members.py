"""Who is controlled: the default rule, the marks that people's parameter groups already carry, and
rules by name.

A group's ``controlled`` is True (all of it), False (none of it), or "matrices": tensors with two or
more dimensions, which leaves biases and norm layers alone as the paper does (section 4 and
appendix).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


def is_controlled(group: Mapping[str, Any], param: Tensor) -> bool:
    """Whether the group's ``controlled`` covers this tensor; a tensor without elements has no
    norm."""
    rule = group["controlled"]
    return bool(rule) and param.numel() > 0 and (rule is True or param.dim() >= 2)


def marks_of_decay(groups: Iterable[Mapping[str, Any]], default_decay: float) -> list[Any]:
    """What each group's ``weight_decay`` says about who is regularised.

    Groups that set their own decay mark who was decayed: non-zero is controlled, zero is left
    alone. If no group sets its own, or all are zero, nothing is marked and the matrices are
    controlled.

    >>> marks_of_decay([{"weight_decay": 0.1}, {"weight_decay": 0.0}], default_decay=0.01)     # nanoGPT
    [True, False]
    >>> marks_of_decay([{"weight_decay": 0.0}, {"weight_decay": 0.0}], default_decay=0.01)     # Hugging Face's default
    ['matrices', 'matrices']
    >>> marks_of_decay([{"weight_decay": 0.1}], default_decay=0.1)     # AdamW(model.parameters(), weight_decay=0.1)
    ['matrices']
    """
    decays = [float(group.get("weight_decay", 0.0)) for group in groups]
    if any(d != default_decay for d in decays) and any(decays):
        return [d != 0 for d in decays]
    return ["matrices"] * len(decays)


def param_groups(
    model: nn.Module, rules: Mapping[str, Mapping[str, Any] | None], **rest: Any
) -> list[dict[str, Any]]:
    """Parameter groups by name pattern, for any optimizer.

    Each rule maps a pattern (``*`` and ``?`` as in file names) to the settings of a group, or to
    None to leave those tensors alone. The first pattern that matches a name wins; a pattern that
    wins nothing is an error. What no pattern matches forms a last group with the settings ``rest``.
    In every group the matrices are controlled, unless its settings say ``controlled=True``.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    >>> groups = param_groups(model, {"0.*": None, "2.*": {"scope": "row", "lr": 1e-4}})
    >>> [(g["controlled"], [name for name, _ in g["params"]]) for g in groups]
    [(False, ['0.weight']), ('matrices', ['2.weight', '2.bias']), ('matrices', ['1.weight', '1.bias'])]
    """
    named = [(name, p) for name, p in model.named_parameters()]
    groups: list[dict[str, Any]] = []
    left = named
    for pattern, settings in rules.items():
        won = [(name, p) for name, p in left if fnmatch.fnmatchcase(name, pattern)]
        if not won:
            raise ValueError(
                f"The pattern {pattern!r} matches no parameter{_taken(pattern, named)}. The names "
                "are such as "
                f"{', '.join(name for name, _ in named[:3])}; mend the pattern or remove it."
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
                "of which has two or more "
                "dimensions, so nothing there would be controlled. Add controlled=True to its "
                "settings to control them all "
                "the same, or give None to leave them alone."
            )
        groups.append(group)
    if left:
        groups.append({"params": left, "controlled": "matrices", **rest})
    return groups


def _taken(pattern: str, named: list[tuple[str, Any]]) -> str:
    taken = [name for name, _ in named if fnmatch.fnmatchcase(name, pattern)]
    return f" that an earlier pattern has not taken already ({taken[0]}, for one)" if taken else ""
