"""Files of the user's own. A study is given as ``path/to/file.py:function``, and an optimizer as
``path/to/file.py:NAME``.

It finds such a file and runs it as a module. It does not know what the file is for, and imports no
torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import decode_source
from pathlib import Path
from types import ModuleType

from normcontrol.lab.errors import LabError


def split(given: str) -> tuple[str, str]:
    """The two parts of ``path/to/file.py:name``. The name may be omitted.

    >>> split("own.py:rates"), split("own.py"), split("AdamW")
    (('own.py', 'rates'), ('own.py', ''), ('', 'AdamW'))
    """
    if given.endswith(".py"):
        return given, ""
    path, found, name = given.partition(".py:")
    return (f"{path}.py", name) if found else ("", given)


def without_folder(given: str) -> str:
    """The same with the name of the file alone: folders differ from machine to machine.

    >>> without_folder("plans/own.py:Lion(path='a/b')"), without_folder("AdamW")
    ("own.py:Lion(path='a/b')", 'AdamW')
    """
    path, name = split(given)
    return f"{Path(path).name}:{name}" if path else given


@dataclass(frozen=True)
class OwnFile:
    """A file as it was read, and how the user has named it."""

    given: str
    path: Path
    """Absolute."""
    content: bytes = field(repr=False)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def described(self) -> dict[str, str]:
        """What a record keeps of it."""
        return {"file": self.path.name, "sha256": self.sha256, "text": decode_source(self.content)}


def find(path: str, out: Path | None, missing: str) -> OwnFile:
    """Read a file. Its path begins in the working directory, or above the folder ``out`` that was
    made with it. ``missing`` is what to say if there is none."""
    places = [Path(), *(out.absolute().parents if out else ())]
    found = next((file for place in places if (file := place / path).is_file()), None)
    if found is None:
        raise LabError(missing)
    return OwnFile(path, found.absolute(), found.read_bytes())


def run(file: OwnFile, what: str) -> ModuleType:
    """Run the file as a module. ``what`` is what it contains: a study or an optimizer."""
    # Its name is no other module's, whatever the file is called. A dataclass in it needs its entry
    # in sys.modules.
    made = ModuleType(f"normcontrol {what} {file.path.stem}")
    made.__file__ = str(file.path)
    sys.modules[made.__name__] = made
    # As for a script, its neighbours can be imported, but hide no other module.
    if (folder := str(file.path.parent)) not in sys.path:
        sys.path.append(folder)
    with told(file, what):
        exec(compile(decode_source(file.content), str(file.path), "exec"), vars(made))
    return made


@contextlib.contextmanager
def told(file: OwnFile, what: str) -> Iterator[None]:
    """Say in which line of a user's file an error was raised."""
    try:
        yield
    except LabError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(file.path)]
        if isinstance(error, SyntaxError) and error.filename == str(file.path):
            lines = [error.lineno]  # it was not run
        line = f", line {lines[-1]}" if lines else ""
        raise LabError(
            f"{file.given}{line}: {''.join(traceback.format_exception_only(error)[-1:]).strip()}. "
            f"This is an error of the {what}'s own file: correct it there, and give the command "
            "again."
        ) from error
