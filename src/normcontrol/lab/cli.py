"""The command ``normcontrol``: train, challenge, prepare, sample, schedule.

Flags are made from dataclasses by tyro, which also names the nearest flag for a typo. What cannot be done is said in a
sentence, without a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from normcontrol import __version__
from normcontrol.lab.config import PRESETS, Config, preset
from normcontrol.lab.errors import LabError, nearest

T = TypeVar("T")
OneOfPresets = Annotated[str, tyro.conf.arg(metavar="{" + ",".join(PRESETS) + "}")]


@dataclass(frozen=True)
class Train:
    """Train a model. Without a flag: the tiny preset, with AdamWN, on the standard library of this Python."""

    preset: OneOfPresets = "tiny"
    """Where all other settings start from."""
    out: Path | None = None
    """Folder of the run; by default a new one under runs/."""
    resume: Path | None = None
    """Go on with the run in this folder. It needs nothing else; settings that only change memory or speed may be given."""
    config: Config = field(default_factory=Config)


def train(args: Sequence[str]) -> int:
    from normcontrol.lab.display import Board
    from normcontrol.lab.folder import CONFIG, free_name
    from normcontrol.lab.parallel import leave
    from normcontrol.lab.train import train as run

    resumed = value_of(args, "--resume")
    start = Config.load(Path(resumed) / CONFIG) if resumed else preset(value_of(args, "--preset") or "tiny")
    asked = parse("train", Train, args, Train(config=start))
    out = asked.resume or asked.out or free_name(Path("runs"), f"{asked.preset}-{asked.config.optim.optimizer}")
    name = out.name
    try:
        with Board() as board:
            finished = run(asked.config, out, resume=bool(asked.resume), display=lambda status: board.show(name, status))
    finally:
        leave()
    if not finished:
        print(f"Stopped, and saved. Go on with:\n  normcontrol train --resume {out}")
        return 130
    print(f"Done: {out}. Text from it with:\n  normcontrol sample {out}")
    return 0


@dataclass(frozen=True)
class Challenge:
    """Train AdamW, record its norm ratio, train AdamWN at that ratio on the same data, and report.

    The settings below are those of the baseline, and of all arms as far as an arm does not change them.
    """

    preset: OneOfPresets = "tiny"
    """Where all other settings start from."""
    arms: tuple[str, ...] = ("adamwn",)
    """Challengers. adamwn: at the ratio the baseline ends with; scaled: AdamW started from weights scaled to that norm; adamc: AdamC; or
    any optimizer. Each may change settings: adamw:weight_decay=0.05 adamwn:ratio=2.4,rate=0.05"""
    seeds: int = 1
    """Repeat everything with so many seeds; two and more give intervals."""
    out: Path | None = None
    """Folder of the challenge. Given again, a stopped challenge goes on."""
    config: Config = field(default_factory=Config)


def challenge(args: Sequence[str]) -> int:
    from rich.console import Console
    from rich.table import Column, Table

    from normcontrol.lab import challenge as lab
    from normcontrol.lab import report
    from normcontrol.lab.display import Board

    asked = parse("challenge", Challenge, args, Challenge(config=preset(value_of(args, "--preset") or "tiny")))
    arms = [lab.parse_arm(text) for text in asked.arms]
    out = asked.out or Path("runs") / f"challenge-{asked.preset}"
    lab.write_plan(out, asked.config, list(asked.arms), asked.seeds)
    with Board() as board:
        if asked.seeds == 1:
            board.plan(lab.BASELINE.name, *(arm.name for arm in arms))
        results = lab.challenge(asked.config, out, arms, asked.seeds, board.show, cache=out.parent / "data")
    if results is None:
        print("Stopped, and saved. The same command goes on from there.")
        return 130
    page = report.write(results, out)
    table = Table(*(Column(heading, no_wrap=True) for heading in report.HEADINGS), box=None, pad_edge=False)
    for row in report.rows(results):
        table.add_row(*row)
    console = Console()
    console.print()
    console.print(table)
    console.print()
    print(f"The page with the four panels is {page}.\n{report.verdict(results)}")
    return 0


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "challenge": (challenge, "train AdamW, then AdamWN at AdamW's own norm, and report"),
    "train": (train, "train a model, or go on with a run"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 for a refusal, 2 for a wrong call, 130 when stopped by hand."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"normcontrol {__version__}")
        return 0
    try:
        if args[0] not in COMMANDS:
            raise LabError(f"There is no command {args[0]!r}. {nearest(args[0], COMMANDS)}")
        return COMMANDS[args[0]][0](args[1:])
    except LabError as error:
        print(f"normcontrol: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("normcontrol: stopped.", file=sys.stderr)
        return 130


def usage() -> str:
    lines = [f"  {name:10}  {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            "normcontrol: train language models with weight norm control, and challenge AdamW at its own norm.",
            "",
            *lines,
            "",
            "normcontrol COMMAND --help explains each flag. To begin with: normcontrol challenge --preset tiny",
        ]
    )


def parse(command: str, kind: type[T], args: Sequence[str], default: T) -> T:
    """Flags into a dataclass, each by its own name, nested or not."""
    return tyro.cli(
        kind,
        prog=f"normcontrol {command}",
        args=list(args),
        default=default,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


def value_of(args: Sequence[str], flag: str) -> str | None:
    """A flag's value, looked up before parsing: the defaults of all others depend on it."""
    for i, word in enumerate(args):
        if word == flag and i + 1 < len(args):
            return args[i + 1]
        if word.startswith(flag + "="):
            return word[len(flag) + 1 :]
    return None
