"""Tests of the trackers: JSONL, TensorBoard and Weights & Biases log the values of ``norms()``, and
TensorBoard draws norms with their targets."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from small import SmallModel, train
from tracked import charts, history, scalars, wandb_mode

from normcontrol import AdamWN, NormControl, linear
from normcontrol.watch.trackers import (
    JSONL,
    TensorBoard,
    WandB,
    controller,
    layout,
    tensors,
    values,
)


@pytest.fixture
def opt():
    return AdamWN(SmallModel().named_parameters(), lr=1e-2, ratio=linear(1, 2, steps=10), rate=0.2)


def test_the_values_are_those_of_norms(opt):
    train(model := SmallModel(), opt := AdamWN(model.parameters(), lr=1e-2, rate=0.2), range(5))
    reading = opt.norms()["global"]
    assert values(opt) == {
        "norm/global": reading.norm.item(),
        "norm/global/target": reading.target.item(),
        "norm/global/ratio": reading.ratio.item(),
    }


def test_rows_are_logged_as_the_joint_numbers_of_their_tensor():
    model = torch.nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 0, 0, 0], [0, 4.0, 0, 0]]))
    opt = NormControl(
        torch.optim.SGD(model.named_parameters(), lr=0.0), ratio=2.0, rate=1.0, scope="row"
    )
    assert values(opt) == {"norm/weight": 5.0, "norm/weight/target": 10.0, "norm/weight/ratio": 1.0}
    model.weight.grad = torch.ones_like(model.weight)
    opt.step()
    assert values(opt) == pytest.approx(
        {"norm/weight": 10.0, "norm/weight/target": 10.0, "norm/weight/ratio": 2.0}
    )


def test_a_row_that_became_zero_still_counts_in_the_joint_initial_norm():
    weight = torch.nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    opt = NormControl(torch.optim.SGD([weight], lr=1.0), ratio=1.0, rate=1.0, scope="row")
    weight.grad = torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    opt.step()
    (name,) = opt.norms()
    assert values(opt) == {
        f"norm/{name}": 4.0,
        f"norm/{name}/target": 5.0,
        f"norm/{name}/ratio": 0.8,
    }


class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_the_optimizer_is_found_inside_the_wrappers_of_frameworks(opt):
    assert controller(Wrapper(Wrapper(opt))) is opt


def test_an_optimizer_that_controls_nothing_is_refused():
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 2))])
    for given in (adamw, Wrapper(adamw)):  # the user knows AdamW, and not what Trainer puts around
        with pytest.raises(TypeError, match=r"^AdamW controls no norms, so there are none to log"):
            values(given)
    with pytest.raises(TypeError, match=r"^NoneType controls no norms"):
        values(None)


def test_jsonl_appends_a_line_for_each_call(tmp_path, opt):
    for step in (1, 2):
        tracker = JSONL(tmp_path / "new folder" / "metrics.jsonl")
        tracker.log(step, {"loss": 0.5, "device": "cpu", **values(opt)})
        assert tracker.size() == tracker.path.stat().st_size
        tracker.close()
    lines = [json.loads(line) for line in tracker.path.read_text().splitlines()]
    assert lines == [{"step": step, "loss": 0.5, "device": "cpu", **values(opt)} for step in (1, 2)]


@pytest.mark.parametrize("step", [torch.tensor(3), np.int64(3)], ids=["torch", "numpy"])
def test_a_step_may_be_an_array_of_one_number(step, tmp_path):
    trackers = JSONL(tmp_path / "metrics.jsonl"), TensorBoard(tmp_path / "events")
    for tracker in trackers:
        tracker.log(step, {"loss": 0.5})
        tracker.close()
    assert json.loads(trackers[0].path.read_text()) == {"step": 3, "loss": 0.5}
    assert scalars(tmp_path / "events")["loss"] == [(3, 0.5)]


def test_tensorboard_draws_the_norm_with_its_target(tmp_path, opt):
    tracker = TensorBoard(tmp_path)
    tracker.log(1, {"loss": 0.5, "device": "cpu"})
    for step in (1, 2):
        tracker.log(step, values(opt))
    tracker.close()
    drawn = scalars(tmp_path)
    assert set(drawn) == {"loss", *values(opt)}
    assert drawn["norm/global"] == [
        (step, pytest.approx(values(opt)["norm/global"])) for step in (1, 2)
    ]
    assert charts(tmp_path) == {"norm/global": ["^norm/global$", "^norm/global/target$"]}


def test_numbers_of_torch_and_numpy_are_logged_too(tmp_path, opt):
    given = {"loss": torch.tensor(0.5), "lr": np.float32(0.25), **tensors(opt)}
    expected = {"loss": 0.5, "lr": 0.25, **values(opt)}
    tracker, lines = TensorBoard(tmp_path), JSONL(tmp_path / "metrics.jsonl")
    for each in (tracker, lines):
        each.log(1, given)
        with pytest.raises(ValueError, match="'losses' is 3 numbers, and a tracker logs one for"):
            each.log(1, {"losses": torch.ones(3)})
        each.close()
    drawn = {name: value for name, [(_, value)] in scalars(tmp_path).items()}
    assert drawn == pytest.approx(expected)
    assert json.loads(lines.path.read_text()) == {"step": 1, **expected}


def test_tensorboard_hides_what_an_interrupted_run_logged_after_its_checkpoint(tmp_path):
    for start, steps in ((0, range(6)), (3, range(3, 8))):
        if start:
            time.sleep(1.1)  # event files are read in the order of their names: times in seconds
        tracker = TensorBoard(tmp_path, start=start)
        for step in steps:
            tracker.log(step, {"loss": float(10 * start + step)})
        tracker.close()
    assert scalars(tmp_path)["loss"] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        *((step, 30.0 + step) for step in range(3, 8)),
    ]


def test_names_are_escaped_in_the_patterns_of_the_layout():
    names = ["norm/h.0.weight", "norm/h.0.weight/target"]
    (drawn,) = layout(names).values()
    assert drawn == {
        names[0]: ["Multiline", [r"^norm/h\.0\.weight$", r"^norm/h\.0\.weight/target$"]]
    }
    assert layout(["loss", "ratio"]) == {}


def test_wandb_offline(tmp_path, opt):
    with wandb_mode("offline"):
        tracker = WandB("project", dir=str(tmp_path))
        for step in (1, 2):
            tracker.log(step, {"loss": 0.5, "device": "cpu", **values(opt)})
        second = WandB()  # uses the active run, and does not end it
        second.log(3, {"loss": 0.25})
        second.close()
        tracker.log(4, {"loss": 0.125})
        tracker.close()
    rows = history(tmp_path)
    assert [(row["_step"], row["loss"]) for row in rows] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.25),
        (4, 0.125),
    ]
    assert rows[0].items() >= values(opt).items()
    assert "device" not in rows[0]


def test_the_error_of_wandb_says_how_to_log_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**_):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(
        RuntimeError,
        match=r"No API key configured\. To log to the local disk only, set WANDB_MODE=offline",
    ):
        WandB("project", dir=str(tmp_path))


@pytest.mark.parametrize(
    ("module", "make"), [("tensorboard", lambda to: TensorBoard(to)), ("wandb", lambda to: WandB())]
)
def test_a_tracker_that_is_not_installed_is_an_error_with_the_command_to_install_it(
    module, make, tmp_path, monkeypatch
):
    for loaded in [
        name
        for name in sys.modules
        if name.split(".")[0] == module or name.startswith("torch.utils.tensorboard")
    ]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ModuleNotFoundError, match=f"was requested, but is not installed: pip install {module}"
    ):
        make(tmp_path)


def test_importing_the_library_imports_no_framework():
    frameworks = [
        "transformers",
        "accelerate",
        "trl",
        "peft",
        "lightning",
        "timm",
        "wandb",
        "tensorboard",
        "jax",
        "optax",
    ]
    code = f"import sys, normcontrol; print([name for name in {frameworks} if name in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
