"""The settings of a controlled parameter group: their defaults, and the checks of their values.

A group's settings are in ``group["control"]``, a name space of their own: an optimizer may have
keys with the same names in its groups (Adafactor has ``relative_step``). Settings are given as keys
of a group beside ``lr``, unless the wrapped optimizer has such a key; the controller then moves
them. Every error is a sentence: what was given, why it cannot be, what to do.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from normcontrol.custom_schedule import check_range
from normcontrol.groups.members import CONTROL, as_rule, controlled_params
from normcontrol.groups.outputs import as_axes
from normcontrol.law import as_law, law_of
from normcontrol.mechanisms.size import SPECTRAL, Statistic, as_size
from normcontrol.mechanisms.start import EVERY_STEP, check_start
from normcontrol.numbers import plain
from normcontrol.schedule_text import given_schedule
from normcontrol.scope import parse_scope
from normcontrol.target import RELATIVE, TARGETS
from normcontrol.weights.rounding import DROPPED_BITS

Group = dict[str, Any]
Settings = Mapping[str, Any]

MECHANISMS: dict[str, Any] = {
    "size": "norm",
    "start": 0,
    "relative_step": None,
    "min_relative_step": None,
    "cautious": False,
}
"""Settings that only some published methods use, and the values that mean "not used"."""

STEP_LENGTHS = ("relative_step", "min_relative_step")
"""Mechanisms that set the length of the optimizer's update."""

USE_UPDATES = frozenset((*STEP_LENGTHS, "cautious"))
"""Mechanisms that compare the weights with those before the optimizer's step."""

NEED_WHOLE_TENSORS = ("size", *STEP_LENGTHS)
"""Mechanisms that need more of a tensor than this rank's shard and the norms over all ranks: a
size is a function of the whole tensor, and no rank knows the length of a whole update."""

DEFAULTS: dict[str, Any] = {
    "rate": 0.1,
    "scope": "global",
    "law": "proportional",
    "order": "after",
    "controlled": "matrices",
    "outputs": None,
    **MECHANISMS,
}
"""The settings that every group has beside its target, with their defaults."""

MEMORIES = ("memory", "scales", "vectors")
"""What is remembered of the steps that were made."""

STATE_NAMES = ("step", "reference", "first_lr", *MEMORIES)
"""What ``group["control"]`` contains beside the settings; see :class:`ControlState`."""

FIXED = ("scope", "controlled", "size", "start")
"""Settings that the reference norms depend on: they cannot be changed after the first step."""


def setting_names() -> tuple[str, ...]:
    """Return the names of all settings: the kinds of target, and the rest."""
    return (*TARGETS, *DEFAULTS)


def target_kind(settings: Settings) -> str:
    """Return the kind of target: "ratio", "norm", "rms", "gain" or "hold"."""
    return next(name for name in TARGETS if settings.get(name) is not None)


def normalise(given: Settings) -> dict[str, Any]:
    """Return settings as they are stored: one target at most, numbers or schedules, plain axes."""
    targets = {name: given[name] for name in TARGETS if given.get(name) is not None}
    if len(targets) > 1:
        raise ValueError(
            f"{' and '.join(targets)} were both given, but weights have one target: give one of "
            "them."
        )
    settings = {name: given_schedule(value, name) for name, value in targets.items()}
    for name in DEFAULTS:
        if name not in given:
            continue
        value = given[name]
        if name == "rate" or (name in STEP_LENGTHS and value is not None):
            value = given_schedule(value, name)
        elif name == "scope":
            value = parse_scope(value).name
        elif name == "outputs":
            value = as_axes(value)
        elif name == "size":
            value = as_size(value)
        elif name == "start":
            value = plain(value)
        elif name == "law":
            value = as_law(value)
        settings[name] = value
    return settings


def with_defaults(given: Settings) -> dict[str, Any]:
    """Return all settings of a controller: those that are given, and for the rest the defaults."""
    settings = DEFAULTS | normalise(given)
    if not any(kind in settings for kind in TARGETS):
        settings["hold"] = 1.0
    return settings


def entry_of(group: Group) -> Settings:
    """Return what a group has under ``"control"``, an empty dict if nothing."""
    entry = group.get(CONTROL, {})
    if not isinstance(entry, Mapping):
        raise TypeError(
            f"The group's {CONTROL!r} is {entry!r}, but it is a dict of settings, such as "
            "{'rate': 0.5}. To leave the group alone, give it controlled=False."
        )
    return entry


def given_settings(group: Group, theirs: Collection[str]) -> dict[str, Any]:
    """Return the settings that a group gives itself.

    They are its keys with our names that are not ``theirs``, the wrapped optimizer's, and what the
    group has under ``"control"``.
    """
    own = dict(entry_of(group))
    unknown = [name for name in own if name not in (*setting_names(), *STATE_NAMES)]
    if unknown:
        raise ValueError(
            f"The group's {CONTROL!r} contains {unknown[0]!r}, which is no setting: the settings "
            f"are {', '.join(setting_names())}."
        )
    own = {name: own[name] for name in setting_names() if name in own}
    flat = {name: group[name] for name in setting_names() if name in group and name not in theirs}
    return {**own, **flat}


def completed(own: Settings, defaults: Settings, group: Group) -> dict[str, Any]:
    """Return all settings of a group: its own, and for the rest the defaults."""
    own = normalise(own)
    has_target = any(name in own for name in TARGETS)
    inherited = {k: v for k, v in defaults.items() if not (has_target and k in TARGETS)}
    settings = {**inherited, **own}
    settings["controlled"] = as_rule(settings["controlled"], group)
    return settings


def edited(
    group: Group, before: Settings, theirs: Collection[str], fixed: Collection[str]
) -> dict[str, Any]:
    """Return all settings of a group that was edited, if they may be changed.

    A new kind of target replaces the old one. ``fixed`` may not be changed.
    """
    own = given_settings(group, theirs)
    kinds = [name for name in TARGETS if own.get(name) is not None]
    if len(kinds) == 2:
        own = {name: value for name, value in own.items() if name != target_kind(before)}
    settings = completed(own, before, group)
    for name in fixed:
        if settings[name] != before[name]:
            raise ValueError(
                f"{name} was changed from {before[name]!r} to {settings[name]!r}, but the "
                "reference norms of this optimizer were measured with the former. Change it back, "
                "or construct a new optimizer. To stop the control of a group, set its rate to 0."
            )
    return settings


def check_group(index: int, group: Group, optimizer: Optimizer) -> None:
    """Refuse settings that cannot work."""
    settings = group[CONTROL]
    kind = target_kind(settings)
    why = "a norm cannot be negative, infinite or NaN. Give 0 or more."
    check_range(kind, settings[kind], 0.0, 1e300, why)
    why = (
        "a rate outside [0, 1] overshoots the target (from 2 on it diverges) or runs away from it. "
        "Give a rate within [0, 1]."
    )
    check_range("rate", settings["rate"], 0.0, 1.0, why)
    law_of(settings["law"])
    order = settings["order"]
    if order not in ("after", "before"):
        raise ValueError(
            f"order={order!r} is not known: give 'after' (Algorithm 1) or 'before' (as torch's "
            "AdamW decays)."
        )
    if not isinstance(settings["cautious"], bool):
        raise ValueError(f"cautious={settings['cautious']!r} is not known: give True or False.")
    check_mechanisms(group)
    check_tensors(settings, controlled_params(group, index))
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    demands = closure is not None and closure.default is inspect.Parameter.empty
    demands = demands or hasattr(optimizer, "second_step")  # SAM and its variants
    if order == "before" and demands:
        raise ValueError(
            f"order='before' scales the weights between the closure and the step, but "
            f"{type(optimizer).__name__} calls its closure itself. Use order='after'."
        )
    check_decay(index, group, optimizer)


def check_mechanisms(group: Group) -> None:
    """Refuse optional mechanisms that do not work with the other settings of the group."""
    settings = group[CONTROL]
    kind, scope = target_kind(settings), parse_scope(settings["scope"])
    size, start = settings["size"], settings["start"]
    check_start(start)
    if start and kind not in RELATIVE:
        raise ValueError(
            f"start={start!r} takes the norm of that step as the reference, but the target is "
            f"given as {kind}=, which needs none. Give a ratio, 1.0 to keep that norm."
        )
    if isinstance(size, Statistic) and kind != "norm":
        raise ValueError(
            f"size={size!r} has no initial value that a {kind} could refer to: give its target as "
            "norm=."
        )
    if size in SPECTRAL and (scope.joint or scope.axes is not None or kind in ("rms", "gain")):
        raise ValueError(
            f"size={size!r} belongs to a single matrix: use it with scope='tensor' and a ratio "
            "or norm as target."
        )
    for name in STEP_LENGTHS:
        if settings[name] is not None:
            why = "the length of an update cannot be negative, infinite or NaN. Give 0 or more."
            check_range(name, settings[name], 0.0, 1e300, why)
    if all(settings[name] is not None for name in STEP_LENGTHS):
        raise ValueError(
            "relative_step and min_relative_step were both given: the first sets the length of an "
            "update, so it has no least length. Give one of them."
        )
    used = updates_used(settings)
    if not used:
        return
    if settings["cautious"] and start == EVERY_STEP:
        raise ValueError(
            "cautious=True scales some of the weights, so that their norm after a step is not "
            "known, but start='every step' needs it. Use one of them."
        )
    if settings["order"] != "after":
        raise ValueError(
            f"{' and '.join(used)} uses the step that the optimizer has made, so it needs "
            "order='after'."
        )


def updates_used(settings: Settings) -> list[str]:
    """Return the mechanisms in use that compare weights with those before the step, as text."""
    given = {name: settings[name] for name in MECHANISMS if name in USE_UPDATES}
    return [f"{name}={value!r}" for name, value in given.items() if value != MECHANISMS[name]]


def check_tensors(settings: Settings, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse mechanisms that are not defined for one of these tensors, which have names."""
    size, cautious = settings["size"], settings["cautious"]
    used = updates_used(settings)
    for name, p in tensors:
        if used and p.dtype in DROPPED_BITS:
            raise ValueError(
                f"{' and '.join(used)} works on differences of weights, which bf16 and fp16 cannot "
                f"represent, but {name} is {p.dtype}. Keep the weights in fp32."
            )
        if cautious and p.is_complex():
            raise ValueError(
                f"cautious=True compares the signs of weights with those of their updates, but "
                f"{name} is complex. Leave it out with controlled=False, or use cautious=False."
            )
        if size in SPECTRAL and (p.dim() < 2 or p.is_complex()):
            what = "is complex" if p.is_complex() else f"has shape {tuple(p.shape)}"
            raise ValueError(
                f"size={size!r} is the largest singular value of a real matrix, but {name} {what}. "
                "Leave it out with controlled=False, or put it into a group with size='norm'."
            )


def check_decay(index: int, group: Group, optimizer: Optimizer) -> None:
    """Refuse weights that are both decayed and controlled."""
    decay = group.get("weight_decay", 0)
    if decay and controlled_params(group):
        raise ValueError(
            f"Group {index} is under norm control and {type(optimizer).__name__} still decays it "
            f"with weight_decay={decay}: the two would pull against each other. Set weight_decay=0 "
            "there, or controlled=False to only decay it."
        )


def check_references(
    group: Group, reference: Tensor, names: list[str], params: list[Tensor]
) -> None:
    """Refuse a ratio to a reference norm of zero, where every part has a norm of its own."""
    settings = group[CONTROL]
    scope = parse_scope(settings["scope"])
    has_zero = len(reference) > 0 and not bool((reference > 0).all())
    if scope.joint or target_kind(settings) not in RELATIVE or not has_zero:
        return
    if settings["start"] and settings["relative_step"] is None:
        return  # the norm of a later step replaces it
    pieces = reference.split(scope.sizes(params))
    for name, p, parts in zip(names, params, pieces, strict=True):
        zeros = int((~(parts > 0)).sum())
        if zeros and p.requires_grad:
            where = f" in {zeros} of its {len(parts)} parts" if len(parts) > 1 else ""
            what = "NaN" if bool(parts.isnan().any()) else "zero"
            raise ValueError(
                f"{name} has an initial norm of {what}{where}, so it has no ratio to it in "
                f"scope={scope.name!r}. Give it an absolute target (norm=, rms= or gain=), or "
                "leave it out with controlled=False."
            )


def check_shared(groups: list[Group], indices: list[int]) -> None:
    """Refuse groups that share the global norm but have different settings for it."""
    first = groups[indices[0]][CONTROL]
    names = [name for name in setting_names() if name not in ("controlled", "outputs")]
    for index in indices[1:]:
        for name in names:
            mine, theirs = first.get(name), groups[index][CONTROL].get(name)
            if mine != theirs:
                raise ValueError(
                    f"Groups {indices[0]} and {index} share the global norm, but have "
                    f"{name}={mine!r} and {theirs!r}. Use scope='group' in one of them, so that "
                    f"it has a norm of its own, or give both the same {name}."
                )


def check_sharded(group: Group) -> None:
    """Refuse settings that are not correct for weights that are spread over processes."""
    settings = group[CONTROL]
    used = [
        f"{name}={settings[name]!r}"
        for name in NEED_WHOLE_TENSORS
        if settings[name] != MECHANISMS[name]
    ]
    if used:
        raise ValueError(
            f"{' and '.join(used)} cannot be used for weights that are spread over processes: it "
            "would be computed from this rank's shard of a tensor as if it were the whole. Leave "
            "these tensors whole, or control them without it."
        )
