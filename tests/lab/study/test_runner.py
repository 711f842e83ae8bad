"""The runner: cells are never run twice, and a stopped study continues, however it was stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import record_files

from normcontrol.lab.cli.main import main
from normcontrol.lab.errors import LabError
from normcontrol.lab.studies.opening import begin, open_folder
from normcontrol.lab.study import worker
from normcontrol.lab.study.records import write
from normcontrol.lab.study.runner import Runner
from normcontrol.lab.training import metrics


def command(study: str, out: Path) -> list[str]:
    """The command that runs a study in a process of its own."""
    python = [sys.executable, "-m", "normcontrol.lab"]
    return [*python, "study", study, "--out", str(out), "--device", "cpu"]


def test_a_study_from_a_file_runs_all_cells_the_later_ones_chosen_by_the_earlier(
    study, tmp_path, capsys
):
    out = tmp_path / "out"
    assert main(["study", study, "--out", str(out), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "6/6  AdamWN ratio=1.5 seed=1: val_loss" in said
    assert "All 6 cells are finished" in said
    assert len(record_files(out)) == 6
    assert not (out / "work").exists()
    ledger = open_folder(out)
    done = ledger.results()
    for cell in ledger.cells(done):
        record = done.of(cell)
        assert record.good
        assert record.curves["val_loss"][0] == [0, 6, 12]
        assert record.curves["ratio"][1][-1] == record.final["ratio"]
        assert record.environment["data"]["digest"] == next(iter(ledger.digests.values())).digest
    before = record_files(out)
    assert main(["study", study, "--out", str(out), "--device", "cpu"]) == 0
    assert record_files(out) == before


def test_several_workers_give_the_same_numbers_as_one(study, tmp_path):
    one, two = (begin(tmp_path / str(n), study, "tiny") for n in (1, 2))
    assert Runner(one, device="cpu", workers=1).run().left == 0
    assert Runner(two, device="cpu", workers=2).run().left == 0
    assert {i: (r.final, r.curves) for i, r in one.results().items()} == {
        i: (r.final, r.curves) for i, r in two.results().items()
    }


def test_a_killed_study_continues_where_it_was(study, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(command(study, out))
    while process.poll() is None and len(record_files(out)) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = record_files(out)
    assert Runner(begin(out, study, "tiny"), device="cpu").run().left == 0
    after = record_files(out)
    assert {name: after[name] for name in before} == before
    assert len(after) == 6


def test_no_cell_is_started_that_would_not_end_in_time(study, tmp_path):
    ledger = begin(tmp_path / "out", study, "tiny")
    first = ledger.cells(ledger.results())[0].label
    Runner(ledger, device="cpu", only=(first,)).run()
    (record,) = ledger.results().values()
    write(ledger.out, replace(record, seconds=100.0), first)
    outcome = Runner(ledger, device="cpu", limit_minutes=1.5).run()
    assert (outcome.done, outcome.stopped) == (1, "the time is up")
    write(ledger.out, record, first)
    assert Runner(ledger, device="cpu", limit_minutes=5).run().left == 0


def test_only_runs_the_cells_that_contain_the_given_text(study, tmp_path):
    ledger = begin(tmp_path / "out", study, "tiny")
    Runner(ledger, device="cpu", only=("weight_decay=1 ",)).run()
    assert {r.config["weight_decay"] for r in ledger.results().values()} == {1.0}


def test_failed_runs_are_kept_and_tried_again_and_diverged_ones_are_kept(
    study, tmp_path, monkeypatch
):
    ledger = begin(tmp_path / "out", study.replace("decays", "spoiled"), "tiny")
    Runner(ledger, device="cpu").run()
    statuses = sorted((r.status, r.error[:15]) for r in ledger.results().values())
    assert statuses == [("failed", "tokens_per_step"), ("finished", "")]

    def nan(*args, **options):
        raise LabError("The loss or gradient was not finite in 5 steps in a row")

    monkeypatch.setattr(worker, "train", nan)
    Runner(ledger, device="cpu").run()
    assert sorted(r.status for r in ledger.results().values()) == ["diverged", "finished"]
    monkeypatch.setattr(worker, "train", None)  # would fail if anything were run again
    assert Runner(ledger, device="cpu").run().left == 0


def test_ctrl_c_saves_the_cell_that_is_running(study, tmp_path, config):
    config.with_(steps=100_000, eval_every=100_000).save(tmp_path / "base.json")
    out = tmp_path / "out"
    process = subprocess.Popen(command(study, out), stdout=subprocess.PIPE, text=True)
    while process.poll() is None and not any(
        len(metrics.read(folder)) > 20 for folder in (out / "work").glob("*")
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (
        "Stopped (stopped by hand) with 0 cells finished and 4 or more left. To continue, give the "
        "same command again." in said
    )
    assert len(list((out / "work").glob("*/checkpoints/*.pt"))) == 1


@pytest.mark.slow
def test_on_ray_the_numbers_are_those_of_a_local_run(study, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    local, ray = (begin(tmp_path / name, study, "tiny") for name in ("local", "ray"))
    Runner(local, device="cpu", only=("seed=0",)).run()
    Runner(ray, device="cpu", only=("seed=0",), on="ray", workers=2).run()
    assert len(ray.results()) == 2
    assert {i: (r.final, r.curves) for i, r in local.results().items()} == {
        i: (r.final, r.curves) for i, r in ray.results().items()
    }
