"""``normcontrol study``: run the cells of a study, continue a stopped study, replay one, or move
its records."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from normcontrol.lab.cli.flags import given, parse, unhindered
from normcontrol.lab.errors import LabError, nearest
from normcontrol.lab.ranges import Count, NotNegative
from normcontrol.lab.study.scales import Scale

if TYPE_CHECKING:
    from normcontrol.lab.study.ledger import Ledger
    from normcontrol.lab.study.runner import Outcome

Folders = Annotated[tuple[str, ...], tyro.conf.arg(metavar="DIR [DIR ...]")]
Texts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT [TEXT ...]")]


@dataclass(frozen=True)
class Study:
    """Run the cells of a study that are not finished yet. A stopped study continues with the same
    command."""

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
    limit_minutes: NotNegative | None = None
    """Start no cell that would not end within this number of minutes."""
    on: Literal["local", "ray"] = "local"
    """On this machine, or on the Ray cluster it belongs to."""
    workers: Count = 1
    """Cells to run at a time."""
    device: str = "auto"
    """cpu, cuda, ...; auto takes a GPU if there is one."""
    replay: str | None = None
    """Run the finished cells of this folder again, and compare the numbers."""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the cells that are known so far, and run none."""
    merge: Folders = ()
    """Take over the finished runs of these study folders, and run none."""
    pack: tyro.conf.FlagCreatePairsOff[bool] = False
    """Put all records into one small file, to be committed, and run none."""


def run(args: Sequence[str]) -> int:
    flags = parse("study", Study, args)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LabError(
            "A study gives each run one process, and torchrun started several. Start it without "
            "torchrun, with --workers."
        )
    if flags.replay:
        return repeat(flags, given(args))
    from normcontrol.lab.studies import STUDIES
    from normcontrol.lab.studies.opening import begin
    from normcontrol.lab.text import columns, terminal_width

    if not flags.name:
        raise LabError(
            f"Which study? {nearest('', STUDIES)} One of your own is path/to/file.py:function."
        )
    stem = Path(flags.name.rpartition(":")[0] or flags.name).stem
    out = flags.out or Path("results") / f"{stem}-{flags.scale}"
    if flags.merge or flags.pack:
        return move_records(flags, out, given(args))
    ledger = begin(out, flags.name, flags.scale, flags.data, flags.also_validate)
    if flags.list:
        done = ledger.results()
        cells = [cell for cell in ledger.cells(done) if cell.matches(flags.only)]
        rows = [
            (cell.label, cell.part or "-", record.status if (record := done.of(cell)) else "-")
            for cell in cells
        ]
        print("\n".join(columns([("cell", "part", "status"), *rows], terminal_width())))
        return 0
    return train(flags, ledger)


MOVED, BEGUN = ("scale", "out", "merge", "pack"), ("data", "also_validate")
"""The flags that are used where records are moved, and those for a folder that is new."""


def move_records(flags: Study, out: Path, names: Sequence[str]) -> int:
    """Take over records from other folders, and pack those of the study."""
    from normcontrol.lab.studies.opening import begin, reopen
    from normcontrol.lab.study.ledger import STUDY
    from normcontrol.lab.study.packing import merge, pack

    exists = (out / STUDY).exists()
    if others := [name for name in names if name not in (MOVED if exists else MOVED + BEGUN)]:
        raise LabError(
            f"--merge and --pack run nothing, so that --{others[0].replace('_', '-')} would have "
            "no effect. Give it in a command of its own."
        )
    if exists:  # its data need not be on this machine
        ledger = reopen(out, flags.name, flags.scale)
    else:
        ledger = begin(out, flags.name, flags.scale, flags.data, flags.also_validate)
    with ledger.alone():
        for source in map(Path, flags.merge):
            found = merge(ledger, source)
            ledger.save()
            text = f"{source}: {found.taken} runs taken over; {found.known} were here already"
            more = f", and the study has no cell for {found.unwanted}" if found.unwanted else ""
            print(f"{text}{more}.")
        if flags.pack:
            path = pack(out)
            print(f"{len(ledger.results())} records in {path}, {path.stat().st_size:,} bytes.")
    return 0


def train(flags: Study, ledger: Ledger) -> int:
    """Run the cells of a study that are not finished."""
    from normcontrol.lab.report.study_progress import progress
    from normcontrol.lab.study.runner import Runner

    for problem in ledger.results().problems:
        print(problem)
    with progress() as shown:
        outcome = Runner(
            ledger,
            device=flags.device,
            workers=flags.workers,
            on=flags.on,
            only=flags.only,
            limit_minutes=flags.limit_minutes,
            show=unhindered(shown.show),
            finished=unhindered(shown.finished),
        ).run()
    if flags.only and not outcome.done + outcome.left:
        raise LabError(
            f"Nothing was run: no cell that is known so far has {' or '.join(flags.only)} in its "
            "part or name. --list shows the cells."
        )
    return summary(outcome, ledger.out)


def summary(outcome: Outcome, out: Path) -> int:
    """Print how a study ended. The exit status is 0 only if no cell failed."""
    from normcontrol.lab.study.runner import BY_HAND
    from normcontrol.lab.text import in_shell

    for label, error in outcome.failed.items():
        print(f"{label} failed: {error}")
    failed = f"{len(outcome.failed)} of {outcome.done + outcome.left} cells failed"
    if outcome.stopped:
        print(
            f"Stopped ({outcome.stopped}) with {outcome.done} cells finished and {outcome.left} or "
            f"more left{f'; {failed}' if outcome.failed else ''}. To continue, give the same "
            "command again."
        )
        return 130 if outcome.stopped == BY_HAND else int(bool(outcome.failed))
    if outcome.failed:
        print(
            f"{failed}, in {out}. The same command goes on with them, from their last checkpoints."
        )
        return 1
    finished = "The only cell is" if outcome.done == 1 else f"All {outcome.done} cells are"
    print(f"{finished} finished, in {out}. What they show: normcontrol verdict {in_shell(out)}")
    return 0


REPLAYED = ("replay", "only", "workers", "device", "data", "also_validate")
"""The flags that a replay uses."""


def repeat(flags: Study, names: Sequence[str]) -> int:
    """Run finished cells again; the exit status is 1 if one of them differs."""
    others = [name for name in names if name not in REPLAYED]
    if flags.name or others:
        ignored = "--" + others[0].replace("_", "-") if others else flags.name
        known = ", ".join("--" + name.replace("_", "-") for name in REPLAYED[1:])
        raise LabError(
            "A replay runs what its folder says, on this machine and to its end, so that "
            f"{ignored} would have no effect. With --replay, only {known} can be given."
        )
    from normcontrol.lab.studies.opening import begin, find, open_folder
    from normcontrol.lab.study.replay import replay

    folder = find(flags.replay or "")
    before = open_folder(folder)
    ledger = begin(  # refuses other data
        folder, before.name, before.scale, flags.data, flags.also_validate, before.settings
    )
    problems = ledger.results().problems
    for problem in problems:
        print(problem)
    differ = 0
    for comparison in replay(ledger, flags.device, flags.only, flags.workers):
        print(comparison, flush=True)
        differ += not comparison.same
    damaged = f" {len(problems)} records cannot be read." if problems else ""
    same = f"All {'other ' if problems else ''}cells gave the same results."
    print((f"{differ} cells differ." if differ else same) + damaged)
    return 1 if differ or problems else 0
