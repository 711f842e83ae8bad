"""Studies: cells that are told apart by what they compute, never run twice, and kept whatever
becomes of them."""

from __future__ import annotations

import io
import json
import math
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import fakes
import pytest
import torch

from normcontrol.lab.cli import study as study_command
from normcontrol.lab.cli.main import main
from normcontrol.lab.errors import LabError
from normcontrol.lab.report import study_display
from normcontrol.lab.study import records as results
from normcontrol.lab.study import runner
from normcontrol.lab.study.cells import Data, Study, grid, identity, load
from normcontrol.lab.study.claims import Evidence
from normcontrol.lab.study.ledger import begin, open_folder
from normcontrol.lab.study.replay import Comparison, seed_noise
from normcontrol.lab.study.runner import Runner
from normcontrol.lab.training import metrics
from normcontrol.lab.training.config import Config, Model
from normcontrol.lab.training.loop import Status, train
from normcontrol.lab.training.model import GPT
from normcontrol.lab.training.warm import Warm

DATA = Data("digest")


@pytest.fixture
def study(config, tmp_path):
    """A study of two arms and two seeds, in a file of its own."""
    path = tmp_path / "mine.py"
    config.save(tmp_path / "base.json")
    path.write_text(
        textwrap.dedent(f"""
        from pathlib import Path
        from normcontrol.lab.training.config import Config
        from normcontrol.lab.study.cells import grid

        BASE = Config.load(Path({str(tmp_path / "base.json")!r})).with_(checkpoint_every=0)

        def decays(scale, done):
            "Two decays against one ratio."
            first = grid("AdamW", BASE, weight_decay=[0.1, 1.0], seeds=[0, 1])
            if not done.done(first):
                return first
            best = done.best(first)
            return first + grid("AdamWN", BASE.with_(optimizer="AdamWN", lr=best.config.optim.lr), ratio=[1.5], seeds=[0, 1])

        def spoiled(scale, done):
            return grid("AdamW", BASE, lr=[1e-2]) + grid("AdamW", BASE.with_(context=33), lr=[2e-2])
        """)
    )
    return f"{path}:decays"


def files(out):
    return {path.name: path.stat().st_mtime_ns for path in (out / "cells").glob("*.jsonl")}


def test_a_study_from_a_file_runs_all_cells_the_later_ones_chosen_by_the_earlier(
    study, tmp_path, capsys
):
    out = tmp_path / "out"
    assert main(["study", study, "--out", str(out), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "6/6  AdamWN ratio=1.5 seed=1: val_loss" in said
    assert "All 6 cells are finished" in said
    assert len(files(out)) == 6
    assert not (out / "work").exists()
    ledger = open_folder(out)
    done = ledger.results()
    for cell in ledger.cells(done):
        record = done.of(cell)
        assert record.good
        assert record.curves["val_loss"][0] == [0, 6, 12]
        assert record.curves["ratio"][1][-1] == record.final["ratio"]
        assert record.environment["data"]["digest"] == next(iter(ledger.digests.values())).digest
    before = files(out)
    assert main(["study", study, "--out", str(out), "--device", "cpu"]) == 0
    assert files(out) == before


def test_a_record_is_small_and_says_nothing_of_the_machines_folders(study, tmp_path):
    out = tmp_path / "out"
    Runner(begin(out, study, "tiny"), device="cpu", only=("seed=0",)).run()
    path = next((out / "cells").glob("*.jsonl"))
    assert path.stat().st_size < 8000
    head = json.loads(path.read_text().splitlines()[0])
    assert str(tmp_path) not in json.dumps(head["environment"]["data"])


def test_several_workers_give_the_same_numbers_as_one(study, tmp_path):
    one, two = (begin(tmp_path / str(n), study, "tiny") for n in (1, 2))
    assert Runner(one, device="cpu", workers=1).run().left == 0
    assert Runner(two, device="cpu", workers=2).run().left == 0
    assert {i: (r.final, r.curves) for i, r in one.results().items()} == {
        i: (r.final, r.curves) for i, r in two.results().items()
    }


def test_a_killed_study_goes_on_where_it_was(study, tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "normcontrol.lab",
        "study",
        study,
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    process = subprocess.Popen(command)
    while process.poll() is None and len(files(out)) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = files(out)
    assert Runner(begin(out, study, "tiny"), device="cpu").run().left == 0
    after = files(out)
    assert {name: after[name] for name in before} == before
    assert len(after) == 6


def test_no_cell_is_started_that_would_not_end_in_time(study, tmp_path, monkeypatch):
    ledger = begin(tmp_path / "out", study, "tiny")
    monkeypatch.setattr(Runner, "_expected", lambda self, config: 100.0 if self._speeds else 0.0)
    outcome = Runner(ledger, device="cpu", limit_minutes=1.5).run()
    assert (outcome.done, outcome.stopped) == (1, "the time is up")
    monkeypatch.undo()
    assert Runner(ledger, device="cpu", limit_minutes=5).run().left == 0


def test_only_some_cells(study, tmp_path):
    ledger = begin(tmp_path / "out", study, "tiny")
    Runner(ledger, device="cpu", only=("weight_decay=1 ",)).run()
    assert {r.config["weight_decay"] for r in ledger.results().values()} == {1.0}


def test_two_studies_do_not_mix(study, tmp_path, config, capsys):
    out = tmp_path / "out"
    begin(out, study, "tiny")
    with pytest.raises(
        LabError, match="holds another study: its scale was 'tiny' and is 'small' now"
    ):
        begin(out, study, "small")
    with pytest.raises(LabError, match="holds another study: its study was "):
        begin(out, study.replace("decays", "spoiled"), "tiny")


def test_other_data_under_the_same_name_is_refused_and_the_same_data_elsewhere_is_not(
    study, tmp_path, corpus
):
    out = tmp_path / "out"
    Runner(begin(out, study, "tiny", str(corpus)), device="cpu", only=("seed=0",)).run()
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in corpus.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    ledger = begin(out, study, "tiny", str(moved))
    cell = ledger.cells(ledger.results())[0]
    assert ledger.results().of(cell) is not None
    manifest = json.loads((moved / "manifest.json").read_text())
    manifest["splits"]["val"]["shards"] = manifest["splits"]["train"]["shards"][:1]
    (moved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(LabError, match="the same study on other data"):
        begin(out, study, "tiny", str(moved))


def test_failed_runs_are_kept_and_tried_again_and_diverged_ones_are_kept(
    study, tmp_path, monkeypatch
):
    ledger = begin(tmp_path / "out", study.replace("decays", "spoiled"), "tiny")
    Runner(ledger, device="cpu").run()
    statuses = sorted((r.status, r.error[:15]) for r in ledger.results().values())
    assert statuses == [("failed", "tokens_per_step"), ("finished", "")]

    def nan(*args, **options):
        raise LabError("The loss or gradient was not finite in 5 steps in a row")

    monkeypatch.setattr(runner, "train", nan)
    Runner(ledger, device="cpu").run()
    assert sorted(r.status for r in ledger.results().values()) == ["diverged", "finished"]
    monkeypatch.setattr(runner, "train", None)  # would fail if anything were run again
    assert Runner(ledger, device="cpu").run().left == 0


def test_a_run_that_learned_nothing_has_diverged():
    lines = [{"step": 0, "val_loss": 3.0, "ratio": 1.0}, {"step": 9, "val_loss": 3.5}]
    assert results.summarise("x", Config(), {}, lines, 1.0).status == "diverged"


def test_a_corrupt_record_is_named_and_left_out(study, tmp_path):
    out = tmp_path / "out"
    ledger = begin(out, study, "tiny")
    Runner(ledger, device="cpu", only=("seed=0",)).run()
    path = sorted((out / "cells").glob("*.jsonl"))[0]
    path.write_text(path.read_text()[:-40])
    done = ledger.results()
    assert len(done) == len(files(out)) - 1
    assert len(done.problems) == 1
    assert f"{path} cannot be read" in done.problems[0]
    Runner(ledger, device="cpu", only=("seed=0",)).run()
    assert ledger.results().problems == []


def test_a_cell_is_what_it_computes_and_nothing_else():
    config = Config()
    same = config.with_(
        micro_batch=1, device="cpu", compile=False, checkpoint_every=0, data="elsewhere"
    )
    assert identity(config, DATA) == identity(same, DATA)
    others = [
        config.with_(lr=2e-3),
        config.with_(init_seed=1),
        config.with_(scope="tensor"),
        config.with_(eval_every=7),
    ]
    names = {
        identity(config, DATA),
        identity(config, Data("other")),
        identity(config, Data("digest", {"owt": "x"})),
    }
    assert len(names | {identity(other, DATA) for other in others}) == 7


def test_warm_runs_compute_the_same_bits_as_fresh_ones(config, tmp_path):
    warm = Warm()
    for i, changes in enumerate(
        [
            {"optimizer": "AdamWN"},
            {"init_seed": 3, "init_scale": 1.5},
            {"optimizer": "AdamC"},
            {"width": 16},
        ]
    ):
        one = config.with_(**changes, dropout=0.1)
        assert train(one, tmp_path / f"warm-{i}", warm=warm)
        assert train(one, tmp_path / f"fresh-{i}")
        assert (tmp_path / f"warm-{i}/metrics.jsonl").read_bytes() == (
            tmp_path / f"fresh-{i}/metrics.jsonl"
        ).read_bytes()


def test_models_of_one_shape_are_compiled_once(monkeypatch):
    graphs, real = [], torch.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda model, **options: real(model, backend=backend, **options)
    )
    warm, tokens = Warm(), torch.randint(0, 64, (2, 8))
    for seed in range(3):
        fresh = GPT(Model(layers=1, heads=1, width=8, context=8, init_seed=seed), vocab=64)
        fresh.initialise(seed)
        model = warm.place(fresh, torch.device("cpu"))
        compiled, adam = warm.compiled(model), torch.optim.AdamW(model.parameters())
        for _ in range(2):
            compiled(tokens, tokens).backward()
            adam.step()
            adam.zero_grad()
    assert len(graphs) == 1


def test_other_data_is_validated_on_at_the_end(config, corpus, tmp_path):
    import numpy as np

    assert train(config.with_(also_validate=(str(corpus),)), tmp_path / "run")
    last = metrics.read(tmp_path / "run")[-1]
    assert last["val_loss_data"] == pytest.approx(last["val_loss"], abs=1e-12)
    (tmp_path / "other").mkdir()
    np.arange(100).astype("<u2").tofile(tmp_path / "other/val.bin")
    with pytest.raises(
        LabError, match=r"holds tokens of gpt2, and the model is trained on tokens of bytes"
    ):
        train(config.with_(also_validate=(str(tmp_path / "other"),)), tmp_path / "two")
    with pytest.raises(LabError, match=r"There is no manifest.json and no val.bin in"):
        train(config.with_(also_validate=(str(tmp_path),)), tmp_path / "three")


def test_under_torchrun_a_study_is_refused(study, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["study", study]) == 1
    assert (
        "A study gives each run one process, and torchrun started several"
        in capsys.readouterr().err
    )


def test_an_unknown_study_is_refused(tmp_path, study):
    with pytest.raises(LabError, match=r"There is no study 'claim'. Did you mean claims\?"):
        load("claim")
    with pytest.raises(LabError, match=r"has no function 'decay'. Did you mean decays\?"):
        load(study[:-1])
    with pytest.raises(LabError, match=r"There is no file 'nowhere.py'"):
        load("nowhere.py:f")
    assert isinstance(load(study), Study)


def test_a_grid_is_every_combination_with_paired_seeds():
    cells = grid("A", Config(), lr=[1e-3, 2e-3], weight_decay=[0.1, 0.2], seeds=[0, 5])
    assert len({cell.label for cell in cells}) == 8
    assert all(c.config.model.init_seed == c.config.data.data_seed == c.seed for c in cells)


def test_a_replay_gives_the_same_bits_and_notices_when_it_does_not(study, tmp_path, capsys):
    out = tmp_path / "out"
    main(["study", study, "--out", str(out), "--device", "cpu", "--only", "weight_decay=0.1"])
    assert main(["study", "--replay", str(out), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert said.count("the same, bit for bit") == 2
    assert "All are what they were." in said
    path = sorted((out / "cells").glob("*.jsonl"))[0]
    record = results.read(path)
    assert (
        str(Path(record.config["data"]).parent) == "."
    )  # a record names its data, and not where on this machine it lies
    record.final["val_loss"] += 1e-12
    results.write(out, record, "x")
    assert main(["study", "--replay", str(out), "--device", "cpu", "--workers", "2"]) == 1
    said = capsys.readouterr().out
    assert said.count("the same, bit for bit") == 1  # whatever the threads of the workers
    assert "another result, -1.00e-12 in validation loss" in said
    with pytest.raises(
        LabError, match="A replay is of what its folder says, on this machine and to its end"
    ):
        study_command.study(["--replay", str(out), "--limit-minutes", "1"])


def test_a_replay_on_a_gpu_is_held_against_the_noise_of_seeds():
    cells = grid("A", Config(), seeds=[0, 1])
    records = [fakes.record(cell, loss) for cell, loss in zip(cells, (3.0, 3.02), strict=True)]
    done = results.Results(lambda config: fakes.DATA, records)
    noise = seed_noise(Evidence(cells, done))
    assert noise == pytest.approx(0.02 / 2**0.5)
    assert Comparison("A", records[0], fakes.record(cells[0], 3.02), noise).same
    assert not Comparison("A", records[0], fakes.record(cells[0], 3.05), noise).same
    assert not Comparison("A", records[0], fakes.record(cells[0], math.inf), noise).same
    with pytest.raises(LabError, match="No trial has several seeds"):
        seed_noise(Evidence(cells[:1], done))


@pytest.mark.slow
def test_on_ray_the_numbers_are_those_of_a_local_run(study, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    here, there = (begin(tmp_path / name, study, "tiny") for name in ("local", "ray"))
    Runner(here, device="cpu", only=("seed=0",)).run()
    Runner(there, device="cpu", only=("seed=0",), on="ray", workers=2).run()
    assert len(there.results()) == 2
    assert {i: (r.final, r.curves) for i, r in here.results().items()} == {
        i: (r.final, r.curves) for i, r in there.results().items()
    }


def test_ctrl_c_saves_the_cell_that_is_under_way(study, tmp_path, config):
    config.with_(steps=100_000, eval_every=100_000).save(tmp_path / "base.json")
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "normcontrol.lab",
        "study",
        study,
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while process.poll() is None and not any(
        len(metrics.read(folder)) > 20 for folder in (out / "work").glob("*")
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (
        "Stopped (stopped by hand) with 0 cells finished and 4 or more left. The same command goes "
        "on." in said
    )
    assert len(list((out / "work").glob("*/checkpoints/*.pt"))) == 1


def test_a_cell_that_was_stopped_counts_the_time_before_it(config, tmp_path, monkeypatch):
    job = runner.Job("id", "cell", config, tmp_path / "work", tmp_path / "data")
    monkeypatch.setattr(runner, "train", lambda config, out, **options: out.mkdir() or False)
    assert runner.run_cell(job) is None
    (job.work / runner.SPENT).write_text("1000")
    monkeypatch.undo()
    assert 1000 < runner.run_cell(job).seconds < 2000
    assert not job.work.exists()


def test_the_live_table_fills_in():
    rich = pytest.importorskip("rich.console")
    live = study_display.Live()
    one, two = grid("AdamW", Config(), lr=[1e-3], seeds=[0, 1])
    live.show(two.label, Status(5, 10, 3.5, 1.2, None, None, 1e3, None))
    live.finished(one, fakes.record(one, 3.25), 1, 2)
    console = rich.Console(record=True, width=120, file=io.StringIO())
    console.print(live.table())
    text = console.export_text()
    assert "1 of 2 cells known so far" in text
    assert re.search(r"AdamW lr=0.001 +3.2500", text)
    assert "AdamW lr=0.001 seed=1: 5/10, loss 3.500" in text
