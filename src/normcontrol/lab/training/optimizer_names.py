"""What ``--optimizer`` may be: a name, or ``path/to/file.py:NAME`` for an optimizer of the user's
own; and arguments behind either, ``SGD(momentum=0.9)``.

It reads that text and finds the class or function. It constructs no optimizer.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from normcontrol import AdamWN
from normcontrol.lab import own_files
from normcontrol.lab.errors import LabError, nearest
from normcontrol.lab.own_files import OwnFile
from normcontrol.lab.training.config import PART_OF, Config
from normcontrol.lab.training.controls import CONTROLS
from normcontrol.methods import METHODS

# These optimizers need a closure or sparse gradients, which the training loop does not provide.
UNFIT = {"LBFGS", "SparseAdam", "Optimizer"}
TORCH: dict[str, type[Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and name not in UNFIT
}
# Some methods change the model. QK-Clip needs attention logits, which the model does not return.
NEED_MORE = [name for name, found in METHODS.items() if found.takes_model or name == "QK-Clip"]
OURS = [name for name in METHODS if name not in NEED_MORE]

BY_FLAG = {"lr": "--lr", "betas": "--betas", "weight_decay": "--weight-decay"}
"""The arguments that an optimizer gets from the settings of the run, if it takes them, and the
flags of these settings."""
ADAMWNS = {key: f"--{key}" for key in ("ratio", "gain", "rate", "scope")}
"""Those that AdamWN gets too."""
METHODS_OWN = {"ratio": "--ratio", "kappa": "--ratio", "lr_max": "--lr", "adam_lr": "--lr"}
"""Those that published methods get too."""

CALL = re.compile(r"\s*(?P<name>[^()]*?)\s*(?:\((?P<arguments>.*)\))?\s*", re.DOTALL)


@dataclass(frozen=True)
class Choice:
    """An optimizer as it was chosen."""

    name: str
    """In its usual spelling; ``file.py:NAME`` for one of the user's own."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Those that were given behind the name."""
    file: OwnFile | None = None
    """The user's file that contains it."""

    @property
    def build(self) -> Callable[..., Any]:
        """The class or function that constructs it."""
        if self.file is not None:
            return _from_file(self.file, self.name.rpartition(":")[2])
        if self.name == "AdamWN":
            return AdamWN
        if self.name in CONTROLS:
            return CONTROLS[self.name]
        return TORCH[self.name] if self.name in TORCH else METHODS[self.name].build

    @property
    def takes_model(self) -> bool:
        """True if an optimizer of the user's own takes the model in place of parameters."""
        return self.file is not None and next(iter(_parameters(self.build)), "") == "model"

    @property
    def is_method(self) -> bool:
        """True if it is a published method, by its function in ``normcontrol.methods``."""
        return self.file is None and self.name not in {*TORCH, *CONTROLS, "AdamWN"}

    @property
    def by_flag(self) -> dict[str, str]:
        """The arguments that the run sets, and the flag of each."""
        more = METHODS_OWN if self.is_method else ADAMWNS if self.name == "AdamWN" else {}
        return BY_FLAG | more

    @property
    def takes(self) -> set[str] | None:
        """The names of the arguments that can be given behind its own; None for any."""
        if self.name in CONTROLS:
            return set()
        if self.is_method:
            return METHODS[self.name].settings - self.by_flag.keys()
        _, *parameters = _parameters(self.build).values()
        if any(each.kind == inspect.Parameter.VAR_KEYWORD for each in parameters):
            return None
        return {each.name for each in parameters} - self.by_flag.keys()


def is_own(text: str) -> bool:
    """True if the optimizer is in a file of the user's own."""
    return bool(own_files.split(text)[0])


def known_name(text: str) -> str:
    """The name of an optimizer in its usual spelling, whatever the case of the given one, without
    its arguments and the folder of its file.

    >>> known_name("adamwn"), known_name("sgd(momentum=0.9)"), known_name("plans/mine.py:Lion")
    ('AdamWN', 'SGD', 'mine.py:Lion')
    """
    path, call = own_files.split(text)
    given = call.partition("(")[0].strip()
    if path:
        return f"{Path(path).name}:{given}"
    names = [*OURS, *CONTROLS, *sorted(TORCH)]
    for name in names:
        if name.lower() == given.lower():
            return name
    if given.lower() in {name.lower() for name in UNFIT}:
        raise LabError(
            f"{given} needs a closure or sparse gradients, which the training loop does not "
            "provide. Choose another optimizer."
        )
    if given.lower() in {name.lower() for name in NEED_MORE}:
        raise LabError(
            f"{given} is a method of the library that needs more than an optimizer is given by "
            "the training loop: the model, or its attention logits. Choose another optimizer."
        )
    raise LabError(
        f"There is no optimizer {given!r}. {nearest(given, names)} One of your own is "
        "path/to/file.py:NAME."
    )


def chosen(text: str, out: Path | None = None) -> Choice:
    """Read the text of ``--optimizer``. A user's file is looked for as :func:`own_files.find` says.

    >>> chosen("sgd(momentum=0.9, nesterov=True)").arguments
    {'momentum': 0.9, 'nesterov': True}
    """
    path = own_files.split(text)[0]
    name, arguments = _read(text)
    if not path:
        return Choice(known_name(name), arguments)
    missing = (
        f"There is no file {path!r} with an optimizer. Give it as path/to/file.py:NAME; the path "
        "begins in the working directory, or above the folder of the run or study."
    )
    file = own_files.find(path, out, missing)
    return Choice(f"{file.path.name}:{name}", arguments, file)


def file_of(config: Config) -> OwnFile | None:
    """The user's file with the optimizer of a run, as it is now; None for one of ours or torch."""
    text = config.optim.optimizer
    return chosen(text).file if is_own(text) else None


def located(text: str, out: Path | None) -> str:
    """The text of ``--optimizer`` with the whole path of a user's file, which is then found from
    any folder."""
    file = chosen(text, out).file if is_own(text) else None
    return text if file is None else f"{file.path}:{own_files.split(text)[1]}"


def with_arguments(text: str, arguments: Mapping[str, Any]) -> str:
    """The text of ``--optimizer`` with these arguments in its parentheses.

    >>> with_arguments("SGD(momentum=0.8, nesterov=True)", {"momentum": 0.9})
    'SGD(momentum=0.9, nesterov=True)'
    """
    path = own_files.split(text)[0]
    name, before = _read(text)
    takes = None if path else Choice(known_name(name)).takes
    for key in arguments:
        if takes is not None and key not in takes:
            raise LabError(
                f"{key!r} is not a setting of a run, and {name} has no such argument. "
                f"{nearest(key, [*PART_OF, *sorted(takes)])}"
            )
    inside = ", ".join(f"{key}={value!r}" for key, value in {**before, **arguments}.items())
    return f"{path}:{name}({inside})" if path else f"{name}({inside})"


def check_arguments(text: str) -> None:
    """Raise :class:`LabError` if the optimizer does not take an argument that is given behind its
    name, or does not take the learning rate of the run."""
    choice = chosen(text)
    if choice.file is not None and "lr" not in _parameters(choice.build):
        raise LabError(
            f"{choice.name} has no argument lr, through which a run sets the learning rate. Add it."
        )
    takes = choice.takes if choice.arguments else None
    for key in choice.arguments:
        if key in choice.by_flag:
            why = f"the run sets it. Give {choice.by_flag[key]}."
        elif takes is None or key in takes:
            continue
        else:
            known = nearest(key, sorted(takes)) if takes else "It takes none."
            why = f"{choice.name} has no such argument. {known}"
        raise LabError(f"optimizer={text!r} cannot have {key} in its parentheses: {why}")


def _read(text: str) -> tuple[str, dict[str, Any]]:
    """The name without the path, and the arguments."""
    call = CALL.fullmatch(own_files.split(text)[1])
    if call is None:
        raise LabError(
            f"optimizer={text!r} cannot be read: it is a name, and arguments in parentheses if "
            "there are any, as in SGD(momentum=0.9)."
        )
    return call["name"], _arguments(text, call["arguments"] or "")


def _arguments(text: str, inside: str) -> dict[str, Any]:
    """What is given between the parentheses."""
    try:
        call = ast.parse(f"f({inside})", mode="eval").body
    except SyntaxError:
        call = None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise LabError(
            f"optimizer={text!r} cannot be read. The arguments are key=value, separated by commas."
        )
    found: dict[str, Any] = {}
    for each in [*call.args, *call.keywords]:
        if not isinstance(each, ast.keyword) or each.arg is None:
            raise LabError(
                f"optimizer={text!r} has an argument without a name: {ast.unparse(each)}. Give "
                "each as key=value."
            )
        try:
            found[each.arg] = ast.literal_eval(each.value)
        except ValueError:
            raise LabError(
                f"optimizer={text!r}: {ast.unparse(each)} is computed. Give a number, a text in "
                "quotes, True, False, None, or a list of them."
            ) from None
    return found


def _parameters(build: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(build).parameters


@functools.cache
def _module(file: OwnFile) -> ModuleType:
    """The user's file as a module. It is run once, and once more if it was changed."""
    return own_files.run(file, "optimizer")


def _from_file(file: OwnFile, name: str) -> Callable[..., Any]:
    """A class or function of a user's file."""
    module = _module(file)
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    known = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, Optimizer))
    ]
    what = f"no optimizer {name!r}" if name else "to be followed by a name, file.py:NAME"
    verb = "has" if name else "is"
    raise LabError(
        f"{file.given} {verb} {what}. {nearest(name, known) if known else 'It has none at all.'}"
    )
