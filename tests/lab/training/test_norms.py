"""What a run writes down about its weights, and predictions made from that."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from normcontrol import predict
from normcontrol.lab.study import records as results
from normcontrol.lab.training import checkpoint, metrics
from normcontrol.lab.training import optimizers as optim
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.run_folder import ENVIRONMENT

ROOT = Path(__file__).parents[3]
CLASSES = {"wte", "wpe", "h.*.attn.c_attn", "h.*.attn.c_proj", "h.*.mlp.c_fc", "h.*.mlp.c_proj"}


def evaluated(out):
    return [line for line in metrics.read(out) if "val_loss" in line]


def script():
    spec = importlib.util.spec_from_file_location("predict_runs", ROOT / "benchmarks/predict.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_norms_by_class_are_written_at_every_evaluation(config, tmp_path):
    assert train(config, tmp_path / "run")
    lines = evaluated(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 6, 12]
    assert all({k[5:-7] for k in line if k.startswith("norm/")} == CLASSES for line in lines)
    weights = checkpoint.load(checkpoint.latest(tmp_path / "run/checkpoints"))["model"]
    assert lines[-1]["norm/wte.weight"] == pytest.approx(
        weights["wte.weight"].norm().item(), rel=1e-6
    )
    ratio = next(
        line["ratio"] for line in reversed(metrics.read(tmp_path / "run")) if "ratio" in line
    )
    first, last = (
        math.sqrt(sum(v**2 for k, v in line.items() if k.startswith("norm/")))
        for line in (lines[0], lines[-1])
    )
    assert last / first == pytest.approx(ratio, rel=1e-6)


def test_the_angle_of_a_step_is_written(config, tmp_path):
    config = config.with_(steps=6, eval_every=5, checkpoint_every=5)
    assert train(config, tmp_path / "run")
    before, after = sorted((tmp_path / "run/checkpoints").glob("step-*.pt"))
    flat = [
        torch.cat(
            [w.double().flatten() for w in checkpoint.load(p)["model"].values() if w.dim() > 1]
        )
        for p in (before, after)
    ]
    angle = torch.acos(torch.dot(*flat) / flat[0].norm() / flat[1].norm())
    assert evaluated(tmp_path / "run")[-1]["angle"] == pytest.approx(angle.item(), rel=1e-3)


def test_the_effective_decay_is_written_under_control(config, tmp_path):
    for name, changes in (
        ("AdamW", {}),
        ("AdamWN", {"ratio": 1.0, "ramp": 0}),
        ("AdamC", {"weight_decay": 0.3}),
    ):
        assert train(config.with_(optimizer=name, **changes), tmp_path / name)
    assert "decay" not in evaluated(tmp_path / "AdamW")[-1]  # it has its own
    lr = optim.lr_at(config, 6)
    assert evaluated(tmp_path / "AdamC")[1]["decay"] == pytest.approx(
        0.3 * lr / config.optim.lr, rel=1e-3
    )
    assert evaluated(tmp_path / "AdamWN")[1]["decay"] > 0.3  # weights that would grow are held


def test_predictions_are_made_from_finished_runs(config, tmp_path, monkeypatch, capsys):
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
    script().main()
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


def test_runs_without_norms_by_class_have_one_constant_for_all(config, tmp_path):
    assert train(config.with_(steps=30), tmp_path / "old")
    path = tmp_path / "old/metrics.jsonl"
    lines = [
        {k: v for k, v in line.items() if not k.startswith("norm/")}
        for line in metrics.read(tmp_path / "old")
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = script().compare([tmp_path / "old"])
    assert list(result["constants"]) == [predict.ALL]
    assert result["runs"][0]["all"]["calibrated"]["error"] == pytest.approx(0, abs=1e-5)


def test_a_studys_cells_are_read_too(config, tmp_path):
    for seed in (0, 1):
        for decay in (0.1, 0.5):
            run, folder = (
                config.with_(steps=30, weight_decay=decay, init_seed=seed),
                tmp_path / f"{seed}-{decay}",
            )
            assert train(run, folder)
            environment = json.loads((folder / ENVIRONMENT).read_text())
            results.write(
                tmp_path / "study",
                results.summarise(folder.name, run, environment, metrics.read(folder), 1.0),
                "AdamW",
            )
    found = script().compare([tmp_path / "study"])["runs"]
    assert [run["weight_decay"] for run in found] == [0.5, 0.1]  # one seed of each
    assert (
        found
        == script().compare([tmp_path / "0-0.5", tmp_path / "study/cells/0-0.1.jsonl"])["runs"]
    )


def test_a_run_that_two_studies_share_counts_once_and_two_folders_of_one_name_are_two(
    config, tmp_path
):
    for parent, decay in (("a", 0.1), ("b", 0.5)):
        run, folder = (
            config.with_(steps=30, weight_decay=decay, init_scale=2.0 if parent == "b" else 1.0),
            tmp_path / parent / "run",
        )
        assert train(run, folder)
        environment = json.loads((folder / ENVIRONMENT).read_text())
        for study in ("one", "two"):
            results.write(
                tmp_path / study,
                results.summarise(parent, run, environment, metrics.read(folder), 1.0),
                "AdamW",
            )
    decays = [
        [run["weight_decay"] for run in script().compare(paths)["runs"]]
        for paths in (
            [tmp_path / "one", tmp_path / "two"],
            [tmp_path / "a/run", tmp_path / "b/run"],
        )
    ]
    assert decays == [
        [0.1],
        [0.1, 0.5],
    ]  # a study's scaled start is a control, a run's is what was asked for


def test_other_runs_than_adamws_are_refused(config, tmp_path):
    assert train(config.with_(optimizer="AdamWN"), tmp_path / "run")
    with pytest.raises(SystemExit, match="holds no finished run of AdamW"):
        script().compare([tmp_path / "run"])


@pytest.mark.parametrize(
    ("name", "pairs", "near", "far"), [("tiny", 4, 0.05, 0.05), ("small", 10, 0.14, 0.31)]
)
def test_committed_results_are_as_good_as_the_docs_say(name, pairs, near, far):
    result = json.loads((ROOT / f"results/predict_{name}.json").read_text())
    assert len({(run["lr"], run["weight_decay"]) for run in result["runs"]}) >= pairs
    for run in result["runs"]:
        for kind in ("all", "hidden matrices"):
            for how in ("uncalibrated", "calibrated"):
                assert run[kind][how]["low"] <= run[kind]["measured"] <= run[kind][how]["high"]
        alike = all(run[key] == result["runs"][0][key] for key in ("lr", "steps"))
        assert abs(run["hidden matrices"]["calibrated"]["error"]) < (near if alike else far)
