"""A worker: trains one cell, and continues one that was stopped."""

from __future__ import annotations

from normcontrol.lab.study import worker


def test_a_cell_that_was_stopped_counts_the_time_before_it(config, tmp_path, monkeypatch):
    job = worker.Job("id", "cell", config, tmp_path / "work", tmp_path / "data")
    monkeypatch.setattr(worker, "train", lambda config, out, **options: out.mkdir() or False)
    assert worker.run_cell(job) is None
    (job.folder / worker.SPENT).write_text("1000")
    monkeypatch.undo()
    assert 1000 < worker.run_cell(job).seconds < 2000
    assert not job.folder.exists()
