"""The run folder: what a start that failed leaves, what a resume verifies, and its history."""

from __future__ import annotations

import json
import shutil
import subprocess

import numpy as np
import pytest
import torch

from normcontrol.lab.cli.main import main
from normcontrol.lab.errors import LabError
from normcontrol.lab.files import read_json
from normcontrol.lab.training import checkpoint, loop, run_folder
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.loop import train


def stopped(config, out):
    """A run that was stopped after step 9, and has checkpoints of steps 4 and 8."""

    def interrupt(status):
        if status.step == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, out, display=interrupt)
    return out


@pytest.mark.parametrize(
    "wrong",
    [{"data": "nowhere"}, {"context": 1 << 14, "tokens_per_step": 1 << 14}, {"optimizer": "AdamV"}],
)
def test_a_start_that_failed_leaves_nothing_in_the_way(config, tmp_path, wrong):
    with pytest.raises(LabError):
        train(config.with_(**wrong), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert train(config, tmp_path / "run")


def test_a_start_that_failed_in_a_folder_of_the_user_deletes_nothing(config, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")

    def fail(*args, **options):
        raise LabError("It failed.")

    monkeypatch.setattr(loop, "evaluate", fail)
    with pytest.raises(LabError, match="It failed"):
        train(config, tmp_path / "run")
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    monkeypatch.undo()
    assert train(config, tmp_path / "run")
    assert train(config, tmp_path / "whole")
    one, other = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("run", "whole"))
    assert one == other


def test_checkpoints_without_a_config_are_not_taken_for_those_of_a_new_run(config, tmp_path):
    out = stopped(config, tmp_path / "run")
    (out / "config.json").unlink()
    with pytest.raises(LabError, match=r"contains the checkpoints of a run, but no config.json"):
        train(config.with_(lr=0.5), out)


def test_metrics_that_are_gone_truncated_or_changed_are_refused_on_resume(config, tmp_path):
    out = stopped(config, tmp_path / "run")
    path = out / "metrics.jsonl"
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(LabError, match=r"metrics.jsonl is gone, but had \d+ bytes when the check"):
        train(config, out, resume=True)
    path.write_bytes(content[:100])
    with pytest.raises(LabError, match=r"metrics.jsonl has 100 bytes, but had .* it was truncated"):
        train(config, out, resume=True)
    path.write_bytes(content.replace(b"1", b"2", 1))
    with pytest.raises(LabError, match=r"metrics.jsonl was changed: its first \d+ bytes do not"):
        train(config, out, resume=True)
    path.write_bytes(content)
    assert train(config, out, resume=True)


def test_without_metrics_and_checkpoints_a_run_starts_from_its_first_step(config, tmp_path):
    """As the error for missing metrics says."""
    out = stopped(config, tmp_path / "run")
    for path in (out / "metrics.jsonl", *checkpoint.found(out / "checkpoints")):
        path.unlink()
    assert train(config, out, resume=True)
    assert train(config, tmp_path / "whole")
    one, other = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("run", "whole"))
    assert one == other


def test_a_config_other_than_that_of_the_checkpoint_is_refused(config, tmp_path):
    out = stopped(config, tmp_path / "run")
    config.with_(lr=0.02).save(out / "config.json")
    with pytest.raises(
        LabError, match=r"lr was 0.01 when the checkpoint of step 8 .* and config.json says 0.02"
    ):
        train(Config.load(out / "config.json"), out, resume=True)


def test_the_environment_keeps_the_history_of_resumes(config, tmp_path):
    out = stopped(config, tmp_path / "run")
    assert train(config.with_(micro_batch=4), out, resume=True)
    assert train(config, out, resume=True)
    environment = json.loads((out / "environment.json").read_text())
    assert [e["first_step"] for e in environment["earlier"]] == [1, 9]
    assert environment["first_step"] == 13
    assert all("revision" in e and "earlier" not in e for e in environment["earlier"])


def test_checkpoints_of_earlier_versions_are_resumed(config, tmp_path):
    """They have no checksum of the metrics, and no list of steps that were not finite."""
    out = stopped(config, tmp_path / "run")
    newest = checkpoint.latest(out / "checkpoints")
    state = checkpoint.load(newest)
    del state["logged_sha256"], state["bad"]
    newest.unlink()
    checkpoint.save(newest.parent, state["step"], state)
    content = json.loads((out / "config.json").read_text())
    del content["sha256"]
    (out / "config.json").write_text(json.dumps(content))
    assert train(config, out, resume=True)


@pytest.mark.parametrize(("cores", "threads"), [(2, 2), (1, 1)], ids=["as many", "fewer cores"])
def test_a_resumed_run_has_its_threads_if_there_are_cores_for_them(
    config, tmp_path, monkeypatch, cores, threads
):
    """The rounding of sums depends on their number."""
    monkeypatch.setattr(run_folder, "cores", lambda: cores)
    usual, seen = torch.get_num_threads(), set()
    try:
        torch.set_num_threads(2)
        out = stopped(config, tmp_path / "run")
        torch.set_num_threads(1)
        train(config, out, resume=True, display=lambda _: seen.add(torch.get_num_threads()))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(usual)
    assert seen == {threads}
    assert read_json(out / "environment.json")["threads"] == threads


def test_a_run_whose_data_was_moved_is_continued_with_the_same_data_there(
    config, corpus, tmp_path, capsys
):
    out, moved, changed = stopped(config, tmp_path / "run"), tmp_path / "moved", tmp_path / "other"
    shutil.copytree(corpus, moved)
    changed.mkdir()
    tokens = np.fromfile(corpus / "train-00000.bin", "<u2")
    for name in ("train.bin", "val.bin"):
        tokens[::-1].tofile(changed / name)
    words = ["train", "--resume", str(out), "--data"]
    assert main([*words, str(changed)]) == 1
    assert "is not what" in capsys.readouterr().err
    assert main([*words, str(moved)]) == 0
    assert train(config, tmp_path / "whole")
    one, other = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("run", "whole"))
    assert one == other
    shutil.rmtree(out / "checkpoints")  # it would start again, and would be a run on other data
    assert main([*words, str(changed)]) == 1
    assert "is not what" in capsys.readouterr().err


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A git repository of the user's own, whose environment contains the installed package."""
    package = tmp_path / "project" / ".venv" / "normcontrol"
    package.mkdir(parents=True)
    (package / "run_folder.py").write_text("")
    (package.parents[1] / ".gitignore").write_text(".venv\n")
    who = ("-c", "user.name=one", "-c", "user.email=one@example.org")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "mine")):
        subprocess.run(["git", *words], cwd=package.parents[1], check=True)
    monkeypatch.setattr(run_folder, "__file__", str(package / "run_folder.py"))
    run_folder.revision.cache_clear()
    yield package.parents[1]
    run_folder.revision.cache_clear()


def test_the_revision_is_that_of_the_source_and_not_of_a_project_that_it_is_installed_in(project):
    assert run_folder.revision() == "unknown"
    subprocess.run(["git", "add", "--force", ".venv"], cwd=project, check=True)
    run_folder.revision.cache_clear()
    assert run_folder.revision().endswith("+")  # now it is source of this repository


def test_a_git_that_takes_too_long_does_not_stop_a_run(project, monkeypatch):
    def slow(words, **options):
        raise subprocess.TimeoutExpired(words, 10)

    monkeypatch.setattr(subprocess, "run", slow)
    assert run_folder.revision() == "unknown"
