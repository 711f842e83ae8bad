"""Replays: the same bits on a CPU, the noise of seeds on a GPU."""

from __future__ import annotations

import math
from pathlib import Path

import fakes
import pytest

from normcontrol.lab.cli.main import main
from normcontrol.lab.errors import LabError
from normcontrol.lab.study import records
from normcontrol.lab.study.cells import grid
from normcontrol.lab.study.evidence import Evidence
from normcontrol.lab.study.replay import Comparison, seed_noise
from normcontrol.lab.training.config import Config


def test_a_replay_gives_the_same_bits_and_notices_when_it_does_not(
    study, tmp_path, capsys, quick_workers
):
    out = tmp_path / "out"
    main(["study", study, "--out", str(out), "--device", "cpu", "--only", "weight_decay=0.1"])
    assert main(["study", "--replay", str(out), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert said.count("the same, bit for bit") == 2
    assert "All cells gave the same results." in said
    path = sorted((out / "cells").glob("*.jsonl"))[0]
    record = records.read(path)
    assert str(Path(record.config["data"]).parent) == "."  # without the folder on this machine
    record.final["val_loss"] += 1e-12
    record.curves["val_loss"][1][-1] += 1e-12
    records.write(out, record, "x")
    assert main(["study", "--replay", str(out), "--device", "cpu", "--workers", "2"]) == 1
    said = capsys.readouterr().out
    assert said.count("the same, bit for bit") == 1  # workers have other numbers of threads
    assert "another result, -1.00e-12 in validation loss" in said
    assert "1 cells differ." in said
    path.write_text(path.read_text().replace("finished", "finishes"))
    assert main(["study", "--replay", str(out), "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert f"{path} cannot be read" in said
    assert "All other cells gave the same results. 1 records cannot be read." in said
    assert main(["study", "--replay", str(out), "--limit-minutes", "1"]) == 1
    assert (
        "A replay runs what its folder says, on this machine and to its end"
        in capsys.readouterr().err
    )


def test_on_a_cpu_every_loss_must_be_the_same_and_measurements_need_not():
    (cell,) = grid("A", Config())
    before, now = fakes.record(cell, 3.0), fakes.record(cell, 3.0, ratio=1.9)
    assert before.curves["ratio"] != now.curves["ratio"]
    assert Comparison("A", before, now, None).same
    now.curves["grad_norm"][1][2] += 1e-15
    assert not Comparison("A", before, now, None).same
    assert not Comparison("A", before, fakes.record(cell, 3.1), None).same


def test_a_replay_on_a_gpu_is_compared_with_the_noise_of_seeds():
    cells = grid("A", Config(), seeds=[0, 1])
    before = [fakes.record(cell, loss) for cell, loss in zip(cells, (3.0, 3.02), strict=True)]
    done = records.Results(lambda config: fakes.DATA, before)
    noise = seed_noise(Evidence(cells, done))
    assert noise == pytest.approx(0.02 / 2**0.5)
    assert Comparison("A", before[0], fakes.record(cells[0], 3.02), noise).same
    assert not Comparison("A", before[0], fakes.record(cells[0], 3.05), noise).same
    assert not Comparison("A", before[0], fakes.record(cells[0], math.inf), noise).same
    with pytest.raises(LabError, match="No trial has several seeds"):
        seed_noise(Evidence(cells[:1], done))
