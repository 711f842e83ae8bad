"""Which settings of a run are used, given the others, and the refusal of those that are not.

A setting that is not used would look like a result: as if it had made no difference. This file
builds no optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from normcontrol.lab.errors import LabError
from normcontrol.lab.training import controls
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.optimizer_names import (
    OURS,
    TORCH,
    check_arguments,
    chosen,
    is_own,
    known_name,
)
from normcontrol.lab.training.optimizers import is_controlled, target_gain
from normcontrol.methods import METHODS

CONTROL = {"ratio", "gain", "ratio_start", "ramp", "growth", "rate", "scope"}
CHOICES = {*CONTROL, "betas", "weight_decay", "hidden_only", "norm_layers", "replay", "path"}
"""The settings that some optimizers use and others do not."""

OFF: dict[str, Any] = {
    "ratio": None,
    "gain": None,
    "hidden_only": False,
    "norm_layers": False,
    "replay": (),
    "path": (),
}
"""The settings that have a value for "not used", and that value. Any other value is a wish."""


def _taken(build: Callable[..., Any]) -> set[str]:
    """The settings that a function which builds an optimizer takes as its arguments."""
    takes = set(inspect.signature(build).parameters)
    return takes & CHOICES | ({"ratio"} if "kappa" in takes else set())


# The settings that each optimizer uses, beside those that all of them use. The rates and scopes of
# published methods are their own. Muon is accompanied by AdamW.
USES: dict[str, set[str]] = {
    **{name: _taken(METHODS[name].build) - {"rate", "scope"} for name in OURS},
    **{name: CONTROL | _taken(kind) for name, kind in TORCH.items()},
    **controls.USES,
    "AdamWN": CONTROL | {"betas", "hidden_only", "norm_layers"},
}
if "Muon" in TORCH:
    USES["Muon"] |= USES["AdamW"]


def uses(optimizer: str) -> set[str]:
    """The settings that an optimizer uses, beside those that all of them use."""
    if not is_own(optimizer):
        return USES[known_name(optimizer)]
    choice = chosen(optimizer)
    taken = {"betas", "weight_decay"} & _taken(choice.build)
    return taken if choice.takes_model else taken | CONTROL


@dataclass(frozen=True)
class Condition:
    """On what some settings depend."""

    settings: set[str]
    holds: Callable[[Config], bool]
    why: str
    """Why they have no effect if it does not hold."""
    instead: str = ""
    """What can be done, beside omitting them."""


CONDITIONS = (
    Condition(
        {"rate", "scope", "ramp", "ratio_start", "growth"},
        lambda c: is_controlled(c.optim),
        "the norm is not controlled",
        "give a ratio or a gain too",
    ),
    Condition(
        {"weight_decay"},
        lambda c: not is_controlled(c.optim) or known_name(c.optim.optimizer) == "Muon",
        "the norm is controlled, and then nothing is decayed",
    ),
    Condition(
        {"ramp", "ratio_start", "growth"},
        lambda c: target_gain(c) is None,
        "a gain is the target from the first step, without a ramp",
    ),
    Condition(
        {"ramp", "ratio_start"},
        lambda c: c.optim.growth == "ramp",
        "growth=walk goes from 1 to the ratio over the whole run",
    ),
    Condition({"ratio_start"}, lambda c: c.optim.ramp > 0, "there is no ramp", "give one"),
    Condition(
        {"decay"}, lambda c: c.optim.schedule == "wsd", "only wsd has it", "give schedule=wsd"
    ),
    Condition({"dropout_seed"}, lambda c: c.model.dropout > 0, "there is no dropout"),
    Condition(
        {"tokenizer"}, lambda c: c.data.data == "python", "prepared data has its own tokenizer"
    ),
)


def unused(config: Config, names: Iterable[str]) -> dict[str, str]:
    """Those of the named settings that have no effect in this config, and why: the end of a
    sentence, and what to do."""
    optimizer, found = known_name(config.optim.optimizer), {}
    used = uses(config.optim.optimizer)
    for name in names:
        reasons = [
            (condition.why, condition.instead)
            for condition in CONDITIONS
            if name in condition.settings and not condition.holds(config)
        ]
        if name in CHOICES - used:
            users = [other for other, its in USES.items() if name in its]
            few = f"choose {' or '.join(users)}" if len(users) < 4 else ""
            reasons.insert(0, (f"{optimizer} takes no {name}", few))
        for why, instead in reasons[:1]:
            advice = f", or {instead}" if instead else ""
            found[name] = f"would have no effect: {why}. Omit it{advice}."
    return found


def check_used(config: Config, given: Iterable[str] = ()) -> None:
    """Raise :class:`LabError` if a setting has no effect: one of those that were ``given``, by
    name, or one that can be off and is not; or if the ratio has no time to reach its target."""
    check_arguments(config.optim.optimizer)
    values = config.flat()
    wished = [name for name, off in OFF.items() if values[name] != off]
    for name, why in unused(config, dict.fromkeys([*given, *wished])).items():
        raise LabError(f"{name}={values[name]} {why}")
    ramp, steps = config.optim.ramp, config.run.steps
    if ramp > steps and not unused(config, ["ramp"]):
        raise LabError(
            f"ramp={ramp} is longer than steps={steps}: the ratio would never reach its target. "
            f"Use a shorter ramp, {max(steps // 20, 1)} for example, or 0 for none."
        )
