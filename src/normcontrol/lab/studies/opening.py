"""Opens a study: by its name, from a file of the user's own, or from the folder it was run in.

It finds the study and checks its folder. It runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from normcontrol.lab import own_files
from normcontrol.lab.errors import LabError, nearest
from normcontrol.lab.files import read_json
from normcontrol.lab.own_files import OwnFile
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
        return challenge.study(settings, out)
    if own_files.split(name)[0]:
        return _from_file(name, out)
    if name == challenge.NAME:
        raise LabError("A challenge is run by a command of its own: normcontrol challenge.")
    if name not in STUDIES:
        raise LabError(
            f"There is no study {name!r}. {nearest(name, STUDIES)} One of your own is "
            "path/to/file.py:function."
        )
    return STUDIES[name]


def _same(one: str, other: str) -> bool:
    """True if two names are of the same study. A file is the same by whatever path it is given, and
    after it was moved: its cells are known by their settings."""
    (path, function), (other_path, other_function) = map(own_files.split, (one, other))
    return Path(path).name == Path(other_path).name and (
        (function or OWN) == (other_function or OWN)
    )


def _from_file(name: str, out: Path | None) -> Study:
    path, function = own_files.split(name)
    beside = f" The study in {out} needs it." if out else ""
    called = ", or call the command from the folder that the path begins in" if out else ""
    missing = f"{beside} Give it as path/to/file.py:function{called}."
    file = own_files.find(path, out, f"There is no file {path!r} with a study.{missing}")
    module = own_files.run(file, OWN)
    found = getattr(module, function or OWN, None)
    if isinstance(found, Study):
        return replace(found, cells=_guarded(found.cells, file))
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
    return Study(f"{file.path.stem}-{found.__name__}", _guarded(found, file), about)


def _guarded(cells: Cells, file: OwnFile) -> Cells:
    """The function of a user's study, with its errors as sentences."""

    def guarded(scale: str, done: Results) -> Iterable[Cell]:
        with own_files.told(file, OWN):
            found = cells(scale, done)
            return list(found) if isinstance(found, Iterator) else found

    return guarded


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
