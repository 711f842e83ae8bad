"""Tests of the training loop on one CPU process: its results do not depend on micro-batches, on
logging or on interruptions. Also its optimizers, its logs, and its error messages."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from tracked import charts, history, scalars, wandb_mode

from normcontrol import predict
from normcontrol.lab.errors import LabError
from normcontrol.lab.training import checkpoint, loop, metrics
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.loop import evaluate, train
from normcontrol.lab.training.model import GPT
from normcontrol.lab.training.optimizers import lr_at
from normcontrol.lab.training.parallel import World
from normcontrol.lab.training.run_folder import ENVIRONMENT, opened
from normcontrol.schedule import lr_squared_times


def run(config, out, **options):
    assert train(config, out, **options)
    return out


def losses(out, key="loss"):
    return [line[key] for line in metrics.read(out) if key in line]


def weights(out):
    return checkpoint.load(checkpoint.latest(out / "checkpoints"))["model"]


def assert_equal(one, two):
    for name, weight in weights(one).items():
        assert torch.equal(weight, weights(two)[name]), name
    assert (one / "metrics.jsonl").read_bytes() == (two / "metrics.jsonl").read_bytes()


def test_the_loss_falls_and_config_environment_and_metrics_are_written(config, tmp_path):
    out = run(config.with_(steps=40), tmp_path / "run")
    assert losses(out, "val_loss")[-1] < 0.7 * losses(out, "val_loss")[0]
    assert Config.load(out / "config.json") == config.with_(steps=40)
    environment = json.loads((out / ENVIRONMENT).read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert len(environment["data"]["digest"]) == 64
    assert environment["revision"]
    assert metrics.read(out, metrics.TIMING)[-1]["mfu"] == "unknown"


def test_the_micro_batch_changes_nothing(config, tmp_path):
    whole, halves, single = (run(config.with_(micro_batch=m), tmp_path / str(m)) for m in (8, 4, 1))
    assert losses(halves) == pytest.approx(losses(whole), abs=1e-5)
    assert losses(single) == pytest.approx(losses(whole), abs=1e-5)
    assert losses(halves, "val_loss") == pytest.approx(losses(whole, "val_loss"), abs=1e-5)


def test_evaluating_and_logging_more_often_changes_nothing(config, tmp_path):
    seldom, often = (
        run(config.with_(eval_every=n, log_every=n, dropout=0.1), tmp_path / str(n))
        for n in (12, 1)
    )
    for name, weight in weights(seldom).items():
        assert torch.equal(weight, weights(often)[name])


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamWN", "AdamC", "Muon"])
def test_a_stopped_and_resumed_run_ends_in_the_same_bits(config, tmp_path, optimizer):
    config = config.with_(optimizer=optimizer, dropout=0.1)
    whole = run(config, tmp_path / "whole")

    class Stop(Exception):
        pass

    for stop in (6, 9):  # both after metrics that are later than the newest checkpoint

        def interrupt(status, stop=stop):
            if status.step == stop:
                raise Stop

        with pytest.raises(Stop):
            train(config, tmp_path / "parts", resume=stop == 9, display=interrupt)
    run(config, tmp_path / "parts", resume=True)
    assert_equal(whole, tmp_path / "parts")


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "RMSprop", "Adafactor", "adamwn", "Muon"])
def test_optimizers_are_chosen_by_name(config, tmp_path, name):
    out = run(config.with_(optimizer=name, steps=3, lr=1e-3), tmp_path / "run")
    assert all(map(math.isfinite, losses(out)))


def test_the_norm_can_be_controlled_with_any_optimizer(config, tmp_path):
    out = run(config.with_(optimizer="SGD", ratio=1.5, ramp=0, rate=1.0), tmp_path / "run")
    assert losses(out, "ratio")[-1] == pytest.approx(1.5, abs=1e-5)


def test_the_norm_may_grow_as_a_random_walk(config, tmp_path):
    grows = config.with_(optimizer="AdamWN", ratio=1.5, growth="walk", rate=1.0, init_scale=1.2)
    ratios = losses(run(grows.with_(init_scale=1.0), tmp_path / "run"), "ratio")
    steps = config.run.steps
    expected = predict.growth(1.5, [lr_at(grows, step) for step in range(1, steps + 1)])
    assert ratios == pytest.approx([expected(step) for step in range(steps + 1)], abs=1e-4)
    assert losses(run(grows, tmp_path / "scaled"), "ratio")[1:] == pytest.approx(ratios[1:])


def test_ratios_refer_to_the_norm_before_init_scale(config, tmp_path):
    scaled = run(config.with_(init_scale=1.5, steps=3), tmp_path / "adamw")
    assert losses(scaled, "ratio")[0] == pytest.approx(1.5, abs=1e-6)
    controlled = run(
        config.with_(optimizer="AdamWN", init_scale=1.5, ratio=1.5, ramp=0, rate=1.0),
        tmp_path / "adamwn",
    )
    assert losses(controlled, "ratio") == pytest.approx([1.5] * 13, abs=1e-5)


def test_an_unknown_optimizer_is_refused_with_the_nearest_names(config, tmp_path):
    with pytest.raises(LabError, match=r"There is no optimizer 'AdamV'. Did you mean "):
        train(config.with_(optimizer="AdamV"), tmp_path / "run")
    with pytest.raises(LabError, match="LBFGS needs a closure or sparse gradients"):
        train(config.with_(optimizer="LBFGS"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_adamc_at_the_peak_learning_rate_is_adamw_bit_for_bit(config, tmp_path):
    flat = config.with_(warmup=0, schedule="wsd", min_lr=1.0, weight_decay=0.5)
    adamw, adamc = (run(flat.with_(optimizer=name), tmp_path / name) for name in ("AdamW", "AdamC"))
    assert losses(adamc) == losses(adamw)


def test_the_rate_of_adamc_is_the_decay_times_lr_squared_over_the_peak():
    rate = lr_squared_times(0.5, 0.01)
    assert rate.at(torch.tensor(1.0), {"lr": 0.005}) == pytest.approx(0.5 * 0.005**2 / 0.01)


def test_wsd_is_constant_and_then_linear():
    config = Config().with_(schedule="wsd", lr=1.0, warmup=10, steps=100, decay=0.2, min_lr=0.0)
    assert [lr_at(config, step) for step in (1, 10, 50, 80, 90, 100)] == pytest.approx(
        [0.1, 1, 1, 1, 0.5, 0]
    )


def test_a_changed_config_is_refused_on_resume_with_the_field_and_both_values(config, tmp_path):
    run(config, tmp_path / "run")
    with pytest.raises(
        LabError,
        match=r"lr was 0.01 when .* was started, and is 0.02 now: that would be another run",
    ):
        train(config.with_(lr=0.02), tmp_path / "run", resume=True)
    run(config.with_(micro_batch=2), tmp_path / "run", resume=True)


def test_a_run_is_not_overwritten_or_written_by_two_processes(config, tmp_path):
    run(config, tmp_path / "run")
    with pytest.raises(
        LabError, match=r"already contains a run. Resume it with `normcontrol train --resume"
    ):
        train(config, tmp_path / "run")
    with (
        opened(tmp_path / "run", resume=True),
        pytest.raises(LabError, match="Another process is writing to"),
    ):
        train(config, tmp_path / "run", resume=True)


def test_other_data_is_refused_on_resume(config, tmp_path):
    run(config.with_(steps=4), tmp_path / "run")
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    state = checkpoint.load(newest)
    newest.unlink()
    checkpoint.save(newest.parent, 4, {**state, "data": "other"})
    with pytest.raises(LabError, match=r"is not what .* was trained on: its digest differs"):
        train(config.with_(steps=4), tmp_path / "run", resume=True)


class Poison:
    """Patches the model so that the loss of some steps is NaN."""

    def __init__(self, monkeypatch, steps):
        self.calls, forward = 0, GPT.forward

        def poisoned(model, tokens, targets=None):
            loss = forward(model, tokens, targets)
            if model.training:
                self.calls += 1
                if self.calls in steps:
                    return loss * math.nan
            return loss

        monkeypatch.setattr(GPT, "forward", poisoned)


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamWN"])
@pytest.mark.parametrize("early", [False, True])
def test_a_step_that_is_not_finite_is_not_applied_and_is_counted(
    early, optimizer, config, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "steps_early", lambda optimizers, device: early)
    Poison(monkeypatch, {3, 5})
    out = run(config.with_(optimizer=optimizer, checkpoint_every=1), tmp_path / "run")
    assert losses(out, "skipped") == [1, 2]
    assert all(torch.isfinite(weight).all() for weight in weights(out).values())
    state = checkpoint.load(checkpoint.latest(out / "checkpoints"))
    assert state["skipped"] == 2
    assert {int(own["step"]) for own in state["optimizers"][0]["state"].values()} == {10}


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamWN", "AdamH", "CPR-kI0"])
def test_steps_launched_before_the_check_give_the_same_weights(
    optimizer, config, tmp_path, monkeypatch
):
    Poison(monkeypatch, {3})
    late = run(config.with_(optimizer=optimizer), tmp_path / "late")
    monkeypatch.undo()
    Poison(monkeypatch, {3})
    monkeypatch.setattr(loop, "steps_early", lambda optimizers, device: True)
    early = run(config.with_(optimizer=optimizer), tmp_path / "early")
    torch.testing.assert_close(weights(early), weights(late), rtol=1e-6, atol=1e-8)


def test_after_five_such_steps_in_a_row_it_stops_and_saves_the_batches(
    config, tmp_path, monkeypatch
):
    Poison(monkeypatch, range(4, 100))
    with pytest.raises(
        LabError, match=r"not finite in 5 steps in a row, 4 to 8. None of them was applied"
    ):
        train(config, tmp_path / "run")
    record = torch.load(tmp_path / "run" / "not-finite.pt", weights_only=True)
    assert [entry["step"] for entry in record] == [4, 5, 6, 7, 8]
    assert record[0]["tokens"].shape == (8, 32)


def test_a_run_resumed_amid_such_steps_stops_where_it_would_have_stopped(
    config, tmp_path, monkeypatch
):
    Poison(monkeypatch, range(3, 100))

    def interrupt(status):
        if status.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", display=interrupt)
    with pytest.raises(LabError, match="not finite in 5 steps in a row, 3 to 7"):
        train(config, tmp_path / "run", resume=True)


@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="this CPU has bf16 units")
def test_bf16_is_refused_on_a_cpu_without_bf16_units(config, tmp_path):
    with pytest.raises(
        LabError,
        match=r"has no bf16 matrix units and would be slower than in fp32. Use --precision fp32",
    ):
        train(config.with_(precision="bf16"), tmp_path / "run")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error(config, tmp_path):
    with pytest.raises(LabError, match="torch finds no GPU"):
        train(config.with_(device="cuda"), tmp_path / "run")


def test_the_error_for_full_gpu_memory_names_the_setting_to_change(config, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(GPT, "forward", full)
    with pytest.raises(
        LabError, match=r"memory is full at micro_batch=8. Halve the micro-batch, --micro-batch 4"
    ):
        train(config, tmp_path / "run")


def test_tensorboard_on_request(config, tmp_path):
    config = config.with_(tensorboard=True, optimizer="AdamWN")
    out = run(config, tmp_path / "run")
    drawn = scalars(out / "tensorboard")
    lines = [line for line in metrics.read(out) if "ratio" in line]
    assert drawn["ratio"] == [(line["step"], pytest.approx(line["ratio"])) for line in lines]
    assert drawn["ratio/target"] == [
        (step, pytest.approx(min(2.0, 1 + step / 3))) for step in range(1, 13)
    ]
    assert charts(out / "tensorboard") == {"ratio": ["^ratio$", "^ratio/target$"]}


def test_wandb_on_request_is_one_run_even_when_resumed(config, tmp_path):
    config = config.with_(wandb="project", optimizer="AdamWN", steps=4)
    with wandb_mode("offline"):
        out = run(config, tmp_path / "run")
        logged = {row["_step"]: row for row in history(out)}
        for line in metrics.read(out):
            assert logged[line.pop("step")].items() >= line.items()
        run(config, out, resume=True)
    identity = (out / "wandb-id").read_text()
    assert {path.name for path in out.glob("wandb/offline-run-*/run-*")} == {
        f"run-{identity}.wandb"
    }


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_an_error(config, tmp_path, monkeypatch, name):
    modules = __import__("sys").modules
    for loaded in [m for m in modules if m.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(modules, loaded)
    monkeypatch.setitem(modules, name, None)
    with pytest.raises(LabError, match=f"pip install {name}"):
        train(config.with_(tensorboard=True, wandb="project"), tmp_path / "run")


def test_evaluation_is_the_mean_over_all_windows_whatever_the_micro_batch():
    config = Config().with_(layers=1, heads=1, width=16, context=8).model
    model = GPT(config, vocab=64)
    model.initialise(0)
    windows = [np.random.default_rng(i).integers(0, 64, 9) for i in range(7)]
    alone = [
        float(model(torch.tensor(w[None, :-1]), torch.tensor(w[None, 1:])).detach())
        for w in windows
    ]
    for micro in (1, 3, 7, 16):
        seen = evaluate(
            model,
            windows,
            micro,
            World(),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
        )
        assert seen == pytest.approx(sum(alone) / 7, abs=1e-6)
