"""The settings of a parameter group under control: completed from the defaults, checked, stored and
restored.

All of them live in the optimizer's ``param_groups`` beside ``lr`` and ``betas``, where people look
for them, change them, and save them. Every refusal is a sentence: what was given, why it cannot be,
what to do.
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
from normcontrol.schedule_text import from_text
from normcontrol.scope import parse_scope
from normcontrol.steppers.rounding import DROPPED_BITS

PAPER_RATIO = linear(1.0, 2.0, steps=2500)
"""The paper's Figure 1 and best run: the norm doubles over 2,500 steps and stays there."""

TARGETS = ("ratio", "norm", "rms")
PLAIN: dict[str, Any] = {"size": "norm", "start": 0, "relative_step": None, "cautious": False}
"""What only some published methods set, and its value in all the others."""

SHARED = (*TARGETS, "rate", "scope", "law", "order", *PLAIN)
OURS = (*SHARED, "controlled", "first_lr", "control_step", "norm0")

Group = dict[str, Any]


def target_kind(group: Mapping[str, Any]) -> str:
    """Which of ratio, norm and rms a group's target is given as."""
    return next(name for name in TARGETS if group[name] is not None)


def complete(group: Group, defaults: Mapping[str, Any]) -> None:
    """Fill in what the group does not override."""
    own = {name: group[name] for name in TARGETS if group.get(name) is not None}
    chosen = (
        own
        or {name: defaults[name] for name in TARGETS if defaults[name] is not None}
        or {"ratio": PAPER_RATIO}
    )
    if len(chosen) > 1:
        raise ValueError(
            f"{' and '.join(chosen)} were both given, but weights have one target: give one of "
            "them."
        )
    for name in TARGETS:
        group[name] = as_schedule(chosen[name]) if name in chosen else None
    group["rate"] = as_schedule(group.get("rate", defaults["rate"]))
    for name in ("scope", "law", "order", *PLAIN):
        group.setdefault(name, defaults[name])
    group["size"] = as_size(group["size"])
    group["relative_step"] = (
        None if group["relative_step"] is None else as_schedule(group["relative_step"])
    )
    group.setdefault("controlled", "matrices")
    group.setdefault("first_lr", group.get("lr"))


def check_group(index: int, group: Group, optimizer: Optimizer) -> None:
    """Refuse settings that cannot be."""
    kind = target_kind(group)
    check_range(
        kind, group[kind], 0.0, 1e300, "a norm cannot be negative, infinite or NaN. Give 0 or more."
    )
    why = (
        "a rate outside [0, 1] overshoots the target (from 2 on it diverges) or runs away from "
        "it. Give a rate within [0, 1]."
    )
    check_range("rate", group["rate"], 0.0, 1.0, why)
    parse_scope(group["scope"])
    law_of(group["law"])
    if group["order"] not in ("after", "before"):
        raise ValueError(
            f"order={group['order']!r} is not known: give 'after' (Algorithm 1) or 'before' (as "
            "torch's AdamW decays)."
        )
    if group["controlled"] not in (True, False, "matrices"):
        raise ValueError(
            f"controlled={group['controlled']!r} is not known: give True, False, or 'matrices' for "
            "two and more dimensions."
        )
    check_unusual(group)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if (
        group["order"] == "before"
        and closure is not None
        and closure.default is inspect.Parameter.empty
    ):
        raise ValueError(
            "order='before' scales the weights between the closure and the step, but "
            f"{type(optimizer).__name__} calls its "
            "closure itself. Use order='after'."
        )
    check_decay(index, group, optimizer)


def check_unusual(group: Group) -> None:
    """Refuse what the settings of only some methods do not go together with."""
    check_start(group["start"])
    kind, scope = target_kind(group), parse_scope(group["scope"])
    if group["start"] and kind != "ratio":
        raise ValueError(
            f"start={group['start']!r} takes the norm of that moment as the reference, but the "
            f"target is given as {kind}=, which needs "
            "none. Give a ratio, 1.0 to hold that norm."
        )
    if isinstance(group["size"], Statistic) and kind != "norm":
        raise ValueError(
            f"size={group['size']!r} has no initial value that a {kind} could be taken of: give "
            "its target as norm=."
        )
    if group["size"] == "spectral" and (scope.joint or scope.axes is not None or kind == "rms"):
        raise ValueError(
            "size='spectral' is a matrix's own: use it with scope='tensor' and a ratio or norm as "
            "target."
        )
    if group["relative_step"] is None and not group["cautious"]:
        return
    name = "cautious=True" if group["cautious"] else f"relative_step={group['relative_step']!r}"
    if group["order"] != "after":
        raise ValueError(
            f"{name} looks at the step that the optimizer has made, so it needs order='after'."
        )
    if any(p.dtype in DROPPED_BITS for p in group["params"] if is_controlled(group, p)):
        raise ValueError(
            f"{name} works on differences of weights, which bf16 and fp16 cannot hold. Keep the "
            "weights in fp32."
        )


def check_decay(index: int, group: Group, optimizer: Optimizer) -> None:
    """Refuse weights that are both decayed and controlled."""
    decay = group.get("weight_decay", 0)
    if (
        not isinstance(decay, Tensor)
        and decay
        and any(is_controlled(group, p) for p in group["params"])
    ):
        raise ValueError(
            f"Group {index} is under norm control and {type(optimizer).__name__} still decays it "
            f"with weight_decay={decay}: "
            "the two would pull against each other. Set weight_decay=0 there, or controlled=False "
            "to only decay it."
        )


def check_references(group: Group, names: list[str], params: list[Tensor]) -> None:
    """Refuse a ratio to an initial norm of zero, where each part has a norm of its own."""
    scope, norms = parse_scope(group["scope"]), group["norm0"]
    if scope.joint or target_kind(group) != "ratio" or not len(norms) or bool((norms > 0).all()):
        return
    for name, parts in zip(names, norms.split(scope.sizes(params)), strict=True):
        zeros = int((~(parts > 0)).sum())
        if zeros:
            where = f" in {zeros} of its {len(parts)} parts" if len(parts) > 1 else ""
            raise ValueError(
                f"{name} has an initial norm of zero{where}, so no ratio to it can be held in "
                f"scope={group['scope']!r}. Give it an "
                "absolute target (norm= or rms=), or leave it out with controlled=False."
            )


def check_shared(groups: list[Group], indices: list[int]) -> None:
    """Refuse groups that share the global norm and disagree about it."""
    first = groups[indices[0]]
    for index in indices[1:]:
        for name in SHARED:
            if first[name] != groups[index][name]:
                raise ValueError(
                    f"Groups {indices[0]} and {index} share the global norm, but have "
                    f"{name}={first[name]!r} and "
                    f"{groups[index][name]!r}. Use scope='group' in one of them, so that it has a "
                    "norm of its own."
                )


def check_sharded(group: Group) -> None:
    """Refuse what is not right under sharding."""
    unusual = [f"{name}={group[name]!r}" for name, value in PLAIN.items() if group[name] != value]
    if group["law"] == "integral" and parse_scope(group["scope"]).axes is not None:
        unusual.append(f"law='integral' in scope={group['scope']!r}")
    if unusual:
        raise ValueError(
            f"{' and '.join(unusual)} cannot be used for weights that are spread over processes: "
            "it would be computed from this rank's "
            "piece of a tensor as if it were the whole. Leave these tensors whole, or control them "
            "without it."
        )


def restored(index: int, saved: Group, live: Group) -> Group:
    """A saved group as it was, if it fits the live one."""
    if parse_scope(saved["scope"]) != parse_scope(live["scope"]):
        raise ValueError(
            f"The state of group {index} was saved with scope={saved['scope']!r}, but the "
            f"optimizer has scope={live['scope']!r}; "
            "reference norms of one scope mean nothing in another. Construct the optimizer with "
            "the saved scope."
        )
    if saved["norm0"].shape != live["norm0"].shape:
        raise ValueError(
            f"The state of group {index} holds {saved['norm0'].numel()} reference norms, but "
            f"{live['norm0'].numel()} are needed: "
            "other tensors were controlled when it was saved. Control the same ones, or start anew "
            "without this state."
        )
    saved = {
        **saved,
        **{name: live[name] for name in PLAIN if name not in saved},
    }  # of an earlier version
    scheduled = {
        name: from_text(saved[name], live[name]) for name in (*TARGETS, "rate", "relative_step")
    }
    return {**saved, **scheduled, "size": _restored_size(saved["size"], live["size"])}


def _restored_size(saved: str, live: Any) -> Any:
    if not saved.startswith("statistic("):
        return as_size(saved)
    if isinstance(live, Statistic):
        return live
    raise ValueError(
        f"The checkpoint was made with the function {saved[10:-1]} as the size of weights, and a "
        "function cannot be stored. Construct the "
        "optimizer with the same function before loading."
    )


def adapted(saved: Group, live: Group) -> Group:
    """A group saved without norm control, with our settings added; what it decayed, we do not."""
    return {**saved, **{key: live[key] for key in (*OURS, "memory", "weight_decay") if key in live}}
