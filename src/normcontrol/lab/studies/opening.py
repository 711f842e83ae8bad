"""Opens a study: by its name, from a file of the user's own, or from the folder it was run in.

It finds the study and checks its folder. It runs nothing.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from normcontrol.lab.errors import LabError, nearest
from normcontrol.lab.files import read_json
from normcontrol.lab.studies import STUDIES, challenge
from normcontrol.lab.study.cells import Data, Study
from normcontrol.lab.study.ledger import STUDY, Ledger
from normcontrol.lab.study.scales import SCALES
from normcontrol.lab.text import in_shell
from normcontrol.lab.training.run_folder import CONFIG, FREE


def load(name: str, settings: Mapping[str, Any] | None = None) -> Study:
    """A study by its name, or from a file: ``path/to/file.py:function``.

    A challenge is made from its settings.
    """
    if settings is not None:
        return challenge.study(settings)
    if ".py" in name:
        return _from_file(name)
    if name == challenge.NAME:
        raise LabError("A challenge is run by a command of its own: normcontrol challenge.")
    if name not in STUDIES:
        raise LabError(
            f"There is no study {name!r}. {nearest(name, STUDIES)} One of your own is "
            "path/to/file.py:function."
        )
    return STUDIES[name]


def _from_file(name: str) -> Study:
    path, _, function = name.rpartition(":")
    if not path.endswith(".py"):
        path, function = name, ""
    if not Path(path).exists():
        raise LabError(
            f"There is no file {path!r} with a study. Give it as path/to/file.py:function."
        )
    # Its name is no other module's, whatever the file is called. A dataclass in it needs its entry
    # in sys.modules.
    spec = importlib.util.spec_from_file_location(f"normcontrol study {Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, function or "study", None)
    if isinstance(found, Study):
        return found
    if not callable(found):
        known = [
            key
            for key, value in vars(module).items()
            if isinstance(value, Study)
            or (callable(value) and getattr(value, "__module__", "") == module.__name__)
        ]
        raise LabError(
            f"{path} has no function and no Study {function or 'study'!r}. "
            f"{nearest(function, known) if known else 'It has none at all.'}"
        )
    about = " ".join((found.__doc__ or "").split())
    return Study(f"{Path(path).stem}-{found.__name__}", found, about)


def open_folder(out: Path) -> Ledger:
    """The study in a folder, to read. Its data need not be on this machine."""
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
    stored = read_json(out / STUDY, "study", "scale", "data", "also_validate", "digests")
    settings = stored.get("settings")
    return Ledger(
        out,
        load(stored["study"], settings),
        stored["study"],
        stored["scale"],
        stored["data"],
        tuple(stored["also_validate"]),
        settings,
        {key: Data(value["digest"], value["also"]) for key, value in stored["digests"].items()},
    )


def reopen(out: Path, name: str, scale: str) -> Ledger:
    """The study in a folder, which must be this one."""
    before = open_folder(out)
    for what, old, new in (("study", before.name, name), ("scale", before.scale, scale)):
        if old != new:
            raise LabError(
                f"{out} contains another study: its {what} was {old!r} and is {new!r} now. Give "
                "another --out, or delete the folder."
            )
    return before


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
    ledger = Ledger(out, load(name, settings), name, scale, given, also, settings)
    if not (out / STUDY).exists():
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
