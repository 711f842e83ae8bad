"""The table of ``opt.report()``: which tensors are controlled, at which norm, with which target.

It formats what the controller stored at its last step. It measures no weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normcontrol.groups.readings import NOTHING_CONTROLLED, Reading, reading

if TYPE_CHECKING:
    from normcontrol.control import NormControl
    from normcontrol.groups.sets import WeightSet


def report(opt: NormControl) -> str:
    """Return the table. Every number in it was computed in the last step."""
    readings = opt.norms()  # before the sets are looked at: it takes over tensors that were changed
    tensors = sum(len(s.params) for s in opt.sets)
    weights = sum(p.numel() for s in opt.sets for p in s.params)
    total = sum(len(g["params"]) for g in opt.param_groups)
    name = type(opt).__name__
    inner = f" around {type(opt.optimizer).__name__}" if name == "NormControl" else ""
    lines = [
        f"{name}{inner}: {tensors} of {total} tensors controlled, {weights:,} weights, step "
        f"{int(opt.clock.step)}"
    ]
    if hasattr(opt, "implementation"):
        lines.append(f"the step runs in {opt.implementation}")
    if not opt.sets:
        lines.append(NOTHING_CONTROLLED)
    for s in opt.sets:
        lines += ["", _heading(s), *_rows(opt, s, readings)]
    return "\n".join(lines)


def _heading(s: WeightSet) -> str:
    how = f"rate {s.given['rate']}, law {s.settings['law']}, {s.order} the step"
    if "cautious" in s.mechanisms:  # see WeightSet.scaled
        how += ", cautious (the norm is that before the scaling)"
    return f"scope {s.scope.name}, {s.kind} {s.given[s.kind]}, {how}"


def _rows(opt: NormControl, s: WeightSet, readings: dict[str, Reading]) -> list[str]:
    cells = [("name", "shape", "initial norm", "norm", "gain", "ratio", "target")]
    if s.is_joint_over_ranks:  # the share of each tensor in the norm is not known
        tensors: Any = [[], [], [], [], []]
    else:
        now = s.part_norms(opt.clock)
        norms = (s.whole(known).split(s.counts) for known in (s.initial, now))
        tensors = (s.names, s.params, *norms, s.outputs)
    for name, p, first, now, outputs in zip(*tensors, strict=True):
        target = "" if s.scope.joint else _number(readings[name].target.norm().item())
        numbers = _numbers(first.norm().item(), now.norm().item(), outputs**0.5)
        cells.append((name, "x".join(map(str, p.shape)), *numbers, target))
    if s.scope.joint:
        start, current = s.scope.join(s.initial), s.scope.join(s.part_norms(opt.clock))
        gain = s.units.gain.item()  # of the outputs on all ranks
        numbers = _numbers(start.item(), current.item(), gain)
        cells.append(("all of them", "", *numbers, _number(reading(s, opt.clock).target.item())))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _numbers(start: float, now: float, unit: float) -> tuple[str, str, str, str]:
    """Return initial norm, norm, gain and ratio as text. ``unit`` is the norm of gain 1."""
    return _number(start), _number(now), _ratio(now, unit), _ratio(now, start)


def _number(value: float) -> str:
    return f"{value:.4g}" if value == value else "NaN"


def _ratio(now: float, start: float) -> str:
    return f"{now / start:.4f}" if start > 0 else "-"
