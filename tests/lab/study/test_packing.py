"""All records of a study in one file, and records that were made elsewhere."""

from __future__ import annotations

import lzma

import pytest
from fakes import record

from normcontrol.lab.cli.main import main
from normcontrol.lab.errors import LabError
from normcontrol.lab.study.cells import Cell, Data, Study, identity
from normcontrol.lab.study.ledger import STUDY, Ledger
from normcontrol.lab.study.packing import merge, pack
from normcontrol.lab.study.records import CELLS, PACKED, Results, read_all, write
from normcontrol.lab.training.config import Config

DATA = Data("digest")
FIRST = [Cell("A", Config().with_(lr=lr), settings=(("lr", lr),)) for lr in (0.1, 0.2, 0.3)]
LATER = Cell("A", Config().with_(lr=0.4))


def cells(scale: str, done: Results) -> list[Cell]:
    """Three cells, and one more that is known when they are run."""
    return [*FIRST, LATER] if done.done(FIRST) else FIRST


def ledger(out) -> Ledger:
    made = Ledger(out, Study("made up", cells), "made up", "tiny")
    made.data_of = lambda config: DATA
    return made


def ran(out, *some: Cell, loss: float = 3.0) -> Ledger:
    for cell in some:
        write(out, record(cell, loss), cell.label)
    return ledger(out)


def files(out) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())


def test_the_packed_records_are_the_same_and_their_files_are_gone(tmp_path):
    found = ran(tmp_path, *FIRST)
    before = dict(found.results())
    assert pack(tmp_path) == tmp_path / PACKED
    assert files(tmp_path) == [PACKED]
    assert dict(found.results()) == before
    assert len(before) == 3


def test_packing_again_changes_no_byte_and_adds_what_is_new(tmp_path):
    found = ran(tmp_path, *FIRST)
    pack(tmp_path)
    packed = (tmp_path / PACKED).read_bytes()
    pack(tmp_path)
    assert (tmp_path / PACKED).read_bytes() == packed
    ran(tmp_path, LATER)
    pack(tmp_path)
    assert found.results().done([*FIRST, LATER])


def test_a_file_of_its_own_is_newer_than_the_packed_record(tmp_path):
    found = ran(tmp_path, *FIRST)
    pack(tmp_path)
    ran(tmp_path, FIRST[0], loss=2.0)
    assert found.results().of(FIRST[0]).value() == 2.0
    pack(tmp_path)
    assert [found.results().of(cell).value() for cell in FIRST] == [2.0, 3.0, 3.0]


def test_nothing_is_packed_while_a_record_cannot_be_read(tmp_path):
    ran(tmp_path, *FIRST)
    path = next((tmp_path / CELLS).iterdir())
    path.write_text(path.read_text()[:-40])
    before = files(tmp_path)
    with pytest.raises(LabError, match=r"cannot be read .* Nothing was packed"):
        pack(tmp_path)
    assert files(tmp_path) == before


def test_a_damaged_packed_file_is_an_error_and_not_an_empty_study(tmp_path):
    """Otherwise the study would run everything again, and lose what can be restored."""
    found = ran(tmp_path, *FIRST)
    path = pack(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(LabError, match="restore it from a copy"):
        found.results()


def test_one_damaged_record_in_the_packed_file_is_named_and_left_out(tmp_path):
    found = ran(tmp_path, *FIRST)
    path = pack(tmp_path)
    text = lzma.decompress(path.read_bytes()).decode()
    path.write_bytes(lzma.compress(text.replace('"seconds": 60.0', '"seconds": 61.0', 1).encode()))
    done = found.results()
    assert len(done) == 2
    (problem,) = done.problems
    assert "The record of A lr=" in problem
    assert "does not match the sha256" in problem


def test_runs_that_were_made_elsewhere_are_taken_over_as_far_as_the_study_wants_them(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    found = ran(here, FIRST[0], loss=2.0)
    other = Cell("B", Config().with_(lr=0.9))
    ran(there, *FIRST, LATER, other)
    pack(there)
    merged = merge(found, there)
    assert (merged.taken, merged.known, merged.unwanted) == (3, 1, 1)
    done = found.results()
    assert [done.of(cell).value() for cell in (*FIRST, LATER)] == [2.0, 3.0, 3.0, 3.0]
    assert identity(other.config, DATA) not in done
    again = merge(found, there)
    assert (again.taken, again.known, again.unwanted) == (0, 4, 1)


def test_nothing_is_taken_over_from_a_folder_that_cannot_be_read(tmp_path):
    here, there = ledger(tmp_path / "here"), tmp_path / "there"
    with pytest.raises(LabError, match="contains no records"):
        merge(here, there)
    ran(there, *FIRST)
    path = next((there / CELLS).iterdir())
    path.write_text("{}")
    with pytest.raises(LabError, match="Nothing was taken over"):
        merge(here, there)
    assert len(here.results()) == 0


def test_the_command_merges_and_packs(study, tmp_path, capsys):
    out, batch = tmp_path / "out", tmp_path / "batch"
    assert main(["study", study, "--out", str(batch), "--device", "cpu", "--only", "seed=0"]) == 0
    made, _ = read_all(batch)
    capsys.readouterr()
    assert main(["study", study, "--out", str(out), "--merge", str(batch), "--pack"]) == 0
    said = capsys.readouterr().out
    assert f"{len(made)} runs taken over; 0 were here already.\n" in said
    assert f"{len(made)} records in {out / PACKED}" in said
    assert read_all(out)[0] == made
    assert {PACKED, STUDY} <= set(files(out))
    assert main(["study", study, "--out", str(out), "--pack", "--workers", "2"]) != 0
    assert "--workers would have no effect" in capsys.readouterr().err
    assert main(["study", study, "--out", str(out), "--pack", "--data", "elsewhere"]) != 0
    assert "--data would have no effect" in capsys.readouterr().err
    assert main(["study", "rise", "--out", str(out), "--pack"]) != 0
    assert "contains another study" in capsys.readouterr().err


def test_notes_beside_the_records_disturb_no_command(study, tmp_path, capsys):
    out, other = tmp_path / "out", tmp_path / "other"
    run = ["study", study, "--device", "cpu", "--only", "seed=0", "--out"]
    assert main([*run, str(out)]) == 0
    commands = (
        ["verdict", str(out)],
        ["study", study, "--out", str(other), "--merge", str(out), "--pack"],
        ["study", study, "--out", str(out), "--pack"],
        [*run, str(out)],
        ["report", str(out)],
    )
    capsys.readouterr()
    assert main(commands[0]) == 0
    before = capsys.readouterr().out
    notes = out / "notes.md"
    notes.write_text("Does it hold?\n\nIt does.\n")
    for command in commands:
        assert main(command) == 0, command
        assert "notes.md" not in capsys.readouterr().out
    assert notes.read_text() == "Does it hold?\n\nIt does.\n"
    assert main(commands[0]) == 0
    assert capsys.readouterr().out == before
