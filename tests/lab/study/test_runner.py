"""The runner: cells are never run twice, and a stopped study continues, however it was stopped."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import Ray, record_files
from fork_server import Python

from normcontrol.lab.cli.main import main
from normcontrol.lab.errors import Busy, LabError
from normcontrol.lab.files import locked
from normcontrol.lab.studies.opening import begin, open_folder
from normcontrol.lab.study import records, worker
from normcontrol.lab.study.cells import identity
from normcontrol.lab.study.records import write
from normcontrol.lab.study.runner import Runner
from normcontrol.lab.training import metrics
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.run_folder import opened


def start(study: str, out: Path, *more: str) -> Python:
    """Run a study in a process of its own."""
    words = ("study", study, "--out", out, "--device", "cpu", *more)
    return Python("-m", "normcontrol.lab", *words)


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


def test_several_workers_give_the_same_numbers_as_one(study, tmp_path, quick_workers):
    one, two = (begin(tmp_path / str(n), study, "tiny") for n in (1, 2))
    assert Runner(one, device="cpu", workers=1).run().left == 0
    assert Runner(two, device="cpu", workers=2).run().left == 0
    assert {i: (r.final, r.curves) for i, r in one.results().items()} == {
        i: (r.final, r.curves) for i, r in two.results().items()
    }


def test_a_killed_study_continues_where_it_was(study, tmp_path):
    out = tmp_path / "out"
    process = start(study, out)
    process.wait_for(lambda: len(record_files(out)) >= 2)
    process.kill()
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
    assert statuses == [("failed", "The validation "), ("finished", "")]

    def nan(*args, **options):
        raise LabError("The loss or gradient was not finite in 5 steps in a row")

    monkeypatch.setattr(worker, "train", nan)
    Runner(ledger, device="cpu").run()
    assert sorted(r.status for r in ledger.results().values()) == ["diverged", "finished"]
    monkeypatch.setattr(worker, "train", None)  # would fail if anything were run again
    assert Runner(ledger, device="cpu").run().left == 0


def test_cells_that_failed_are_counted_named_and_continued(study, tmp_path, capsys, monkeypatch):
    out, arguments = tmp_path / "out", ["--device", "cpu", "--only", "seed=0"]
    base = Config.load(tmp_path / "base.json")
    base.with_(steps=13).save(tmp_path / "base.json")
    (tmp_path / "mine.py").write_text(
        (tmp_path / "mine.py").read_text().replace("checkpoint_every=0", "checkpoint_every=4")
    )

    def fails(config, folder, *, display, **options):
        def shown(status):
            if status.step == 10 and config.optim.weight_decay == 1.0:
                raise OSError(errno.EIO, "Input/output error")

        return train(config, folder, display=shown, **options)

    train = worker.train
    monkeypatch.setattr(worker, "train", fails)
    assert main(["study", study, "--out", str(out), *arguments]) == 1
    said = capsys.readouterr().out
    assert "AdamW weight_decay=1 seed=0 failed: Input/output error. Check the disk" in said
    assert said.splitlines()[-1] == (
        f"1 of 2 cells failed, in {out}. The same command goes on with them, from their last "
        "checkpoints."
    )
    (kept,) = (out / "work").iterdir()
    assert len(list(kept.glob("checkpoints/*.pt"))) == 2
    seen = []

    def counts(config, folder, *, display, **options):
        return train(config, folder, display=lambda s: seen.append(s.step), **options)

    monkeypatch.setattr(worker, "train", counts)
    assert main(["study", study, "--out", str(out), *arguments]) == 0
    assert "All 2 cells are finished" in capsys.readouterr().out.splitlines()[-1]
    assert seen == [9, 10, 11, 12, 13]
    assert not (out / "work").exists()


def test_a_run_is_deleted_only_after_its_record_is_on_the_disk(study, tmp_path, monkeypatch):
    ledger = begin(tmp_path / "out", study, "tiny")

    def full(path, content):
        raise LabError(f"{path}: No space left on device")

    monkeypatch.setattr(records, "write_text", full)
    with pytest.raises(LabError, match="No space left"):
        Runner(ledger, device="cpu").run()
    (kept,) = (ledger.out / "work").iterdir()
    assert metrics.read(kept)[-1]["step"] == 12
    monkeypatch.undo()
    assert Runner(ledger, device="cpu", only=("seed=0",)).run().left == 0
    assert not (ledger.out / "work").exists()


def test_a_second_command_on_a_study_is_refused_and_a_live_run_is_left_alone(
    study, tmp_path, config, capsys
):
    config.with_(steps=100_000, eval_every=100_000).save(tmp_path / "base.json")
    out = tmp_path / "out"
    again = ["study", study, "--out", str(out), "--device", "cpu"]
    process = start(study, out)
    try:
        process.wait_for(lambda: any(len(metrics.read(f)) > 5 for f in (out / "work").glob("*")))
        for words in (again, [*again, "--only", "seed=0"]):
            assert main(words) == 1
            said = capsys.readouterr()
            assert f"Another command is running the study in {out}" in said.err
            assert "finished" not in said.out
        assert process.runs
        assert len(list((out / "work").glob("*/metrics.jsonl"))) == 1
    finally:
        process.kill()
    assert (out / ".lock").exists()
    config.save(tmp_path / "base.json")  # the lock that the killed process left blocks nothing
    assert Runner(begin(out, study, "tiny"), device="cpu", only=("seed=0",)).run().left == 0


def test_commands_for_some_of_the_cells_run_side_by_side_but_not_on_the_same_cell(study, tmp_path):
    ledger = begin(tmp_path / "out", study, "tiny")
    (cell,) = [
        c for c in ledger.cells(ledger.results()) if c.label == "AdamW weight_decay=1 seed=1"
    ]
    folder = ledger.run_folder(identity(cell.config, ledger.data_of(cell.config)), cell)
    with locked(make_out(ledger) / ".lock", "", shared=True), opened(folder, resume=False):
        assert Runner(ledger, device="cpu", only=("seed=0",)).run().left == 0
        with pytest.raises(Busy, match="Another process is writing to"):
            Runner(ledger, device="cpu", only=("weight_decay=1 seed=1",)).run()
        with pytest.raises(Busy, match="give each its own cells with --only"):
            Runner(ledger, device="cpu").run()


def make_out(ledger) -> Path:
    ledger.out.mkdir()
    return ledger.out


@pytest.mark.slow
def test_the_workers_of_a_killed_study_end_with_it(study, tmp_path, config):
    config.with_(steps=100_000, eval_every=100_000).save(tmp_path / "base.json")
    out = tmp_path / "out"
    process = start(study, out, "--workers", "2")

    def runs() -> list[Path]:
        return [folder for folder in (out / "work").glob("*") if len(metrics.read(folder)) > 5]

    process.wait_for(lambda: len(runs()) == 2)
    process.kill()
    deadline = time.monotonic() + 120
    for folder in runs():
        while time.monotonic() < deadline:
            with contextlib.suppress(Busy), locked(folder / ".lock", "held"):
                break
            time.sleep(0.05)
        with locked(folder / ".lock", "a worker is still running"):
            pass


def test_a_study_that_could_not_start_leaves_nothing_in_the_way(study, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["study", study, "--out", str(out), "--device", "cpu", "--only", "seed=0"]
    assert main([*arguments, "--scale", "small", "--data", str(tmp_path / "nowhere")]) == 1
    assert "is not prepared data" in capsys.readouterr().err
    assert not out.exists()
    assert main(arguments) == 0


def test_ctrl_c_saves_the_cell_that_is_running(study, tmp_path, config):
    config.with_(steps=100_000, eval_every=100_000).save(tmp_path / "base.json")
    out = tmp_path / "out"
    process = start(study, out)
    process.wait_for(lambda: any(len(metrics.read(f)) > 20 for f in (out / "work").glob("*")))
    process.signal(signal.SIGINT)
    ended = process.end()
    assert ended.status == 130
    assert (
        "Stopped (stopped by hand) with 0 cells finished and 4 or more left. To continue, give the "
        "same command again." in ended.out
    )
    assert len(list((out / "work").glob("*/checkpoints/*.pt"))) == 1


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="/proc tells when workers start")
def test_ctrl_c_while_workers_start_stops_the_study_like_any_other(study, tmp_path, config):
    config.with_(steps=100_000, eval_every=100_000).save(tmp_path / "base.json")
    out = tmp_path / "out"
    words = ["study", study, "--out", out, "--device", "cpu", "--workers", "2"]
    process = subprocess.Popen(  # a terminal sends Ctrl-C to all processes of a command
        [sys.executable, "-m", "normcontrol.lab", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers: set[Path] = set()
    while len(workers) < 2 and process.poll() is None:
        with contextlib.suppress(OSError):  # a thread or a process that has just ended
            workers = {
                path
                for task in Path(f"/proc/{process.pid}/task").iterdir()
                for child in (task / "children").read_text().split()
                if b"spawn_main" in (path := Path("/proc", child, "cmdline")).read_bytes()
            }
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=600)
    assert "Traceback" not in errors
    assert "Stopped (stopped by hand) with 0 cells finished" in said
    assert process.returncode == 130


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


def test_on_ray_a_node_finds_data_that_was_given_by_relative_paths(
    study, corpus, tmp_path, monkeypatch
):
    (tmp_path / "node").mkdir()
    (tmp_path / "squares").symlink_to(corpus)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", Ray(tmp_path / "node"))
    words = ["--only", "seed=0", "--data", "squares", "--also-validate", "squares"]
    for out, on in (("local", "local"), ("nodes", "ray")):
        assert main(["study", study, "--out", out, "--device", "cpu", "--on", on, *words]) == 0
    local, nodes = (open_folder(Path(out)).results() for out in ("local", "nodes"))
    assert {i: r.final for i, r in nodes.items()} == {i: r.final for i, r in local.items()}
    assert all("val_loss_squares" in r.final for r in nodes.values())


def test_a_trial_whose_setting_has_no_effect_is_refused_before_anything_is_run(
    study, tmp_path, capsys
):
    path = Path(study.removesuffix(":decays"))
    path.write_text(
        f"{path.read_text()}\ndef rates(scale, done):\n"
        "    return decays(scale, done) + grid('AdamW', BASE, rate=[0.2, 0.3])\n"
    )
    out = tmp_path / "out"
    assert main(["study", f"{path}:rates", "--out", str(out), "--device", "cpu"]) == 1
    assert (
        "AdamW rate=0.2 seed=0: rate=0.2 would have no effect: the norm is not controlled."
        in capsys.readouterr().err
    )
    assert not record_files(out)


def test_a_setting_that_cannot_be_is_refused_before_anything_is_run(config, tmp_path, capsys):
    config.save(tmp_path / "c.json")
    path = tmp_path / "own.py"
    path.write_text(
        "from pathlib import Path\n"
        "from normcontrol.lab.training.config import Config\n"
        "from normcontrol.lab.study.cells import grid\n"
        "def rates(scale, done):\n"
        f"    base = Config.load(Path({str(tmp_path / 'c.json')!r}))\n"
        "    return grid('A', base, lr=[1e-2, -1e-2])\n"
    )
    out = tmp_path / "out"
    assert main(["study", f"{path}:rates", "--out", str(out), "--device", "cpu"]) == 1
    assert capsys.readouterr().err == (
        "normcontrol: A lr=-0.01 seed=0: lr=-0.01: it must be above 0 and finite.\n"
    )
    assert not out.exists()


def test_a_text_that_no_cell_contains_is_refused(study, tmp_path, capsys):
    words = ["study", study, "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main([*words, "--only", "seed=7", "weight-decay"]) == 1
    assert capsys.readouterr().err == (
        "normcontrol: Nothing was run: no cell that is known so far has seed=7 or weight-decay in "
        "its part or name. --list shows the cells.\n"
    )
