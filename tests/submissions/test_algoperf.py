"""The AlgoPerf submission on a stub of the benchmark's API: it trains, reaches its norm, resumes."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

FOLDER = Path(__file__).parents[2] / "submissions/algoperf"
STEPS = 40


class Workload:
    """What a submission uses of a workload of AlgoPerf."""

    step_hint = STEPS
    metrics_logger = None

    def model_fn(self, params, augmented_and_preprocessed_input_batch, model_state, mode, rng,
                 update_batch_norm, dropout_rate):  # fmt: skip
        assert mode == "train"
        return params(augmented_and_preprocessed_input_batch["inputs"]), model_state

    def loss_fn(self, label_batch, logits_batch, mask_batch=None, label_smoothing=0.0):
        losses = F.cross_entropy(
            logits_batch, label_batch, reduction="none", label_smoothing=label_smoothing
        )
        count = torch.tensor(float(len(losses)))
        return {"summed": losses.sum(), "n_valid_examples": count, "per_example": losses}


class Log:
    def __init__(self) -> None:
        self.seen: list[dict] = []

    def append_scalar_metrics(self, metrics, global_step) -> None:
        self.seen.append({"step": global_step, **metrics})


@pytest.fixture
def submission(monkeypatch):
    names = "Workload ParameterContainer ModelAuxiliaryState Hyperparameters RandomState"
    names += " OptimizerState ParameterTypeTree Tensor LossType UpdateReturn"
    spec = types.ModuleType("algoperf.spec")
    spec.__dict__.update(dict.fromkeys(names.split(), object))
    spec.ForwardPassMode = types.SimpleNamespace(TRAIN="train", EVAL="eval")
    utils = types.ModuleType("algoperf.pytorch_utils")
    utils.pytorch_setup = lambda: (False, 0, torch.device("cpu"), 1)
    package = types.ModuleType("algoperf")
    package.spec, package.pytorch_utils = spec, utils
    for module in (package, spec, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    found = importlib.util.spec_from_file_location("submission", FOLDER / "submission.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def first_point() -> types.SimpleNamespace:
    """A point of the search space: the first of every list, the smallest of every range."""
    space = json.loads((FOLDER / "tuning_search_space.json").read_text())
    values = {
        k: v["feasible_points"][0] if "feasible_points" in v else v["min"] for k, v in space.items()
    }
    return types.SimpleNamespace(**{**values, "learning_rate": 3e-3, "norm_ratio": 1.5})


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def batches():
    generator = torch.Generator().manual_seed(1)
    while True:
        x = torch.randn(64, 8, generator=generator)
        yield {"inputs": x, "targets": x[:, :4].argmax(1)}


def train(submission, net, state, h, workload, queue, steps) -> None:
    for step in steps:
        batch = submission.data_selection(workload, queue, state, net, None, h, step, None)
        state, net, _ = submission.update_params(
            workload, net, None, None, h, batch, None, state, [], step, None, train_state={}
        )
    submission.prepare_for_eval(workload, net, None, None, h, None, state, [], 0, None)


def norm(net) -> float:
    return torch.cat([p.detach().flatten() for p in net.parameters() if p.dim() > 1]).norm().item()


def test_it_trains_and_its_norm_ends_at_the_target(submission):
    net, h, workload = model(), first_point(), Workload()
    workload.metrics_logger = Log()
    initial = norm(net)
    state = submission.init_optimizer_state(workload, net, None, h, None)
    train(submission, net, state, h, workload, batches(), range(STEPS))
    assert norm(net) / initial == pytest.approx(1.5, rel=0.01)
    seen = workload.metrics_logger.seen
    assert [row["step"] for row in seen] == list(range(11))
    assert seen[-1]["loss"] < seen[0]["loss"]
    assert state["optimizer"].implementation.startswith("torch's foreach")  # no kernels of our own
    assert state["scheduler"].get_last_lr()[0] == pytest.approx(0.0, abs=1e-6)


def test_a_run_that_is_resumed_ends_in_the_same_bits(submission, tmp_path):
    h, workload, whole = first_point(), Workload(), model()
    state = submission.init_optimizer_state(workload, whole, None, h, None)
    queue = batches()
    train(submission, whole, state, h, workload, queue, range(20))
    saved = {k: v.state_dict() for k, v in (("model", whole), *state.items())}
    torch.save({k: saved[k] for k in ("model", "optimizer")}, tmp_path / "half.pt")
    train(submission, whole, state, h, workload, queue, range(20, STEPS))

    resumed = model()
    again = submission.init_optimizer_state(workload, resumed, None, h, None)
    loaded = torch.load(tmp_path / "half.pt", weights_only=True)
    resumed.load_state_dict(loaded["model"])
    again["optimizer"].load_state_dict(loaded["optimizer"])
    again["scheduler"].load_state_dict(saved["scheduler"])
    rest = itertools.islice(batches(), 20, None)
    train(submission, resumed, again, h, workload, rest, range(20, STEPS))
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_module_has_the_functions_of_the_api(submission):
    names = {
        name
        for name, value in vars(submission).items()
        if inspect.isfunction(value) and value.__module__ == "submission"
    }
    assert names == {
        "get_batch_size",
        "init_optimizer_state",
        "update_params",
        "prepare_for_eval",
        "data_selection",
    }
    assert submission.get_batch_size("wmt") == 128
    with pytest.raises(ValueError, match="There is no batch size for the workload 'chess'"):
        submission.get_batch_size("chess")
