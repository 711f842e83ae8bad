"""The commands ``study``, ``verdict`` and ``report``. The first two need torch and numpy alone, as
bare GPU machines have.

``python -m normcontrol.lab study ...`` works where the laboratory's other packages are missing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from normcontrol.lab.errors import LabError, nearest, told
from normcontrol.lab.study.cells import SCALES
from normcontrol.lab.study.ledger import STUDY, begin, open_folder


def study(args: Sequence[str]) -> int:
    """Run a study, or go on with it."""
    from normcontrol.lab.report.study_display import board
    from normcontrol.lab.studies import STUDIES
    from normcontrol.lab.study.runner import Runner

    parser = _parser(
        "study",
        "Run the cells of a study that are not finished yet. The same command goes on where it was "
        "stopped.",
    )
    parser.add_argument(
        "name", nargs="?", help="a study's name, or path/to/file.py:function for one of your own"
    )
    parser.add_argument(
        "--scale",
        choices=SCALES,
        default="tiny",
        help="tiny: a CPU; small: one GPU; full: the paper's size",
    )
    parser.add_argument(
        "--out", type=Path, help="the study's folder; by default results/NAME-SCALE"
    )
    parser.add_argument(
        "--data",
        help="train on this instead of what the study says: as --data of `normcontrol train`",
    )
    parser.add_argument(
        "--also-validate",
        nargs="+",
        default=[],
        metavar="DIR",
        help="other data to validate on after the last step",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="only cells whose part or name holds one of these texts",
    )
    parser.add_argument(
        "--limit-minutes",
        type=float,
        metavar="M",
        help="start no cell that would not end within so many minutes from now",
    )
    parser.add_argument(
        "--on",
        choices=("local", "ray"),
        default="local",
        help="on this machine, or on the Ray cluster it belongs to",
    )
    parser.add_argument("--workers", type=int, default=1, help="cells to run at a time")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, ...; auto takes a GPU if there is one"
    )
    parser.add_argument(
        "--replay",
        metavar="DIR",
        help="run the finished cells of this folder anew, and compare the numbers",
    )
    parser.add_argument(
        "--list", action="store_true", help="name the cells that are known by now, and run none"
    )
    asked = parser.parse_args(args)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LabError(
            "A study gives each run one process, and torchrun started several. Start it without "
            "torchrun, with --workers."
        )
    if asked.workers < 1:
        raise LabError(f"workers={asked.workers}: at least one is needed.")
    if asked.replay:
        return _replay(asked)
    if asked.name is None:
        raise LabError(
            f"Which study? {nearest('', STUDIES)} One of your own is path/to/file.py:function."
        )
    out = (
        asked.out
        or Path("results")
        / f"{Path(asked.name.rpartition(':')[0] or asked.name).stem}-{asked.scale}"
    )
    ledger = begin(out, asked.name, asked.scale, asked.data, tuple(asked.also_validate))
    if asked.list:
        done = ledger.results()
        for cell in ledger.cells(done):
            record = done.of(cell)
            print(f"{cell.part:10} {cell.label:60} {record.status if record else '-'}")
        return 0
    with board() as shown:
        runner = Runner(
            ledger,
            device=asked.device,
            workers=asked.workers,
            on=asked.on,
            only=tuple(asked.only),
            limit_minutes=asked.limit_minutes,
            show=shown.show,
            finished=shown.finished,
        )
        outcome = runner.run()
    if outcome.stopped:
        print(
            f"Stopped ({outcome.stopped}) with {outcome.done} cells finished and {outcome.left} or "
            "more left. The same command goes on."
        )
        return 130 if outcome.stopped == "stopped by hand" else 0
    print(
        f"All {outcome.done} cells are finished, in {out}. What they show: normcontrol verdict "
        f"{out}"
    )
    return 0


def _replay(asked: argparse.Namespace) -> int:
    from normcontrol.lab.study.replay import replay

    if asked.name or asked.out or asked.limit_minutes or asked.list or asked.on != "local":
        raise LabError(
            "A replay is of what its folder says, on this machine and to its end. Beside --replay "
            "give none but --only, --workers, "
            "--device, --data and --also-validate."
        )
    folder = find(asked.replay)
    before = open_folder(folder)
    ledger = begin(
        folder, before.name, before.scale, asked.data, tuple(asked.also_validate)
    )  # refuses other data
    differ = 0
    for comparison in replay(ledger, asked.device, tuple(asked.only), asked.workers):
        print(comparison, flush=True)
        differ += not comparison.same
    print("All are what they were." if not differ else f"{differ} are not what they were.")
    return 1 if differ else 0


def verdict(args: Sequence[str]) -> int:
    """Say what a study showed."""
    from normcontrol.lab.study import verdict as lab

    parser = _parser(
        "verdict",
        "What the finished cells of a study show: sentences, a table, and what became of each "
        "claim.",
    )
    parser.add_argument("study", help="the study's folder, or its name under results/")
    asked = parser.parse_args(args)
    for line in lab.lines(lab.judge(open_folder(find(asked.study)))):
        print(line)
    return 0


def report(args: Sequence[str]) -> int:
    """Write a study's page."""
    from normcontrol.lab.report import study as study_report

    parser = _parser(
        "report",
        "Write a study's page, one self-contained HTML file, and its figures as PNG and PDF.",
    )
    parser.add_argument("study", help="the study's folder, or its name under results/")
    parser.add_argument("--out", type=Path, help="where to; by default into the study's folder")
    asked = parser.parse_args(args)
    folder = find(asked.study)
    print(f"The page is {study_report.write(open_folder(folder), asked.out or folder)}.")
    return 0


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


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "study": (study, "run a grid of runs x seeds, or go on with it"),
    "verdict": (verdict, "what a study showed, with intervals and every claim"),
    "report": (report, "a study's page and figures"),
}


def main(argv: Sequence[str]) -> int:
    return told(lambda: COMMANDS[argv[0]][0](argv[1:]))


def _parser(command: str, about: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"normcontrol {command}", description=about)
