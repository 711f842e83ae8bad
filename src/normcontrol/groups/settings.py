"""The settings of a controlled parameter group: their defaults, and the checks of their values.

All settings live in the optimizer's ``param_groups`` beside ``lr`` and ``betas``. A group stores
its target, ``rate`` and ``scope``, and an optional setting only if it differs from its default.
Every error is a sentence: what was given, why it cannot be, what to do.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from normcontrol.groups.members import is_controlled
from normcontrol.law import law_of
from normcontrol.mechanisms.size import Statistic, as_size
from normcontrol.mechanisms.start import check_start
from normcontrol.schedule import as_schedule, check_range, linear
from normcontrol.scope import parse_scope
from normcontrol.target import TARGETS
from normcontrol.weights.rounding import DROPPED_BITS

Group = dict[str, Any]

PAPER_RATIO = linear(1.0, 2.0, steps=2500)
"""The paper's Figure 1 and best run: the norm doubles over 2,500 steps and then stays constant."""

MECHANISMS: dict[str, Any] = {"size": "norm", "start": 0, "relative_step": None, "cautious": False}
"""Settings that only some published methods use, and the values that mean "not used"."""

OPTIONAL: dict[str, Any] = {
    "law": "proportional",
    "order": "after",
    "controlled": "matrices",
    **MECHANISMS,
}
"""Settings that a group stores only if they differ from these values."""


def setting(group: Mapping[str, Any], name: str) -> Any:
    """Return an optional setting of a group, or its default."""
    return group.get(name, OPTIONAL[name])


def setting_names() -> tuple[str, ...]:
    """Return the names of all settings: the targets, the rate, the scope and the optional ones."""
    return (*TARGETS, "rate", "scope", *OPTIONAL)


def target_kind(group: Mapping[str, Any]) -> str:
    """Return the kind of target of a group: "ratio", "norm" or "rms"."""
    return next(name for name in TARGETS if group.get(name) is not None)


def normalise(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as a group stores them: one target, schedules, no optional defaults."""
    targets = {name: given[name] for name in TARGETS if given.get(name) is not None}
    if len(targets) > 1:
        raise ValueError(
            f"{' and '.join(targets)} were both given, but weights have one target: give one of "
            "them."
        )
    settings = {name: as_schedule(value) for name, value in targets.items()}
    if "rate" in given:
        settings["rate"] = as_schedule(given["rate"])
    if "scope" in given:
        settings["scope"] = given["scope"]
    for name, default in OPTIONAL.items():
        value = given.get(name, default)
        if name == "size":
            value = as_size(value)
        if name == "relative_step" and value is not None:
            value = as_schedule(value)
        if value != default:
            settings[name] = value
    return settings


def complete(group: Group, defaults: Mapping[str, Any]) -> None:
    """Fill in, in place, the settings that the group does not give itself."""
    own = normalise(group)
    own_target = any(name in own for name in TARGETS)
    inherited = {k: v for k, v in defaults.items() if not (own_target and k in TARGETS)}
    given = [name for name in setting_names() if name in group]
    for name in given:
        del group[name]
    own_defaults = {name for name in given if name in OPTIONAL and name not in own}
    group |= {name: value for name, value in inherited.items() if name not in own_defaults}
    group |= own


def check_group(index: int, group: Group, optimizer: Optimizer) -> None:
    """Refuse settings that cannot work."""
    kind = target_kind(group)
    why = "a norm cannot be negative, infinite or NaN. Give 0 or more."
    check_range(kind, group[kind], 0.0, 1e300, why)
    why = (
        "a rate outside [0, 1] overshoots the target (from 2 on it diverges) or runs away from it. "
        "Give a rate within [0, 1]."
    )
    check_range("rate", group["rate"], 0.0, 1.0, why)
    parse_scope(group["scope"])
    law_of(setting(group, "law"))
    order, controlled = setting(group, "order"), setting(group, "controlled")
    if order not in ("after", "before"):
        raise ValueError(
            f"order={order!r} is not known: give 'after' (Algorithm 1) or 'before' (as torch's "
            "AdamW decays)."
        )
    if controlled not in (True, False, "matrices"):
        raise ValueError(
            f"controlled={controlled!r} is not known: give True, False, or 'matrices' for two and "
            "more dimensions."
        )
    check_mechanisms(group)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    demands = closure is not None and closure.default is inspect.Parameter.empty
    if order == "before" and demands:
        raise ValueError(
            f"order='before' scales the weights between the closure and the step, but "
            f"{type(optimizer).__name__} calls its closure itself. Use order='after'."
        )
    check_decay(index, group, optimizer)


def check_mechanisms(group: Group) -> None:
    """Refuse optional mechanisms that do not work with the other settings of the group."""
    kind, scope = target_kind(group), parse_scope(group["scope"])
    size, start, relative, cautious = (setting(group, name) for name in MECHANISMS)
    check_start(start)
    if start and kind != "ratio":
        raise ValueError(
            f"start={start!r} takes the norm of that step as the reference, but the target is "
            f"given as {kind}=, which needs none. Give a ratio, 1.0 to keep that norm."
        )
    if isinstance(size, Statistic) and kind != "norm":
        raise ValueError(
            f"size={size!r} has no initial value that a {kind} could refer to: give its target as "
            "norm=."
        )
    if size == "spectral" and (scope.joint or scope.axes is not None or kind == "rms"):
        raise ValueError(
            "size='spectral' belongs to a single matrix: use it with scope='tensor' and a ratio "
            "or norm as target."
        )
    if relative is None and not cautious:
        return
    name = "cautious=True" if cautious else f"relative_step={relative!r}"
    if setting(group, "order") != "after":
        raise ValueError(
            f"{name} uses the step that the optimizer has made, so it needs order='after'."
        )
    if any(p.dtype in DROPPED_BITS for p in group["params"] if is_controlled(group, p)):
        raise ValueError(
            f"{name} works on differences of weights, which bf16 and fp16 cannot represent. Keep "
            "the weights in fp32."
        )


def check_decay(index: int, group: Group, optimizer: Optimizer) -> None:
    """Refuse weights that are both decayed and controlled."""
    decay = group.get("weight_decay", 0)
    decays = not isinstance(decay, Tensor) and decay
    if decays and any(is_controlled(group, p) for p in group["params"]):
        raise ValueError(
            f"Group {index} is under norm control and {type(optimizer).__name__} still decays it "
            f"with weight_decay={decay}: the two would pull against each other. Set weight_decay=0 "
            "there, or controlled=False to only decay it."
        )


def check_references(
    group: Group, reference: Tensor, names: list[str], params: list[Tensor]
) -> None:
    """Refuse a ratio to a reference norm of zero, where every part has a norm of its own."""
    scope = parse_scope(group["scope"])
    has_zero = len(reference) > 0 and not bool((reference > 0).all())
    if scope.joint or target_kind(group) != "ratio" or not has_zero:
        return
    for name, parts in zip(names, reference.split(scope.sizes(params)), strict=True):
        zeros = int((~(parts > 0)).sum())
        if zeros:
            where = f" in {zeros} of its {len(parts)} parts" if len(parts) > 1 else ""
            raise ValueError(
                f"{name} has an initial norm of zero{where}, so it has no ratio to it in "
                f"scope={group['scope']!r}. Give it an absolute target (norm= or rms=), or leave "
                "it out with controlled=False."
            )


def check_shared(groups: list[Group], indices: list[int]) -> None:
    """Refuse groups that share the global norm but have different settings for it."""
    first = groups[indices[0]]
    names = [name for name in setting_names() if name != "controlled"]
    for index in indices[1:]:
        for name in names:
            default = OPTIONAL.get(name)
            mine, theirs = (g.get(name, default) for g in (first, groups[index]))
            if mine != theirs:
                raise ValueError(
                    f"Groups {indices[0]} and {index} share the global norm, but have "
                    f"{name}={mine!r} and {theirs!r}. Use scope='group' in one of them, so that "
                    "it has a norm of its own."
                )


def check_sharded(group: Group) -> None:
    """Refuse settings that are not correct for weights that are spread over processes."""
    used = [
        f"{name}={setting(group, name)!r}"
        for name, default in MECHANISMS.items()
        if setting(group, name) != default
    ]
    if setting(group, "law") == "integral" and parse_scope(group["scope"]).axes is not None:
        used.append(f"law='integral' in scope={group['scope']!r}")
    if used:
        raise ValueError(
            f"{' and '.join(used)} cannot be used for weights that are spread over processes: it "
            "would be computed from this rank's shard of a tensor as if it were the whole. Leave "
            "these tensors whole, or control them without it."
        )
