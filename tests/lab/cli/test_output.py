"""Output that cannot be written is a sentence, and does not end the work that it tells of."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys

import pytest

from normcontrol.lab.cli.main import main
from normcontrol.lab.study.records import Results
from normcontrol.lab.training import checkpoint


@pytest.fixture
def into_full(capsys, monkeypatch):
    """Calls a command whose output goes to a disk that is full. Returns its error output and
    status."""

    def call(*words):
        with contextlib.suppress(OSError), open("/dev/full", "w") as out:
            monkeypatch.setattr(sys, "stdout", out)
            status = main([str(word) for word in words])
        return capsys.readouterr().err, status

    return call


FULL = (
    "normcontrol: the output: No space left on device. Free some space, then give the same command "
    "again.\n"
)


def test_a_run_ends_and_is_saved_though_nothing_can_be_printed(config, tmp_path, into_full):
    config.save(tmp_path / "run" / "config.json")
    assert into_full("train", "--resume", tmp_path / "run", "--tensorboard") == (FULL, 1)
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert checkpoint.load(newest)["step"] == config.run.steps


def test_a_study_ends_and_is_stored_though_nothing_can_be_printed(study, tmp_path, into_full):
    words = ["study", study, "--out", tmp_path / "out", "--device", "cpu", "--only", "seed=0"]
    assert into_full(*words) == (FULL, 1)
    results = Results.load(tmp_path / "out", lambda config: None)
    assert [record.status for record in results.values()] == ["finished", "finished"]


def test_a_run_and_a_study_end_though_the_reader_of_their_output_has_ended(
    config, study, tmp_path, monkeypatch
):
    """As ``| head`` does, or a terminal that is closed. rich would end the process then."""
    config.save(tmp_path / "run" / "config.json")
    out = tmp_path / "out"
    for words in (
        ["train", "--resume", str(tmp_path / "run")],
        ["study", study, "--out", str(out), "--device", "cpu", "--only", "seed=0"],
    ):
        reader, writer = os.pipe()
        os.close(reader)
        with contextlib.suppress(OSError), open(writer, "w") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            main(words)
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert checkpoint.load(newest)["step"] == config.run.steps
    assert len(Results.load(out, lambda config: None)) == 2


def test_the_end_of_the_process_prints_no_traceback():
    """Python writes at its end what is still to be printed."""
    command = f"{sys.executable} -m normcontrol.lab --help > /dev/full"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=600)
    assert (done.stderr, done.returncode) == (FULL, 1)


def test_a_reader_that_has_ended_is_no_error_of_ours():
    command = f"{sys.executable} -m normcontrol.lab --help | true"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=600)
    assert done.stderr == ""


def test_characters_that_the_encoding_of_the_output_does_not_have_are_escaped(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr("normcontrol.lab.cli.methods.run", lambda args: print("Zürich") or 0)
    assert main(["methods"]) == 0
    assert out.buffer.getvalue() == b"Z\\xfcrich\n"
