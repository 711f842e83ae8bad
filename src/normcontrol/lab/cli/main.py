"""The command ``normcontrol``: train, challenge, prepare, sample, schedule, study, verdict.

Flags are made from dataclasses by tyro, which also names the nearest flag for a typo. What cannot
be done is said in a sentence, without a traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from normcontrol import __version__
from normcontrol.lab.cli import study as study_command
from normcontrol.lab.errors import LabError, nearest, told
from normcontrol.lab.training.config import PRESETS, Config, preset

T = TypeVar("T")
OneOfPresets = Annotated[str, tyro.conf.arg(metavar="{" + ",".join(PRESETS) + "}")]


@dataclass(frozen=True)
class Train:
    """Train a model. Without a flag: the tiny preset, with AdamWN, on the standard library of this
    Python."""

    preset: OneOfPresets = "tiny"
    """Where all other settings start from."""
    out: Path | None = None
    """Folder of the run; by default a new one under runs/."""
    resume: Path | None = None
    """Go on with the run in this folder. It needs nothing else; settings that only change memory or
    speed may be given."""
    config: Config = field(default_factory=Config)


def train(args: Sequence[str]) -> int:
    from normcontrol.lab.report.live import Board
    from normcontrol.lab.training.loop import train as run
    from normcontrol.lab.training.parallel import leave
    from normcontrol.lab.training.run_folder import CONFIG, free_name

    resumed = value_of(args, "--resume")
    start = (
        Config.load(Path(resumed) / CONFIG)
        if resumed
        else preset(value_of(args, "--preset") or "tiny")
    )
    asked = parse("train", Train, args, Train(config=start))
    if "RANK" in os.environ and not (asked.resume or asked.out):
        raise LabError(
            "Several processes were started, and each would choose a folder of its own: give one "
            "as --out."
        )
    out = (
        asked.resume
        or asked.out
        or free_name(Path("runs"), f"{asked.preset}-{asked.config.optim.optimizer}")
    )
    name = out.name
    try:
        with Board() as board:
            finished = run(
                asked.config,
                out,
                resume=bool(asked.resume),
                display=lambda status: board.show(name, status),
            )
    finally:
        leave()
    if not finished:
        say(f"Stopped, and saved. Go on with:\n  normcontrol train --resume {out}")
        return 130
    say(f"Done: {out}. Text from it with:\n  normcontrol sample {out}")
    return 0


@dataclass(frozen=True)
class Challenge:
    """Train AdamW, record its norm ratio, train AdamWN at that ratio on the same data, and report.

    The settings below are those of the baseline, and of all arms as far as an arm does not change
    them.
    """

    preset: OneOfPresets = "tiny"
    """Where all other settings start from."""
    arms: tuple[str, ...] = ("adamwn",)
    """Challengers. adamwn: at the ratio the baseline ends with; scaled: AdamW started from weights
    scaled to that norm; adamc: AdamC; or any optimizer. Each may change settings:
    adamw:weight_decay=0.05 adamwn:ratio=2.4,rate=0.05"""
    seeds: int = 1
    """Repeat everything with so many seeds; two and more give intervals."""
    out: Path | None = None
    """Folder of the challenge. Given again, a stopped challenge goes on."""
    config: Config = field(default_factory=Config)


def challenge(args: Sequence[str]) -> int:
    from rich.console import Console
    from rich.table import Column, Table

    from normcontrol.lab.report import challenge as report
    from normcontrol.lab.report.live import Board
    from normcontrol.lab.studies import challenge as lab
    from normcontrol.lab.training.parallel import is_first, leave

    asked = parse(
        "challenge", Challenge, args, Challenge(config=preset(value_of(args, "--preset") or "tiny"))
    )
    arms = [lab.parse_arm(text) for text in asked.arms]
    out = asked.out or Path("runs") / f"challenge-{asked.preset}"
    if is_first():
        lab.write_plan(out, asked.config, list(asked.arms), asked.seeds)
    try:
        with Board() as board:
            if asked.seeds == 1:
                board.plan(lab.BASELINE.name, *(arm.name for arm in arms))
            results = lab.challenge(
                asked.config, out, arms, asked.seeds, board.show, cache=out.parent / "data"
            )
    finally:
        leave()
    if results is None:
        say("Stopped, and saved. The same command goes on from there.")
        return 130
    if not is_first():
        return 0
    page = report.write(results, out)
    table = Table(
        *(Column(heading, no_wrap=True) for heading in report.HEADINGS), box=None, pad_edge=False
    )
    for row in report.rows(results):
        table.add_row(*row)
    console = Console()
    console.print()
    console.print(table)
    console.print()
    print(f"The page with the four panels is {page}.\n{report.verdict(results)}")
    return 0


@dataclass(frozen=True)
class Prepare:
    """Turn text into shards of tokens to train on. Stopped and started again, it goes on where it
    was."""

    source: tyro.conf.Positional[str]
    """A text, jsonl or parquet file, a folder of those, "python" for the standard library,
    "openwebtext", or hf:OWNER/NAME@REVISION for a Hugging Face dataset's parquet files. (nanoGPT's
    train.bin and val.bin need no preparing: give their folder to --data.)"""
    out: Path
    """Folder for the shards and their manifest."""
    tokenizer: str = "gpt2"
    """gpt2, bytes, or bpe:SIZE to train one on the text."""
    val_fraction: float = 0.01
    """Share of the documents to validate on. nanoGPT's is 0.0005."""
    column: str = "text"
    """Key or column of the text, in jsonl and parquet."""
    shard_tokens: int = 100_000_000
    """Tokens in a shard."""


def prepare(args: Sequence[str]) -> int:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from normcontrol.lab.data import corpus
    from normcontrol.lab.data import prepare as lab
    from normcontrol.lab.files import read_json

    asked = tyro.cli(Prepare, prog="normcontrol prepare", args=list(args))
    source = corpus.source(asked.source, asked.column)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("reading", total=source.size)

        def show(read: int, total: int, tokens: int) -> None:
            bar.update(task, completed=read, description=f"{tokens / 1e6:,.1f} M tokens")

        lab.prepare(
            source, asked.out, asked.tokenizer, asked.val_fraction, asked.shard_tokens, show
        )
    splits = read_json(asked.out / lab.MANIFEST)["splits"]
    print(
        f"{splits['train']['tokens']:,} tokens to train on and {splits['val']['tokens']:,} to "
        f"validate on. Use them with --data {asked.out}"
    )
    return 0


@dataclass(frozen=True)
class Sample:
    """Print text from a run's newest checkpoint."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    prompt: str = ""
    """What the text begins with."""
    tokens: int = 200
    """Length of the text, at most."""
    temperature: float = 0.8
    """0 for the likeliest token at every step; higher for more variety."""
    top_k: int = 100
    """Choose among so many of the likeliest tokens; 0 for all."""
    seed: int = 0
    """Seed of the choices."""
    device: str = "auto"
    """Where to compute."""


def sample(args: Sequence[str]) -> int:
    from normcontrol.lab.training import sample as lab

    asked = tyro.cli(Sample, prog="normcontrol sample", args=list(args))
    model, words = lab.load(asked.run, asked.device)
    print(asked.prompt, end="", flush=True)
    for piece in lab.generate(
        model, words, asked.prompt, asked.tokens, asked.temperature, asked.top_k, asked.seed
    ):
        print(piece, end="", flush=True)
    print()
    return 0


@dataclass(frozen=True)
class Plan:
    """Draw the learning rate, the target ratio r_t and the rate k_t of a run before it is run."""

    preset: OneOfPresets = "tiny"
    """Where all other settings start from."""
    out: Path = Path("schedule.png")
    """The picture."""
    config: Config = field(default_factory=Config)


def schedule(args: Sequence[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    from normcontrol.lab.report import schedule as plan

    asked = parse("schedule", Plan, args, Plan(config=preset(value_of(args, "--preset") or "tiny")))
    table = Table("step", "lr", "r_t", "k_t", box=None, pad_edge=False)
    for row in plan.table(asked.config):
        table.add_row(*row)
    Console().print(table)
    plan.draw(asked.config, asked.out)
    print(f"Drawn in {asked.out}.")
    return 0


@dataclass(frozen=True)
class Methods:
    """The published methods that are settings of the controller, in a table."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """Explain one of them."""


def methods(args: Sequence[str]) -> int:
    import inspect

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from normcontrol.methods import METHODS, find

    asked = parse("methods", Methods, args, Methods())
    if asked.name:
        try:
            method = find(asked.name)
        except ValueError as error:
            raise LabError(str(error)) from None
        print(
            f"{method.name}: "
            f"normcontrol.methods.{method.build.__name__}{inspect.signature(method.build)}\n"
        )
        print(inspect.getdoc(method.build))
        return 0
    table = Table("method", "scope", "target", "law", "reference", box=None, pad_edge=False)
    for m in METHODS.values():
        table.add_row(*map(escape, (m.name, m.scope, m.target, m.law, m.reference)))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 0


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "challenge": (challenge, "train AdamW, then AdamWN at AdamW's own norm, and report"),
    "train": (train, "train a model, or go on with a run"),
    "prepare": (prepare, "turn text into tokens to train on"),
    "sample": (sample, "text from a checkpoint"),
    "schedule": (schedule, "draw a plan of lr, r_t and k_t before spending time on it"),
    "methods": (methods, "the published methods that are settings of the controller"),
    **study_command.COMMANDS,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 for a refusal, 2 for a wrong call, 130 when stopped by
    hand."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"normcontrol {__version__}")
        return 0
    return told(lambda: run(args[0], args[1:]))


def run(name: str, args: Sequence[str]) -> int:
    if name not in COMMANDS:
        raise LabError(f"There is no command {name!r}. {nearest(name, COMMANDS)}")
    return COMMANDS[name][0](args)


def say(text: str) -> None:
    """Print, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


def usage() -> str:
    lines = [f"  {name:10}  {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            "normcontrol: train language models with weight norm control, and challenge AdamW at "
            "its own norm.",
            "",
            *lines,
            "",
            "normcontrol COMMAND --help explains each flag. To begin with: normcontrol challenge "
            "--preset tiny",
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
