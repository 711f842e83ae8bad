"""What the commands share: flags from dataclasses by tyro, and defaults that come from a preset.

A field is a flag and the text under it is its help. tyro names the nearest flag for a typo. Nothing
in this module imports torch.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import itertools
import os
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from normcontrol.lab.errors import LabError
from normcontrol.lab.ranges import check_fields
from normcontrol.lab.training.config import PRESETS, Config, preset

T = TypeVar("T")
Given = ParamSpec("Given")
PresetName = Annotated[str, tyro.conf.arg(metavar="{" + ",".join(PRESETS) + "}")]


def parse(command: str, kind: type[T], args: Sequence[str], default: T | None = None) -> T:
    """Read flags into a dataclass, each by its own name, nested or not, and check their values."""
    _check_given(kind, args)
    with _joined_lines(kind):
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


@contextlib.contextmanager
def _joined_lines(kind: type) -> Iterator[None]:
    """Within the block, the help of each field of a dataclass, nested or not, is one paragraph.
    tyro would break its lines where the docstring has line breaks, and once more at the width of
    the terminal."""
    before = dict(kind.__annotations__)
    hints = get_type_hints(kind, include_extras=True)
    try:
        (made,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except OSError:  # installed without sources: there is no help then
        yield
        return
    assert isinstance(made, ast.ClassDef)
    with contextlib.ExitStack() as nested:
        for one, text in itertools.zip_longest(made.body, made.body[1:]):
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                name = one.target.id
                if dataclasses.is_dataclass(hints[name]):
                    nested.enter_context(_joined_lines(hints[name]))
                elif isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    help = " ".join(str(text.value.value).split())
                    kind.__annotations__[name] = Annotated[hints[name], tyro.conf.arg(help=help)]
        try:
            yield
        finally:
            kind.__annotations__.update(before)


@dataclass(frozen=True)
class Start:
    """The flags on which the defaults of all others depend."""

    preset: str = "tiny"
    resume: Path | None = None


def start(command: str, args: Sequence[str]) -> Config:
    """The config that defaults come from: that of the run to continue, or that of the preset.

    These two flags are read first; the others, and ``--help``, are left to :func:`parse`.
    """
    _check_given(Start, args)
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


def _check_given(kind: type, args: Sequence[str]) -> None:
    """Refuse a list that is given twice, of which the last one would replace the others, and a path
    that is empty, as a variable that is not set is: it would be the working directory."""
    names = given(args)
    empty = [arg for arg, value in itertools.pairwise(args) if value == ""]
    empty += [arg[:-1] for arg in args if arg.endswith("=")]
    for name, kinds in _types(kind):
        flag = f"--{name.replace('_', '-')}"
        if any(get_origin(one) is tuple and Ellipsis in get_args(one) for one in kinds):
            if (times := names.count(name)) > 1:
                raise LabError(
                    f"{flag} is given {times} times, and the last one would replace the others. "
                    f"Give all values after one {flag}."
                )
        elif Path in kinds and name in given(empty):
            raise LabError(f"{flag} is empty. Give a path; the working directory is a dot.")


def _types(kind: type) -> Iterator[tuple[str, list[Any]]]:
    """The fields of a dataclass, nested or not, with the types that each accepts."""
    for name, hint in get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _types(hint)
        else:
            optional = get_origin(hint) in (Union, types.UnionType)
            yield name, list(get_args(hint)) if optional else [hint]


def given(args: Sequence[str]) -> list[str]:
    """The names of the flags among the arguments.

    >>> given(["--lr", "1e-3", "--weight-decay=0.1", "--no-bias"])
    ['lr', 'weight_decay']
    """
    flags = (arg[2:].partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--"))
    return [flag for flag in flags if not flag.startswith("no_")]


def unhindered(show: Callable[Given, None]) -> Callable[Given, None]:
    """A display that does not end the work that it shows if the output cannot be written: a full
    disk, or a terminal that is gone. The last line of the command then says so, if it can."""

    def shown(*args: Given.args, **options: Given.kwargs) -> None:
        with contextlib.suppress(OSError, SystemExit):  # rich exits where a pipe is broken
            show(*args, **options)

    return shown


def say(text: str) -> None:
    """Print, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(text)
