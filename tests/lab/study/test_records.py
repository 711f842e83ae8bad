"""Records: small files that name no folder of the machine, and are left out if damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import DATA, record, record_files

from normcontrol.lab.errors import LabError
from normcontrol.lab.studies.opening import begin
from normcontrol.lab.study import records
from normcontrol.lab.study.cells import Cell
from normcontrol.lab.study.records import Results, read, read_all, summarise, write
from normcontrol.lab.study.runner import Runner
from normcontrol.lab.training.config import Config


def test_a_record_is_small_and_says_nothing_of_the_machines_folders(study, tmp_path):
    out = tmp_path / "out"
    Runner(begin(out, study, "tiny"), device="cpu", only=("seed=0",)).run()
    path = next((out / "cells").glob("*.jsonl"))
    assert path.stat().st_size < 8000
    head = json.loads(path.read_text().splitlines()[0])
    assert str(tmp_path) not in json.dumps(head["environment"]["data"])


def test_a_run_that_learned_nothing_has_diverged():
    lines = [{"step": 0, "val_loss": 3.0, "ratio": 1.0}, {"step": 9, "val_loss": 3.5}]
    assert summarise("x", Config(), {}, lines, 1.0).status == "diverged"


def test_a_corrupt_record_is_named_and_left_out(study, tmp_path):
    out = tmp_path / "out"
    ledger = begin(out, study, "tiny")
    Runner(ledger, device="cpu", only=("seed=0",)).run()
    path = sorted((out / "cells").glob("*.jsonl"))[0]
    path.write_text(path.read_text()[:-40])
    done = ledger.results()
    assert len(done) == len(record_files(out)) - 1
    assert len(done.problems) == 1
    assert f"{path} cannot be read" in done.problems[0]
    Runner(ledger, device="cpu", only=("seed=0",)).run()
    assert ledger.results().problems == []


def test_a_cell_is_identified_once_however_often_it_is_asked_for(monkeypatch):
    """A study names its cells anew for every decision: the identities of ``settle`` took 20 s."""
    asked = []
    identity = records.identity
    monkeypatch.setattr(records, "identity", lambda *of: asked.append(of) or identity(*of))
    cell = Cell("A", Config())
    done = Results(lambda config: DATA, [record(cell, 3.0)])
    assert [done.of(cell).final["val_loss"] for _ in range(5)] == [3.0] * 5
    assert len(asked) == 1
    other = Cell("A", Config().with_(lr=2.0))
    assert done.of(other) is None
    done.add(record(other, 5.0))
    assert done.of(cell).final["val_loss"] == 3.0
    assert len(asked) == 2
    done.add(record(cell, 4.0))
    assert done.of(cell).final["val_loss"] == 4.0


@pytest.fixture
def stored(tmp_path):
    """A record in its file, without a checksum, as those of earlier versions."""
    made = record(Cell("A", Config()), 3.0)
    path = write(tmp_path, made, "A")
    head, *curves = map(json.loads, path.read_text().splitlines())
    del head["sha256"]
    return path, head, curves


def test_the_checksum_of_a_record_may_be_missing(stored):
    path, head, curves = stored
    whole = read(path)
    path.write_text("\n".join(map(json.dumps, [head, *curves])))
    assert read(path) == whole


def test_a_changed_record_is_refused(stored):
    path, _, _ = stored
    path.write_text(path.read_text().replace('"seconds": 60.0', '"seconds": 61.0'))
    with pytest.raises(LabError, match="its content does not match the sha256 in it"):
        read(path)


def change_curve(name, values):
    def change(head, curves):
        (curve,) = [curve for curve in curves if curve["curve"] == name]
        curve["values"][-1:] = values

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, c: h["final"].update(val_loss=2.0), "its final val_loss is 2.0, and its curve"),
        (lambda h, c: h["final"].update(ratio=1.0), "its final ratio is 1.0, and its curve ends"),
        (lambda h, c: h["final"].update(val_loss="3"), "some of its values are not numbers"),
        (change_curve("val_loss", [9.0]), "its final val_loss is 3.0, and its curve ends with 9.0"),
        (change_curve("val_loss", [None]), "some of its values are not numbers"),
        (change_curve("loss", []), "its curves are not whole"),
        (lambda h, c: c.pop(), "its curves are not whole"),
        (lambda h, c: h.update(status="done"), "its status is 'done'"),
        (lambda h, c: h.update(id="0" * 16), "it is the record of 0000"),
        (lambda h, c: h.pop("config"), "config"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(stored, change, message):
    path, head, curves = stored
    change(head, curves)
    path.write_text("\n".join(map(json.dumps, [head, *curves])))
    with pytest.raises(LabError, match=message):
        read(path)


def test_every_committed_record_is_readable():
    folders = [path.parent for path in (Path(__file__).parents[3] / "results").glob("*/study.json")]
    found = {folder.name: read_all(folder) for folder in folders}
    assert sum(len(records) for records, _ in found.values()) > 2000
    assert [problem for _, problems in found.values() for problem in problems] == []
