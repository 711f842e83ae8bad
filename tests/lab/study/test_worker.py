"""A worker: trains one cell, and continues one that was stopped or failed."""

from __future__ import annotations

import pytest

from normcontrol.lab.errors import Busy, LabError
from normcontrol.lab.files import write_json
from normcontrol.lab.study import worker
from normcontrol.lab.training import checkpoint, loop
from normcontrol.lab.training.run_folder import opened


@pytest.fixture
def job(config, tmp_path):
    return worker.Job("id", "cell", config, tmp_path / "work", tmp_path / "data")


def failing_at(step):
    """A display that fails at a step, as a run can fail at any moment."""

    def show(label, status):
        if status.step == step:
            raise RuntimeError("a cable was pulled")

    return show


def test_a_cell_that_was_stopped_counts_the_time_before_it(job, monkeypatch):
    monkeypatch.setattr(worker, "train", lambda config, out, **options: out.mkdir() or False)
    assert worker.run_cell(job) is None
    write_json(job.folder / worker.SPENT, {"seconds": 1000})
    monkeypatch.undo()
    assert 1000 < worker.run_cell(job).seconds < 2000


def test_a_cell_that_failed_goes_on_from_its_checkpoint(job, tmp_path, config):
    failed = worker.run_cell(job, failing_at(10))
    assert (failed.status, failed.error) == ("failed", "RuntimeError: a cable was pulled")
    assert checkpoint.latest(job.folder / "checkpoints").name.startswith("step-00000008")
    seen = []
    record = worker.run_cell(job, lambda label, status: seen.append(status.step))
    assert seen == [9, 10, 11, 12]
    whole = worker.run_cell(worker.Job("id", "cell", config, tmp_path / "other", tmp_path))
    assert (record.final, record.curves) == (whole.final, whole.curves)
    assert record.seconds > failed.seconds


def test_a_cell_is_kept_until_its_record_is_stored(job):
    assert worker.run_cell(job).good
    assert job.folder.exists()
    worker.discard(job)
    assert not job.folder.exists()


def test_a_cell_that_another_process_is_training_is_left_alone(job):
    worker.run_cell(job, failing_at(10))
    before = sorted(job.folder.rglob("*"))
    with opened(job.folder, resume=True), pytest.raises(Busy, match="Another process is writing"):
        worker.run_cell(job)
    assert sorted(job.folder.rglob("*")) == before


def test_a_cell_goes_on_when_its_data_has_moved(job, config, tmp_path, corpus):
    worker.run_cell(job, failing_at(10))
    moved = tmp_path / "moved"
    moved.symlink_to(corpus)
    seen = []
    elsewhere = worker.Job("id", "cell", config.with_(data=str(moved)), job.folder, job.cache)
    assert worker.run_cell(elsewhere, lambda label, status: seen.append(status.step)).good
    assert seen == [9, 10, 11, 12]


def test_a_run_of_other_settings_in_its_place_is_moved_and_not_deleted(job, config, tmp_path):
    worker.run_cell(job, failing_at(10))
    other = worker.Job("id", "cell", config.with_(lr=0.02), job.folder, job.cache)
    assert worker.run_cell(other).good
    assert checkpoint.latest(tmp_path / "work-earlier-1" / "checkpoints") is not None


def test_a_run_that_diverged_keeps_the_file_that_its_error_names(job, monkeypatch):
    monkeypatch.setattr(loop.torch, "isfinite", lambda value: loop.torch.tensor(False))
    record = worker.run_cell(job)
    assert record.status == "diverged"
    worker.discard(job)
    assert str(job.folder / "not-finite.pt") in record.error
    assert (job.folder / "not-finite.pt").exists()
    assert not (job.folder / "checkpoints").exists()


def test_a_damaged_file_of_a_stopped_cell_makes_it_fail_with_a_sentence(job):
    worker.run_cell(job, failing_at(10))
    for path in (job.folder / "metrics.jsonl", job.folder / "environment.json"):
        content = path.read_bytes()
        path.write_bytes(content.replace(b"0", b"1", 1))
        record = worker.run_cell(job)
        assert record.status == "failed"
        assert f"{path} was changed" in record.error
        path.write_bytes(content)
    assert worker.run_cell(job).good


def test_an_error_of_the_disk_is_a_sentence_in_the_record(job, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(worker, "train", full)
    assert worker.run_cell(job).error == (
        "metrics.jsonl: No space left on device. Free some space, then give the same command again."
    )


def test_a_sentence_is_not_preceded_by_the_name_of_its_class(job, monkeypatch):
    def refuse(*args, **options):
        raise LabError("It cannot be.")

    monkeypatch.setattr(worker, "train", refuse)
    assert worker.run_cell(job).error == "It cannot be."
