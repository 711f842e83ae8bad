"""The challenge: train AdamW, then train other methods at the norm that AdamW ended with.

It is a study whose settings come from the command line: a config, arms and a number of seeds. Every
arm of a seed starts from the same weights and sees the same batches in the same order.
"""

from __future__ import annotations

import json
import re
import statistics
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from normcontrol.lab import own_files
from normcontrol.lab.errors import LabError, nearest
from normcontrol.lab.ranges import Count, check_value
from normcontrol.lab.study.cells import Cell, Story, Study
from normcontrol.lab.study.comparison import BUDGET, seeds_in_words
from normcontrol.lab.study.records import Results, config_of
from normcontrol.lab.study.verdict import Row, Verdict
from normcontrol.lab.training.config import Config, check, field_type
from normcontrol.lab.training.optimizer_names import TORCH, known_name, located
from normcontrol.lab.training.options import OFF, check_used, unused

NAME = "challenge"

ARM = re.compile(r"(?P<name>[^:(]*)(?P<arguments>(?:\(.*\))?)(?::(?P<changes>.*))?", re.DOTALL)
"""An arm as text, behind the path of a user's file."""

RATIO = "the baseline's final ratio"
"""A placeholder for a number that is known after the baseline is trained."""

SHARED = ("init_seed", "data_seed", "dropout_seed", "data", "tokenizer")
"""Settings that the text of an arm cannot change. Arms are paired: they share seeds and data."""


@dataclass(frozen=True)
class Arm:
    """A method to compare: its name, and what it changes in the config."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    """The names of the changes that are written out in its text."""

    def cell(self, base: Config, seed: int, ratio: float | None = None) -> Cell:
        """The run of this arm with a seed; ``ratio`` is that with which the baseline ended."""
        changes = {key: ratio if value is RATIO else value for key, value in self.changes.items()}
        seeds = {
            "init_seed": base.model.init_seed + seed,
            "data_seed": base.data.data_seed + seed,
            "dropout_seed": base.model.dropout_seed + seed,
        }
        config = base.with_(**changes, **seeds)
        # A setting for all arms is for those that can use it.
        off = {key: OFF[key] for key in unused(config, OFF) if key not in self.own}
        return Cell(self.name, config.with_(**off), seed)


def _free(name: str) -> dict[str, Any]:
    """The changes of an arm whose norm is not controlled."""
    return {"optimizer": name, "ratio": None, "gain": None}


BASELINE = Arm("AdamW", _free("AdamW"))
KNOWN = {
    "adamw": BASELINE,
    "adamwn": Arm("AdamWN", {"optimizer": "AdamWN", "ratio": RATIO, "gain": None}),
    "scaled": Arm("AdamW from scaled weights", {**_free("AdamW"), "init_scale": RATIO}),
    "adamc": Arm("AdamC", _free("AdamC")),
}


def parse_arm(text: str) -> Arm:
    """An arm from its name and changes: "adamwn", "scaled", "adamw:weight_decay=0.05",
    "adamwn:gain=0.8", "adamwn:ratio=2.4,scope=tensor", "SGD(momentum=0.9):lr=0.1", or
    "path/to/file.py:NAME:lr=0.1" for an optimizer of the user's own.

    >>> arm = parse_arm("adamw:weight_decay=0.05")
    >>> arm.name
    'AdamW weight_decay=0.05'
    >>> arm.changes
    {'optimizer': 'AdamW', 'ratio': None, 'gain': None, 'weight_decay': 0.05}
    """
    path, call = own_files.split(text)
    found = ARM.fullmatch(call)
    if found is None:
        raise LabError(f"The arm {text!r} should be NAME:key=value,key=value.")
    known = _known(path, found["name"].strip(), found["arguments"])
    changes: dict[str, Any] = {}
    for pair in filter(None, (found["changes"] or "").split(",")):
        key, equals, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise LabError(
                f"The arm {text!r} should be NAME:key=value,key=value; {pair!r} has no value."
            )
        if key == "optimizer":
            raise LabError(
                f"The arm {text!r} names two optimizers. Give one, as in --arms {value}."
            )
        if key in SHARED:
            raise LabError(
                f"The arm {text!r} cannot have {key} of its own: all arms share their seeds and "
                f"data. Give it to all arms, as --{key.replace('_', '-')}."
            )
        if key in changes:
            raise LabError(f"The arm {text!r} has two values for {key}. Give one of them.")
        changes[key] = _read(key, value.strip())
    words = (f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in changes.items())
    other_target = {"ratio": None} if "gain" in changes else {}
    return Arm(
        f"{known.name} {', '.join(words)}".strip(),
        {**known.changes, **other_target, **changes},
        tuple(changes),
    )


def _known(path: str, name: str, arguments: str) -> Arm:
    """The arm without its changes. ``path`` is that of a user's file, ``arguments`` are those of
    the optimizer with their parentheses; either may be empty."""
    given = f"{path}:{name}" if path else name
    known = KNOWN.get(given.lower())
    if known is None:
        try:
            spelled = known_name(given)
        except LabError:
            raise LabError(
                f"There is no arm {name!r}. {nearest(name, [*KNOWN, *sorted(TORCH)])}"
            ) from None
        known = Arm(spelled, _free(given if path else spelled))
    optimizer = known.changes["optimizer"] + arguments
    return Arm(known.name + arguments, {**known.changes, "optimizer": optimizer})


def _read(key: str, text: str) -> Any:
    """A value given as text, by the type of its field."""
    kind = field_type(key)
    kinds = (
        [k for k in typing.get_args(kind) if k is not type(None)]
        if typing.get_origin(kind) in (typing.Union, types.UnionType)
        else [kind]
    )
    if typing.get_origin(kinds[0]) is typing.Literal:
        if text not in typing.get_args(kinds[0]):
            raise LabError(
                f"{key}={text!r} is not a choice. {nearest(text, typing.get_args(kinds[0]))}"
            )
        return text
    if kinds[0] not in (int, float, str):
        raise LabError(f"{key} cannot be set in an arm: set it for all arms with its own flag.")
    try:
        return kinds[0](text)
    except ValueError:
        raise LabError(f"{key}={text!r} is not a number.") from None


def all_arms(given: Sequence[str]) -> list[Arm]:
    """The arms that are given as text, after the baseline."""
    arms = [parse_arm(text) for text in given]
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise LabError(f"The arms are {', '.join(names)}: each must differ from the others.")
    return [BASELINE, *(arm for arm in arms if arm != BASELINE)]


def settings_of(config: Config, arms: Sequence[str], seeds: int) -> dict[str, Any]:
    """The settings of a challenge, as its folder stores them."""
    content = {"config": config.flat(), "arms": list(arms), "seeds": seeds}
    settings: dict[str, Any] = json.loads(json.dumps(content))
    return settings


def check_settings(settings: Mapping[str, Any], given: Sequence[str] = ()) -> None:
    """Refuse what cannot be run or compared, before anything is run.

    Args:
        settings: the settings of a challenge.
        given: the names of the settings of the config that the user has given. Each must have an
            effect in one of the arms.
    """
    check_value("seeds", settings["seeds"], Count)
    base, arms = config_of(settings["config"]), all_arms(settings["arms"])
    configs = [arm.cell(base, seed=0, ratio=1.0).config for arm in arms]
    for arm, config in zip(arms, configs, strict=True):
        check(config)
        check_used(config, arm.own)
        for key in arm.own:
            if key in BUDGET:
                raise LabError(
                    f"The arm {arm.name!r} could not be compared with the others, since {key} "
                    f"would differ. Give it to all arms, as --{key.replace('_', '-')}."
                )
    for key in given:
        left = [c for arm, c in zip(arms, configs, strict=True) if key not in arm.changes]
        if not left:
            value = base.flat()[key]
            instead = value if key == "optimizer" else f"adamwn:{key}=VALUE"
            raise LabError(
                f"{key}={value} would have no effect: every arm has its own. Use --arms instead, "
                f"as in --arms {instead}."
            )
        why = [unused(config, [key]).get(key) for config in left]
        if all(why):
            raise LabError(f"{key}={base.flat()[key]} {why[-1]}")


def study(settings: Mapping[str, Any], out: Path | None = None) -> Study:
    """The study with these settings, in the folder ``out``."""
    base, seeds = config_of(settings["config"]), settings["seeds"]
    arms = [
        replace(arm, changes={**arm.changes, "optimizer": located(arm.changes["optimizer"], out)})
        for arm in all_arms(settings["arms"])
    ]

    def cells(scale: str, done: Results) -> list[Cell]:
        wanted = []
        for seed in range(seeds):
            baseline = BASELINE.cell(base, seed)
            wanted.append(baseline)
            record = done.of(baseline)
            if record is None:
                return wanted
            if record.good:
                wanted += [arm.cell(base, seed, record.final["ratio"]) for arm in arms[1:]]
        return wanted

    return Study(
        NAME, cells, baseline=BASELINE.name, story=_story(arms[1:], seeds), keeps_runs=True
    )


def _story(arms: Sequence[Arm], seeds: int) -> Story:
    title = f"AdamW and {len(arms)} challengers"
    if len(arms) == 1:
        at_its_norm = " at its norm" if RATIO in arms[0].changes.values() else ""
        title = f"AdamW, and {arms[0].name}{at_its_norm}"
    interval = (
        "is one pair of runs, which has no interval"
        if seeds == 1
        else "has its 95 % interval (Student's t) behind ±"
    )
    note = (
        "Validation loss: mean over the whole fixed validation split after the last step, over "
        f"{'1 seed' if seeds == 1 else 'n seeds'}. "
        '"Minus baseline" pairs runs that share initial weights and the order of the data, and '
        f"{interval}. Every arm had one trial at these settings: none was tuned."
    )
    columns = ("val loss", "minus baseline", "norm ratio", "target", "gain", "skipped")
    return Story(title, sentences, ("arm", *(("n",) if seeds > 1 else ()), *columns), note)


def sentences(verdict: Verdict) -> list[str]:
    """What the first challenger shows, as strong as the numbers allow."""
    baseline, *others = verdict.rows
    for row in verdict.rows[:2]:
        if row.bad:
            return [f"{_unfinished(row)}, so that nothing is compared."]
    comparison = others[0].comparison if others else None
    # A challenge that was stopped has more seeds of the baseline than of the others.
    seeds = comparison.seeds if comparison else baseline.trial.seeds
    result = (
        f"{baseline.arm} ended at a validation loss of {_mean(baseline, seeds):.4f} with the norm "
        f"of its weights at {_mean(baseline, seeds, 'ratio'):.3f} times the initial one"
    )
    if not others:
        return [result + "."]
    challenger, found = others[0], others[0].difference
    if found is None:
        return [f"{result}; {challenger.arm} cannot be compared with it."]
    result += (
        f", and {challenger.arm} at {_mean(challenger, seeds):.4f}, {abs(found.mean):.4f} "
        f"{'lower' if found.mean < 0 else 'higher'}, with its norm at "
        f"{_mean(challenger, seeds, 'ratio'):.3f} times"
    )
    for control in others[1:]:
        own = control.trial.seeds
        where = "" if own == seeds else f" in {seeds_in_words(own)}"
        if control.bad:
            result += f". {_unfinished(control)}"
        elif _is_scaled(control, baseline):  # it could explain the difference
            result += (
                ". AdamW that only started from weights of that norm ended at "
                f"{control.trial.mean():.4f}{where}"
            )
        elif control.trial.config.optim.gain is not None:
            result += (
                f". {control.arm}, for which nothing was measured first, ended at "
                f"{control.trial.mean():.4f}{where}"
            )
    if found.half is None:
        return [
            f"{result}. This is one pair of runs, an illustration and not evidence; --seeds 5 "
            "gives an interval."
        ]
    return [
        f"{result}. The difference of {challenger.arm}, {found} (95 % interval, n = {found.n} "
        f"paired seeds), is {'shown' if found.shown else 'not shown'} at these settings, with "
        "neither arm tuned."
    ]


def _mean(row: Row, seeds: Sequence[int], key: str = "val_loss") -> float:
    return statistics.fmean(row.trial.values(key, seeds))


def _unfinished(row: Row) -> str:
    how = " and ".join(row.trial.unfinished)
    return f"{row.arm} {how} in {row.bad} of {len(row.trial.seeds)} runs"


def _is_scaled(row: Row, baseline: Row) -> bool:
    """True for an arm that starts from weights of another norm than the baseline."""
    return row.trial.config.model.init_scale != baseline.trial.config.model.init_scale
