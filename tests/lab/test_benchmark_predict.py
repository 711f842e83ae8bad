"""Tests of ``benchmarks/predict.py``, which compares predicted with measured norms: the runs that
it reads, and its committed results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from normcontrol.lab.study import records
from normcontrol.lab.training import metrics
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.run_folder import ENVIRONMENT
from normcontrol.predict import calibration
from normcontrol.predict.calibration import ALL
from normcontrol.watch.trace import EXPONENTS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("predict")


def test_predictions_are_made_from_finished_runs(benchmark, config, tmp_path, monkeypatch, capsys):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, decay in zip(folders, (0.1, 0.5), strict=True):
        assert train(config.with_(weight_decay=decay, steps=30), folder)
    command = [
        "predict.py",
        "--runs",
        *map(str, folders),
        "--json",
        str(tmp_path / "r.json"),
        "--figure",
        str(tmp_path / "r.png"),
    ]
    monkeypatch.setattr("sys.argv", command)
    benchmark.main()
    assert "| all | 30 | 0.01 | 0.5 |" in capsys.readouterr().out
    result = json.loads((tmp_path / "r.json").read_text())
    for kind in ("all", "hidden matrices"):
        assert result["runs"][0][kind]["calibrated"]["error"] == pytest.approx(0, abs=1e-5)
        assert abs(result["runs"][1][kind]["calibrated"]["error"]) < 0.1
    assert (
        "wte.weight is an embedding tied to the head"
        in result["runs"][0]["all"]["uncalibrated"]["doubts"][0]
    )
    assert (tmp_path / "r.png").stat().st_size > 10_000


def test_runs_without_norms_of_classes_have_one_constant_for_all_weights(
    benchmark, config, tmp_path
):
    assert train(config.with_(steps=30), tmp_path / "old")
    path = tmp_path / "old/metrics.jsonl"
    lines = [
        {k: v for k, v in line.items() if not k.startswith("norm/")}
        for line in metrics.read(tmp_path / "old")
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = benchmark.compare([tmp_path / "old"])
    assert list(result["constants"]) == [ALL]
    assert result["runs"][0]["all"]["calibrated"]["error"] == pytest.approx(0, abs=1e-5)


def test_cells_of_a_study_are_read(benchmark, config, tmp_path):
    for seed in (0, 1):
        for decay in (0.1, 0.5):
            run, folder = (
                config.with_(steps=30, weight_decay=decay, init_seed=seed),
                tmp_path / f"{seed}-{decay}",
            )
            assert train(run, folder)
            environment = json.loads((folder / ENVIRONMENT).read_text())
            records.write(
                tmp_path / "study",
                records.summarise(folder.name, run, environment, metrics.read(folder), 1.0),
                "AdamW",
            )
    found = benchmark.compare([tmp_path / "study"])["runs"]
    assert [run["weight_decay"] for run in found] == [0.5, 0.1]  # one seed of each
    assert (
        found
        == benchmark.compare([tmp_path / "0-0.5", tmp_path / "study/cells/0-0.1.jsonl"])["runs"]
    )


def test_a_run_of_two_studies_counts_once_and_two_folders_of_the_same_name_count_twice(
    benchmark, config, tmp_path
):
    for parent, decay in (("a", 0.1), ("b", 0.5)):
        run, folder = (
            config.with_(steps=30, weight_decay=decay, init_scale=2.0 if parent == "b" else 1.0),
            tmp_path / parent / "run",
        )
        assert train(run, folder)
        environment = json.loads((folder / ENVIRONMENT).read_text())
        for study in ("one", "two"):
            records.write(
                tmp_path / study,
                records.summarise(parent, run, environment, metrics.read(folder), 1.0),
                "AdamW",
            )
    decays = [
        [run["weight_decay"] for run in benchmark.compare(paths)["runs"]]
        for paths in (
            [tmp_path / "one", tmp_path / "two"],
            [tmp_path / "a/run", tmp_path / "b/run"],
        )
    ]
    # Runs with a scaled start are skipped in studies, where they are controls.
    assert decays == [[0.1], [0.1, 0.5]]


def test_runs_of_other_methods_are_refused(benchmark, config, tmp_path):
    assert train(config.with_(optimizer="AdamWN"), tmp_path / "run")
    with pytest.raises(SystemExit, match="holds no finished run of AdamW"):
        benchmark.compare([tmp_path / "run"])


def test_the_errors_that_the_law_is_fitted_to_are_those_of_the_library(benchmark, config, tmp_path):
    halves, runs = benchmark.predict_halves, []
    for lr in (0.01, 0.004):
        folder = tmp_path / f"{lr}"
        assert train(config.with_(lr=lr, weight_decay=0.5, steps=30), folder)
        runs += map(benchmark.Run, benchmark.records(folder))
    a, b = runs
    exponents = dict(zip((False, True), EXPONENTS, strict=True))
    for law in (False, True):
        fitted = halves.error(
            a,
            b,
            [c.name for c in b.classes],
            lambda name, law=law: law * exponents[name == "wte.weight"],
        )
        predicted, within = halves.predicted(a, b, "all", law)
        assert predicted == pytest.approx(fitted, abs=1e-5)
    assert within
    # The name that is hashed: another one would change the halves.
    assert halves.name(b).endswith("steps 30, lr 0.004, decay 0.5")


def test_the_law_of_c_is_that_of_the_first_half_and_holds_in_the_second():
    result = json.loads((ROOT / "results/predict_halves.json").read_text())
    fitted = result["fitted"]
    assert (fitted["hidden matrices"], fitted["tied embedding"]) == EXPONENTS
    for row in result["rows"]:
        assert row["law"]["rms"] < row["constant"]["rms"]
        assert row["law"]["outside"] == 0
        if row["kind"] == "all":
            assert row["law"]["rms"] < 0.18
            assert row["constant"]["rms"] > 0.25


def test_the_bounds_of_c_contain_all_measured_ones():
    result = json.loads((ROOT / "results/predict_halves.json").read_text())
    moved, tied_moved = result["widening"]["all runs"]
    assert moved <= calibration.MOVED < moved + 0.15
    assert tied_moved <= calibration.TIED_MOVED < tied_moved + 0.15
    for ranges in result["C"].values():
        for name, (low, high) in ranges.items():
            bounds = calibration.TIED if name == "wte.weight" else calibration.MATRIX
            if name != "wpe.weight":  # embeddings that are not tied have no lower bound but 0
                assert bounds[0] <= round(low, 2) <= high <= bounds[1]


@pytest.mark.parametrize(
    ("name", "pairs", "near", "far"), [("tiny", 4, 0.05, 0.13), ("small", 10, 0.03, 0.26)]
)
def test_committed_results_are_as_accurate_as_the_docs_say(name, pairs, near, far):
    result = json.loads((ROOT / f"results/predict_{name}.json").read_text())
    assert len({(run["lr"], run["weight_decay"]) for run in result["runs"]}) >= pairs
    for run in result["runs"]:
        for kind in ("all", "hidden matrices"):
            for how in ("uncalibrated", "calibrated"):
                assert run[kind][how]["low"] <= run[kind]["measured"] <= run[kind][how]["high"]
        alike = all(run[key] == result["runs"][0][key] for key in ("lr", "steps"))
        assert abs(run["hidden matrices"]["calibrated"]["error"]) < (near if alike else far)
