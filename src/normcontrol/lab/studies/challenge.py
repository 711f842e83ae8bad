"""The paper's protocol in one command: train AdamW, record its norm ratio, challenge it with AdamWN
held at that ratio.

Every arm of a seed starts from the same weights and sees the same batches in the same order. Each
is an ordinary run in a folder of its own: a challenge that was stopped goes on when the same
command is given again.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normcontrol.lab.errors import LabError, nearest
from normcontrol.lab.files import read_json, write_json
from normcontrol.lab.training import metrics
from normcontrol.lab.training import optimizers as optim
from normcontrol.lab.training.config import Config, field_type
from normcontrol.lab.training.loop import Status, train
from normcontrol.lab.training.run_folder import CONFIG

RATIO = "the baseline's final ratio"
"""Stands for a number that is known when the baseline is trained."""


@dataclass(frozen=True)
class Arm:
    """A method to compare: its name and what it changes in the config."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)

    def config(self, base: Config, ratio: float | None, seed: int) -> Config:
        """The config of this arm's run; ``ratio`` is what the baseline ended at."""
        changes = {key: ratio if value is RATIO else value for key, value in self.changes.items()}
        seeds = {
            "init_seed": base.model.init_seed + seed,
            "data_seed": base.data.data_seed + seed,
            "dropout_seed": base.model.dropout_seed + seed,
        }
        return base.with_(**changes, **seeds)


BASELINE = Arm("AdamW", {"optimizer": "AdamW", "ratio": None})
KNOWN = {
    "adamw": BASELINE,
    "adamwn": Arm("AdamWN", {"optimizer": "AdamWN", "ratio": RATIO}),
    "scaled": Arm(
        "AdamW from scaled weights", {"optimizer": "AdamW", "ratio": None, "init_scale": RATIO}
    ),
    "adamc": Arm("AdamC", {"optimizer": "AdamC", "ratio": None}),
}


def parse_arm(text: str) -> Arm:
    """An arm from its name and changes: "adamwn", "scaled", "adamw:weight_decay=0.05",
    "adamwn:ratio=2.4,scope=tensor".

    >>> parse_arm("adamw:weight_decay=0.05")
    Arm(name='AdamW weight_decay=0.05', changes={'optimizer': 'AdamW', 'ratio': None, 'weight_decay': 0.05})
    """
    name, _, rest = text.partition(":")
    known = KNOWN.get(name.lower())
    if known is None:
        try:
            spelled = optim.known_name(name)
        except LabError:
            raise LabError(
                f"There is no arm {name!r}. {nearest(name, [*KNOWN, *sorted(optim.TORCH)])}"
            ) from None
        known = Arm(spelled, {"optimizer": spelled, "ratio": None})
    changes = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise LabError(
                f"The arm {text!r} should be NAME:key=value,key=value; {pair!r} has no value."
            )
        changes[key] = _read(key, value.strip())
    label = (
        f"{known.name} "
        f"{', '.join(f'{k}={v:g}' if isinstance(v, float) else f'{k}={v}' for k, v in changes.items())}"
    ).strip()
    return Arm(label, {**known.changes, **changes})


def _read(key: str, text: str) -> Any:
    """A value given as text, by the type of its field."""
    kind = field_type(key)
    kinds = (
        [k for k in typing.get_args(kind) if k is not type(None)]
        if isinstance(kind, types.UnionType)
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


@dataclass(frozen=True)
class Result:
    """One arm's runs, seed by seed."""

    arm: Arm
    configs: list[Config]
    folders: list[Path]

    def metrics(self) -> list[list[dict[str, Any]]]:
        return [metrics.read(folder) for folder in self.folders]

    def final(self, key: str) -> list[float]:
        """The last recorded value of something, seed by seed."""
        return [
            next(line[key] for line in reversed(lines) if key in line) for lines in self.metrics()
        ]


Display = Callable[[str, Status], None]


def challenge(
    config: Config, out: Path, arms: list[Arm], seeds: int, display: Display, cache: Path
) -> list[Result] | None:
    """Run every arm with every seed, the baseline first; None when stopped (and saved) before the
    end."""
    if seeds < 1:
        raise LabError(f"seeds={seeds}: at least one is needed.")
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise LabError(f"The arms are {', '.join(names)}: each must differ from the others.")
    arms = [BASELINE, *(arm for arm in arms if arm != BASELINE)]
    results = [Result(arm, [], []) for arm in arms]
    for seed in range(seeds):
        ratio = None
        for result in results:
            folder = out / "arms" / _slug(result.arm.name) / f"seed-{seed}"
            run = result.arm.config(config, ratio, seed)
            label = result.arm.name if seeds == 1 else f"{result.arm.name}, seed {seed}"

            def show(status: Status, label: str = label) -> None:
                display(label, status)

            if not finished(folder, run) and not train(
                run, folder, resume=(folder / CONFIG).exists(), display=show, cache=cache
            ):
                return None
            result.configs.append(run)
            result.folders.append(folder)
            if result.arm == BASELINE:
                ratio = result.final("ratio")[-1]
    return results


def finished(folder: Path, config: Config) -> bool:
    """Whether the run is there, with this very config, and complete."""
    if not (folder / CONFIG).exists():
        return False
    lines = metrics.read(folder)
    done = bool(lines) and lines[-1]["step"] == config.run.steps and "val_loss" in lines[-1]
    return done and Config.load(folder / CONFIG) == config


def write_plan(out: Path, config: Config, arms: list[str], seeds: int) -> None:
    """Remember what the challenge is, so that the folder cannot come to hold a mixture of two."""
    plan = json.loads(json.dumps({"config": config.flat(), "arms": arms, "seeds": seeds}))
    path = out / "challenge.json"
    then = read_json(path)["config"] if path.exists() else plan["config"]
    for key, value in plan["config"].items():
        if then.get(key) != value:
            raise LabError(
                f"{out} holds another challenge: {key} was {then.get(key)!r} and is {value!r} now. "
                "Give another --out, or delete it."
            )
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, plan)


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in ".=" else "-" for c in name).lower()
