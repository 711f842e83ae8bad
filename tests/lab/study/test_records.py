"""Records: small files that name no folder of the machine, and are left out if damaged."""

from __future__ import annotations

import json

from fakes import record_files

from normcontrol.lab.studies.opening import begin
from normcontrol.lab.study.records import summarise
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
