"""The command ``normcontrol``: the table of its commands, and the call of one of them.

A command's module is imported when the command is called, and not before: ``normcontrol --help``
needs neither torch nor any other package.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from normcontrol import __version__
from normcontrol.lab.errors import LabError, explain, nearest

COMMANDS = {
    "challenge": "train AdamW, then AdamWN at AdamW's own norm, and report",
    "train": "train a model, or continue a run",
    "prepare": "turn text into tokens to train on",
    "sample": "print text from a checkpoint",
    "schedule": "show lr, r_t and k_t of a run before it is run",
    "methods": "list the published methods that are settings of the controller",
    "study": "run a grid of runs x seeds, or continue it",
    "verdict": "print what a study showed, with intervals and every claim",
    "report": "write a study's page and figures",
}
"""Each command is the function ``run`` of the module of its name, beside this one."""

PACKAGES = {
    *("torch", "numpy", "tyro", "rich", "matplotlib"),
    *("tiktoken", "tokenizers", "huggingface_hub", "pyarrow"),
}
"""What ``pip install 'normcontrol[lab]'`` brings."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. The exit status is 0, 1 for a refusal, 2 for a wrong call, 130 when stopped by
    hand."""
    args = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding does not have is no error of the run. Python
        # escapes such characters on stderr, and so is the output here.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with threads_of_others():
            status = run(args)
        sys.stdout.flush()
        return status
    except LabError as error:
        return refuse(str(error))
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        discard_output()
        return 1
    except OSError as error:
        # Errors of files name the file. One that names none comes from the output.
        return refuse(explain(error, Path("the output") if error.filename is None else None))
    except KeyboardInterrupt:
        print("normcontrol: stopped.", file=sys.stderr)
        return 130


def run(args: Sequence[str]) -> int:
    """Answer a call without a command, or call the command."""
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"normcontrol {__version__}")
        return 0
    return call(args[0], args[1:])


@contextlib.contextmanager
def threads_of_others() -> Iterator[None]:
    """Print no traceback for an error of the disk in a thread of another library: TensorBoard and
    rich raise it in the main thread too, where it becomes a sentence."""
    usual = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.exc_value, OSError):
            usual(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = usual


def refuse(sentence: str) -> int:
    print(f"normcontrol: {sentence}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # Python would try again at its end, and print a traceback
        discard_output()
    return 1


def discard_output() -> None:
    """Send what is left to print to nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def call(name: str, args: Sequence[str]) -> int:
    """Import a command's module and run the command."""
    if name not in COMMANDS:
        raise LabError(f"There is no command {name!r}. {nearest(name, COMMANDS)}")
    try:
        status: int = importlib.import_module(f"normcontrol.lab.cli.{name}").run(args)
    except ModuleNotFoundError as missing:
        if str(missing.name).partition(".")[0] not in PACKAGES:
            raise
        raise LabError(
            f"The laboratory needs {missing.name}, which is not installed: pip install "
            "'normcontrol[lab]'."
        ) from None
    return status


def usage() -> str:
    lines = [f"  {name:10}  {about}" for name, about in COMMANDS.items()]
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
