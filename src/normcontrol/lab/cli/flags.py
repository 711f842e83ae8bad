"""What the commands share: flags from dataclasses by tyro, and defaults that come from a preset.

A field is a flag and the text under it is its help. tyro names the nearest flag for a typo. Nothing
in this module imports torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import tyro

from normcontrol.lab.ranges import check_fields
from normcontrol.lab.training.config import PRESETS, Config, preset

T = TypeVar("T")
Given = ParamSpec("Given")
PresetName = Annotated[str, tyro.conf.arg(metavar="{" + ",".join(PRESETS) + "}")]


def parse(command: str, kind: type[T], args: Sequence[str], default: T | None = None) -> T:
    """Read flags into a dataclass, each by its own name, nested or not, and check their values."""
    flags = tyro.cli(
        kind,
        prog=f"normcontrol {command}",
        args=list(args),
        default=tyro.MISSING_NONPROP if default is None else default,
        config=(
            tyro.conf.OmitArgPrefixes,
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.PositionalMetavarFromFieldName,
        ),
    )
    check_fields(flags)
    return flags


@dataclass(frozen=True)
class Start:
    """The flags on which the defaults of all others depend."""

    preset: str = "tiny"
    resume: Path | None = None


def start(command: str, args: Sequence[str]) -> Config:
    """The config that defaults come from: that of the run to continue, or that of the preset.

    These two flags are read first; the others, and ``--help``, are left to :func:`parse`.
    """
    found, _ = tyro.cli(
        Start,
        prog=f"normcontrol {command}",
        args=list(args),
        return_unknown_args=True,
        add_help=False,
    )
    if found.resume is None:
        return preset(found.preset)
    from normcontrol.lab.training.run_folder import CONFIG

    return Config.load(found.resume / CONFIG)


def given(args: Sequence[str]) -> list[str]:
    """The names of the flags among the arguments.

    >>> given(["--lr", "1e-3", "--weight-decay=0.1", "--no-bias"])
    ['lr', 'weight_decay']
    """
    flags = (arg[2:].partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--"))
    return [flag for flag in flags if not flag.startswith("no_")]


def unhindered(show: Callable[Given, None]) -> Callable[Given, None]:
    """A display that does not end the work that it shows if the output cannot be written: a full
    disk, or a terminal that is gone. The last line of the command then says so."""

    def shown(*args: Given.args, **options: Given.kwargs) -> None:
        with contextlib.suppress(OSError):
            show(*args, **options)

    return shown


def say(text: str) -> None:
    """Print, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(text)
