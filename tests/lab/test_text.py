"""Every table at every width: no line is longer than the terminal, and every number is whole."""

from __future__ import annotations

import io
import re

import fakes
import pytest

from normcontrol.lab.cli import methods, schedule
from normcontrol.lab.cli.main import main
from normcontrol.lab.report.run_progress import Board
from normcontrol.lab.report.study_progress import LiveTable
from normcontrol.lab.studies import challenge
from normcontrol.lab.study.cells import Study, grid
from normcontrol.lab.study.claims import lower_loss
from normcontrol.lab.study.verdict import judge
from normcontrol.lab.study.verdict_text import lines
from normcontrol.lab.text import columns, terminal_width, wide, wrapped
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.loop import Status

NAMES = [
    "AdamW",
    "AdamW from scaled weights, with a name that is longer than any terminal is wide " * 2,
    "adamwn_without_a_single_space_in_its_name_and_lr=0.0012345_and_rate=0.0123456789" * 2,
    "北京と東京 AdamW " * 8,
    "\x1b[31mred\x1b[0m\nand a new line, \udcff",
]
WIDTHS = [None, 200, 80, 60, 30]
NUMBER = re.compile(r"\d[\d.,]*\d|\d")


def numbers(text):
    return sorted(NUMBER.findall(text))


def check(shown, width, wanted):
    """All lines fit, and the numbers are those that are wanted, whole."""
    assert "…" not in shown
    assert "\x1b" not in shown
    assert width is None or all(wide(line) <= width for line in shown.splitlines())
    there = numbers(shown)
    for number in numbers(" ".join(wanted)):
        assert number in there, (number, shown)
        there.remove(number)


def outcome(cell):
    return fakes.record(cell, 3.1234 + 0.1 * len(cell.arm) / 700 + 0.011 * cell.seed, owt=4.5678)


def arms(scale, done):
    base = Config().with_(steps=1000)
    return [
        cell
        for name in NAMES
        for cell in grid(name, base, lr=[0.0012345, 0.002], ratio=[1.2345], seeds=range(3))
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_tables_of_a_verdict(width):
    claims = (lower_loss("lower", NAMES[1], NAMES[0]),)
    verdict = judge(fakes.FakeLedger(Study("long", arms, "", NAMES[0], claims), outcome))
    shown = columns([verdict.headings(), *verdict.table()], width)
    check("\n".join(shown), width, [cell for row in verdict.table() for cell in row])
    check("\n".join(lines(verdict, width)), width, [c for row in verdict.table() for c in row[2:]])


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_of_a_challenge(width):
    given = ["adamwn:lr=0.00123456,rate=0.0123456", "scaled", "adamc"]
    study = challenge.study(challenge.settings_of(Config(), given, 2))
    verdict = judge(fakes.FakeLedger(study, outcome))
    shown = columns([verdict.headings(), *verdict.table()], width)
    check("\n".join(shown), width, [cell for row in verdict.table() for cell in row])


def status(step=12_345):
    return Status(step, 100_000, 4.5346, 1.4154, 1.4801, 4.9512, 1_234_567.0, 0.4567)


CELLS = ["12345/100000", "4.5346", "1.415 of 1.480", "4.9512", "1,234,567", "46"]


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_the_progress_of_runs_on_a_terminal(width):
    from rich.console import Console

    screen = io.StringIO()
    console = Console(file=screen, width=width, height=100, force_terminal=True, color_system=None)
    with Board(console) as board:
        board.plan(*NAMES)
        for name in NAMES:
            board.show(name, status())
        table = board.table()
    plain = Console(file=(shown := io.StringIO()), width=width, color_system=None)
    plain.print(table)
    check(shown.getvalue(), width, CELLS * len(NAMES))


def test_runs_that_were_done_before_leave_no_empty_lines_on_the_terminal():
    from rich.console import Console

    for trained in (["AdamWN"], []):
        screen = io.StringIO()
        with Board(Console(file=screen, width=140, force_terminal=True)) as board:
            board.plan("AdamW", "AdamWN")
            for name in trained:
                board.show(name, status())
        last = screen.getvalue().rpartition("\x1b[2K")[2]  # what is there after lines were erased
        assert re.findall("AdamWN?", last) == trained


def test_the_progress_of_runs_in_a_pipe(monkeypatch):
    from rich.console import Console

    monkeypatch.setattr("normcontrol.lab.report.run_progress.QUIET", -1.0)
    shown = io.StringIO()
    with Board(Console(file=shown)) as board:
        for name in NAMES:
            board.show(name, status())
    assert len(shown.getvalue().splitlines()) == len(NAMES)  # none is wrapped
    check(shown.getvalue(), None, CELLS * len(NAMES))


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_the_progress_of_a_study(width):
    from rich.console import Console

    live, done = LiveTable(), arms("", None)
    for cell in done:
        live.finished(cell, outcome(cell), 3, 4)
    for cell in done[:2]:
        live.show(cell.label, status())
    plain = Console(file=(shown := io.StringIO()), width=width, color_system=None)
    plain.print(live.table(width))
    losses = [f"{outcome(cell).value():.4f}" for cell in done]
    check(shown.getvalue(), width, [*losses, *["12345/100000", "4.535", "1.42"] * 2])


@pytest.mark.parametrize("width", WIDTHS)
def test_the_tables_of_commands(width, monkeypatch, capsys, tmp_path, study):
    monkeypatch.setattr("normcontrol.lab.text.terminal_width", lambda: width)
    methods.show_all()
    shown = capsys.readouterr().out
    check(shown, width, ["13"])
    assert schedule.run(["--ratio=2.345678", "--out", str(tmp_path / "s.png")]) == 0
    check(capsys.readouterr().out.partition("Drawn")[0], width, ["0.004", "2.346", "500"])
    assert main(["study", study, "--list", "--out", str(tmp_path / "out"), "--only", "seed=1"]) == 0
    shown = capsys.readouterr().out
    check(shown, width, ["0.1", "1", "1", "1"])
    assert "seed=0" not in shown


def test_a_pipe_has_no_width():
    assert terminal_width() is None
    assert wrapped("a " * 500, None) == ["a " * 500]
