"""Opens a study: by its name, from a file of the user's own, or from the folder it was run in.

It finds the study and checks its folder. It runs nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from normcontrol.lab.errors import LabError, nearest
from normcontrol.lab.files import read_json
from normcontrol.lab.studies import STUDIES, challenge
from normcontrol.lab.study.cells import Cell, Cells, Data, Study
from normcontrol.lab.study.ledger import STUDY, Ledger
from normcontrol.lab.study.records import Results
from normcontrol.lab.study.scales import SCALES
from normcontrol.lab.text import in_shell
from normcontrol.lab.training.run_folder import CONFIG, FREE

OWN = "study"
"""What a study in a user's file is called where no name is given."""


def load(name: str, settings: Mapping[str, Any] | None = None, out: Path | None = None) -> Study:
    """A study by its name, or from a file: ``path/to/file.py:function``. The file of a study whose
    folder is ``out`` may also be beside that folder, or above it.

    A challenge is made from its settings.
    """
    if settings is not None:
        return challenge.study(settings)
    if ".py" in name:
        return _from_file(name, out)
    if name == challenge.NAME:
        raise LabError("A challenge is run by a command of its own: normcontrol challenge.")
    if name not in STUDIES:
        raise LabError(
            f"There is no study {name!r}. {nearest(name, STUDIES)} One of your own is "
            "path/to/file.py:function."
        )
    return STUDIES[name]


def _file_and_function(name: str) -> tuple[str, str]:
    """The two parts of ``path/to/file.py:function``; the function may be omitted.

    >>> _file_and_function("own.py:rates"), _file_and_function("own.py")
    (('own.py', 'rates'), ('own.py', ''))
    """
    path, _, function = name.rpartition(":")
    return (path, function) if path.endswith(".py") else (name, "")


def _same(one: str, other: str) -> bool:
    """True if two names are of the same study. A file is the same by whatever path it is given, and
    after it was moved: its cells are known by their settings."""
    (path, function), (other_path, other_function) = map(_file_and_function, (one, other))
    return Path(path).name == Path(other_path).name and (
        (function or OWN) == (other_function or OWN)
    )


def _find_file(path: str, out: Path | None) -> Path:
    places = [Path(), *(out.absolute().parents if out else ())]
    found = next((file for place in places if (file := place / path).exists()), None)
    if found is None:
        beside = f" The study in {out} needs it." if out else ""
        raise LabError(
            f"There is no file {path!r} with a study.{beside} Give it as path/to/file.py:function"
            f"{', or call the command from the folder that the path begins in' if out else ''}."
        )
    return found


def _from_file(name: str, out: Path | None) -> Study:
    path, function = _file_and_function(name)
    file = _find_file(path, out)
    # Its name is no other module's, whatever the file is called. A dataclass in it needs its entry
    # in sys.modules.
    spec = importlib.util.spec_from_file_location(f"normcontrol study {file.stem}", file.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # As for a script, its neighbours can be imported, but hide no other module.
    if (folder := str(file.absolute().parent)) not in sys.path:
        sys.path.append(folder)
    with _told(path, file):
        spec.loader.exec_module(module)
    found = getattr(module, function or OWN, None)
    if isinstance(found, Study):
        return replace(found, cells=_guarded(found.cells, path, file))
    if not callable(found):
        known = [
            key
            for key, value in vars(module).items()
            if isinstance(value, Study)
            or (callable(value) and getattr(value, "__module__", "") == module.__name__)
        ]
        raise LabError(
            f"{path} has no function and no Study {function or OWN!r}. "
            f"{nearest(function, known) if known else 'It has none at all.'}"
        )
    about = " ".join((found.__doc__ or "").split())
    return Study(f"{file.stem}-{found.__name__}", _guarded(found, path, file), about)


def _guarded(cells: Cells, path: str, file: Path) -> Cells:
    """The function of a user's study, with its errors as sentences."""

    def guarded(scale: str, done: Results) -> Iterable[Cell]:
        with _told(path, file):
            found = cells(scale, done)
            return list(found) if isinstance(found, Iterator) else found

    return guarded


@contextlib.contextmanager
def _told(path: str, file: Path) -> Iterator[None]:
    """Say in which line of a user's file an error was raised."""
    try:
        yield
    except LabError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(file.absolute())]
        if isinstance(error, SyntaxError) and error.filename == str(file.absolute()):
            lines = [error.lineno]  # it was not run
        line = f", line {lines[-1]}" if lines else ""
        raise LabError(
            f"{path}{line}: {''.join(traceback.format_exception_only(error)[-1:]).strip()}. This "
            "is an error of the study's own file: correct it there, and give the command again."
        ) from error


def open_folder(out: Path, name: str | None = None) -> Ledger:
    """The study in a folder, to read. Its data need not be on this machine. ``name`` is the name by
    which the same study is called now, if its file was moved."""
    stored = _stored(out)
    settings, name = stored.get("settings"), name or stored["study"]
    return Ledger(
        out,
        load(name, settings, out),
        name,
        stored["scale"],
        stored["data"],
        tuple(stored["also_validate"]),
        settings,
        {key: Data(value["digest"], value["also"]) for key, value in stored["digests"].items()},
    )


def _stored(out: Path) -> dict[str, Any]:
    """What a folder says about its study."""
    if not (out / STUDY).exists():
        if (out / CONFIG).exists():
            raise LabError(
                f"{out} is a single run, and a verdict or a page is about several. `normcontrol "
                "challenge` compares methods and ends with both."
            )
        raise LabError(
            f"{out} contains no study: there is no {STUDY} in it. Run one with `normcontrol study "
            f"NAME --out {in_shell(out)}`."
        )
    return read_json(out / STUDY, "study", "scale", "data", "also_validate", "digests")


def reopen(out: Path, name: str, scale: str) -> Ledger:
    """The study in a folder, which must be this one."""
    stored = _stored(out)
    for what, old, new, same in (
        ("study", stored["study"], name, _same(stored["study"], name)),
        ("scale", stored["scale"], scale, stored["scale"] == scale),
    ):
        if not same:
            raise LabError(
                f"{out} contains another study: its {what} was {old!r} and is {new!r} now. Give "
                "another --out, or delete the folder."
            )
    return open_folder(out, name)


def find(given: str) -> Path:
    """A study's folder, given itself or by the study's name."""
    if (Path(given) / STUDY).exists():
        return Path(given)
    found = [
        folder
        for scale in SCALES
        if ((folder := Path("results") / f"{given}-{scale}") / STUDY).exists()
    ]
    if len(found) > 1:
        raise LabError(
            f"{given!r} was run at several scales: say which one, {' or '.join(map(str, found))}."
        )
    return found[0] if found else Path(given)


def begin(
    out: Path,
    name: str,
    scale: str,
    given: str | None = None,
    also: tuple[str, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Ledger:
    """The folder of a study, to run: a new folder, or the folder of the same study, to continue it.

    A folder with another study, or with the same study on other data, is refused. Nothing is
    written: the runner does that, when it has found the data.
    """
    if settings is None and scale not in SCALES:
        raise LabError(f"There is no scale {scale!r}. Known are {', '.join(SCALES)}.")
    exists = (out / STUDY).exists()
    study = load(name, settings, out if exists else None)
    ledger = Ledger(out, study, name, scale, given, also, settings)
    if not exists:
        return ledger
    before = reopen(out, name, scale)
    if settings is not None and before.settings is not None:
        _check_settings(out, name, before.settings["config"], settings["config"])
    if given is None and not also:
        ledger = replace(ledger, data=before.data, also=before.also)
    if ledger.data is None and any(json.loads(key)[0] == "given" for key in before.digests):
        raise LabError(f"{out} was run with --data {before.data}. Give --data again.")
    ledger = replace(ledger, stored=before.digests)
    for cell in ledger.cells(ledger.results()):
        ledger.data_of(cell.config)  # the data may be in another folder, but it must be the same
    return ledger


def _check_settings(out: Path, name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse a config that would make it another study. More arms and seeds do not."""
    for key in new:
        if key in old and key not in FREE and old[key] != new[key]:
            raise LabError(
                f"{out} contains another {name}: {key} was {old[key]!r} and is {new[key]!r} now. "
                "Give another --out, or delete the folder."
            )
