"""``normcontrol study``: run the cells of a study, go on with them, or replay them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from normcontrol.lab.cli.flags import parse
from normcontrol.lab.errors import LabError, nearest
from normcontrol.lab.study.scales import Scale

if TYPE_CHECKING:
    from normcontrol.lab.study.ledger import Ledger

Folders = Annotated[tuple[str, ...], tyro.conf.arg(metavar="DIR [DIR ...]")]
Texts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT [TEXT ...]")]


@dataclass(frozen=True)
class Study:
    """Run the cells of a study that are not finished yet. The same command goes on where it was
    stopped."""

    name: tyro.conf.Positional[str] = ""
    """A study's name, or path/to/file.py:function for one of your own."""
    scale: Scale = "tiny"
    """tiny: a CPU; small: one GPU; full: the paper's size."""
    out: Path | None = None
    """The study's folder; by default results/NAME-SCALE."""
    data: str | None = None
    """Train on this instead of what the study says: as --data of `normcontrol train`."""
    also_validate: Folders = ()
    """Other data to validate on after the last step."""
    only: Texts = ()
    """Only cells whose part or name contains one of these texts."""
    limit_minutes: float | None = None
    """Start no cell that would not end within so many minutes from now."""
    on: Literal["local", "ray"] = "local"
    """On this machine, or on the Ray cluster it belongs to."""
    workers: int = 1
    """Cells to run at a time."""
    device: str = "auto"
    """cpu, cuda, ...; auto takes a GPU if there is one."""
    replay: str | None = None
    """Run the finished cells of this folder anew, and compare the numbers."""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """Name the cells that are known by now, and run none."""


def run(args: Sequence[str]) -> int:
    asked = parse("study", Study, args)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LabError(
            "A study gives each run one process, and torchrun started several. Start it without "
            "torchrun, with --workers."
        )
    if asked.workers < 1:
        raise LabError(f"workers={asked.workers}: at least one is needed.")
    if asked.replay:
        return repeat(asked)
    from normcontrol.lab.studies import STUDIES
    from normcontrol.lab.studies.opening import begin

    if not asked.name:
        raise LabError(
            f"Which study? {nearest('', STUDIES)} One of your own is path/to/file.py:function."
        )
    stem = Path(asked.name.rpartition(":")[0] or asked.name).stem
    out = asked.out or Path("results") / f"{stem}-{asked.scale}"
    ledger = begin(out, asked.name, asked.scale, asked.data, asked.also_validate)
    if asked.list:
        done = ledger.results()
        for cell in ledger.cells(done):
            record = done.of(cell)
            print(f"{cell.part:10} {cell.label:60} {record.status if record else '-'}")
        return 0
    return train(asked, ledger)


def train(asked: Study, ledger: Ledger) -> int:
    """Run the cells of a study that are not finished."""
    from normcontrol.lab.report.study_progress import progress
    from normcontrol.lab.study.runner import BY_HAND, Runner

    with progress() as shown:
        outcome = Runner(
            ledger,
            device=asked.device,
            workers=asked.workers,
            on=asked.on,
            only=asked.only,
            limit_minutes=asked.limit_minutes,
            show=shown.show,
            finished=shown.finished,
        ).run()
    if outcome.stopped:
        print(
            f"Stopped ({outcome.stopped}) with {outcome.done} cells finished and {outcome.left} or "
            "more left. The same command goes on."
        )
        return 130 if outcome.stopped == BY_HAND else 0
    print(
        f"All {outcome.done} cells are finished, in {ledger.out}. What they show: normcontrol "
        f"verdict {ledger.out}"
    )
    return 0


def repeat(asked: Study) -> int:
    """Run finished cells again; the exit status is 1 if one of them differs."""
    if asked.name or asked.out or asked.limit_minutes or asked.list or asked.on != "local":
        raise LabError(
            "A replay is of what its folder says, on this machine and to its end. Beside --replay "
            "give none but --only, --workers, --device, --data and --also-validate."
        )
    from normcontrol.lab.studies.opening import begin, find, open_folder
    from normcontrol.lab.study.replay import replay

    folder = find(asked.replay or "")
    before = open_folder(folder)
    ledger = begin(  # refuses other data
        folder, before.name, before.scale, asked.data, asked.also_validate, before.settings
    )
    differ = 0
    for comparison in replay(ledger, asked.device, asked.only, asked.workers):
        print(comparison, flush=True)
        differ += not comparison.same
    print("All are what they were." if not differ else f"{differ} are not what they were.")
    return 1 if differ else 0
