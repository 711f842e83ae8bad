"""Tests of the constants C: their calibration on a recorded run, their bounds, and the doubts about
tied embeddings."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
from small import SmallModel, total_norm, train, with_eta
from torch import nn

from normcontrol import AdamWN, NormTrace, predict
from normcontrol.groups.classes import TensorClass, classes_of

ONE = [TensorClass("a", 100, 0.02)]


def noisy_run(lr, decay, steps, shape=(40, 50), beta1=0.9):
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(shape[1], shape[0], bias=False)
    nn.init.normal_(model.weight, std=0.02, generator=generator)
    adamw = torch.optim.AdamW(
        model.named_parameters(), lr=lr, betas=(beta1, 0.99), weight_decay=decay
    )
    return (
        model,
        adamw,
        lambda: torch.randn(model.weight.shape, generator=generator),
        NormTrace(adamw, every=10),
    )


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_independent_gradients_are_predicted_with_c_1(beta1):
    model, adamw, noise, recorded = noisy_run(2e-3, 0.5, 600, beta1=beta1)
    predicted = predict.adamw(adamw, steps=600)  # with the learning rate and decay of the optimizer
    for _ in range(600):
        model.weight.grad = noise()
        adamw.step()
    assert recorded.ratios[-1] == pytest.approx(predicted.ratio, rel=0.03)
    assert recorded.ratios[-1] > 1.9
    assert predict.calibrate(recorded)["weight"].value == pytest.approx(1.0, abs=0.07)


def test_the_calibrated_prediction_of_a_run_ends_at_its_norm():
    model = SmallModel()
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = with_eta(adamw)
    lrs = with_eta(torch.optim.AdamW(model.named_parameters(), lr=1e-2))
    classes = classes_of(model)
    recorded = NormTrace(adamw, every=7)
    train(model, adamw, range(140), scheduler)
    constants = predict.calibrate(recorded)
    assert list(constants) == ["embed.weight", "up.weight", "down.weight"]
    with pytest.warns(
        UserWarning,
        match=r"The calibrated C of down.weight is -[\d.]+: gradients reduced its norm by more than their noise",
    ):
        again = predict.adamw(classes, lrs, 0.1, steps=140, constants=constants)
    assert again.ratio == pytest.approx(recorded.ratios[-1], rel=1e-6)
    assert again.ratio == pytest.approx(
        total_norm(q for q in model.parameters() if q.dim() > 1) / recorded.norms[0], rel=1e-6
    )
    assert all(c.low <= c.value <= c.high for c in constants.values())
    assert again.low <= again.ratio <= again.high
    assert not again.holds  # the initial weights are so large that the gradients reduce them


def test_a_tied_embedding_in_a_short_run_is_doubtful():
    model = SmallModel()
    with pytest.warns(
        UserWarning,
        match=r"embed.weight is an embedding tied to the head, and the run is short: decay leaves \d+%",
    ):
        short = predict.adamw(model, 1e-2, 0.1, steps=200)
    assert not short.holds
    assert "DOUBTFUL: embed.weight" in str(short)
    embedding = next(c for c in short.classes if c.weights.tied)
    assert (embedding.weights.name, embedding.constant.high) == ("embed.weight", 53.0)
    with pytest.warns(UserWarning, match="tied to the head, and the run is short"):
        predict.decay_for(model, short.ratio, 1e-2, steps=200)
    measured = {c.weights.name: predict.Constant(2.0, 1.5, 2.5) for c in short.classes}
    with pytest.warns(
        UserWarning,
        match="its C was 2 in the run calibrated on, and in measured runs it was up to about twice "
        "as large at half the learning rate",
    ):
        calibrated = predict.adamw(model, 1e-2, 0.1, steps=200, constants=measured)
    assert not calibrated.holds
    assert [c.constant.high for c in calibrated.classes] == pytest.approx(
        [2.5 * 3.2, 2.5 * 2.1, 2.5 * 2.1]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert predict.adamw(model, 1e-2, 1.0, steps=2000).holds  # a long run
        assert predict.adamw(
            [c for c in classes_of(model) if not c.tied], 1e-2, 0.1, steps=200
        ).holds


class Agreeing(torch.optim.Optimizer):
    """AdamW on weights that grow by the law: in each step their mean square gets lr^(2 - p)."""

    def __init__(self, params, lr, weight_decay, exponent):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.exponent = exponent

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            left, added = (
                1 - group["lr"] * group["weight_decay"],
                group["lr"] ** (2 - self.exponent),
            )
            for p in group["params"]:
                p.fill_(math.sqrt((left * p[0, 0].item()) ** 2 + added))


def agreeing_run(lr, exponent=0.85, steps=301, decay=0.5):
    """The trace of a run whose C is lr^-exponent in every step, and its learning rates."""
    weight = nn.Parameter(torch.full((10, 10), 0.02, dtype=torch.float64))
    optimizer = Agreeing([("wte", weight)], lr, decay, exponent)
    recorded, lrs = NormTrace(optimizer, every=7), []
    for step in range(steps):
        lrs.append(lr * (1 - 0.9 * step / steps))
        optimizer.param_groups[0]["lr"] = lrs[-1]
        optimizer.step()
    return recorded, lrs


@pytest.mark.parametrize(("tied", "exponent"), [(["w?e"], 0.85), ((), 0.35)])
def test_a_calibrated_c_follows_the_law_of_the_learning_rate(tied, exponent):
    recorded, _ = agreeing_run(1e-2, exponent)
    constants = predict.calibrate(recorded, tied)
    constant = constants["wte"]
    assert constant.exponent == exponent
    assert 1e-3 < constant.lr < 1e-2  # a mean over the run
    assert [constant.at(lr) for lr in (1e-3, 1e-2)] == pytest.approx(
        [lr**-exponent for lr in (1e-3, 1e-2)]
    )
    assert constant.low == pytest.approx(constant.high)  # the same at every step
    classes = [TensorClass("wte", 100, 0.02, tied=bool(tied), hidden=not tied)]
    for lr in (1e-3, 3e-2):  # of another run
        other, lrs = agreeing_run(lr, exponent)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            predicted = predict.adamw(classes, lrs, 0.5, constants=constants)
            assert predicted.ratio == pytest.approx(other.ratios[-1])
            decay = predict.decay_for(classes, predicted.ratio, lrs, constants=constants)
        assert decay == pytest.approx(0.5, rel=1e-6)
        assert f"proportional to lr^-p with p = {exponent}" in predicted.assumptions[1]


def test_a_tied_embedding_that_was_calibrated_as_another_one_is_doubtful():
    recorded, lrs = agreeing_run(1e-2)
    classes = [TensorClass("wte", 100, 0.02, tied=True, hidden=False)]
    with pytest.warns(UserWarning, match=r"was calibrated as one that is not.*tied=\['wte'\]"):
        predict.adamw(classes, 1e-2, 1.0, steps=1000, constants=predict.calibrate(recorded))
    with pytest.warns(UserWarning, match=r"assumed to be proportional to lr\^-0.85"):
        predict.adamw(classes, lrs, 0.5, constants=predict.calibrate(recorded, ["wte"]))


def test_a_trace_saved_without_the_sums_for_the_law_has_a_c_that_does_not_change(tmp_path):
    recorded, _ = agreeing_run(1e-2)
    recorded.save(tmp_path / "run.json")
    content = json.loads((tmp_path / "run.json").read_text())
    for c in content["classes"].values():
        del c["slowed"]  # as earlier versions wrote it
    (tmp_path / "old.json").write_text(json.dumps(content))
    new, old = (
        predict.calibrate(NormTrace.load(tmp_path / name))["wte"]
        for name in ("run.json", "old.json")
    )
    assert (new.exponent, old.exponent) == (0.35, 0.0)
    assert old.value == pytest.approx(new.value)
    assert old.at(1e-3) == old.value


@pytest.mark.parametrize("tied", [[], ["still"]])
def test_a_group_with_a_learning_rate_of_zero_needs_no_constant(tied, recwarn):
    moved, still = (nn.Parameter(torch.full((n, 30), 0.02)) for n in (20, 40))
    groups = [{"params": [("moved", moved)]}, {"params": [("still", still)], "lr": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    recorded = NormTrace(adamw)
    for _ in range(20):
        moved.grad, still.grad = torch.randn(20, 30), torch.randn(40, 30)
        adamw.step()
    constants = predict.calibrate(recorded, tied)
    assert list(constants) == ["moved"]
    with torch.no_grad():
        moved.fill_(0.02)
    again = predict.adamw(adamw, steps=20, constants=constants, tied=tied)
    assert again.norm == pytest.approx(recorded.norms[-1])
    assert again.holds
    assert not recwarn.list
    decay = predict.decay_for(adamw, again.ratio, steps=20, constants=constants, tied=tied)
    assert decay == pytest.approx(0.1)
    adamw.param_groups[1]["lr"] = 1e-2
    with pytest.raises(ValueError, match=r"none for still\. .* its learning rate is above 0, and"):
        predict.adamw(adamw, steps=20, constants=constants)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: predict.calibrate(agreeing_run(1e-2, steps=7)[0], ["head"]),
            r"tied='head' matches no class of the trace. The classes are wte",
        ),
        (
            lambda: predict.adamw(ONE, 1e-3, 0.1, steps=5, constants=0.0),
            r"constants=0.0: C is the mean square that a step with a learning rate of 1 adds",
        ),
        (
            lambda: predict.adamw(
                ONE, 1e-3, 0.1, steps=5, constants={"b": predict.Constant(1, 1, 1)}
            ),
            r"there is none for a. Calibrate on a run",
        ),
        (
            lambda: predict.calibrate({}),
            r"The trace contains no norms of classes to calibrate on: it is empty",
        ),
    ],
)
def test_constants_that_cannot_be_used_are_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize(
    "given",
    ["adamw.json", torch.optim.AdamW(SmallModel().parameters()), {"up": {"norms": [1.0, 2.0]}}],
    ids=["path", "optimizer", "parsed"],
)
def test_what_is_no_trace_is_refused(given):
    sentence = rf"calibrate got a {type(given).__name__}, .*Give one, or NormTrace.load\(path\)"
    with pytest.raises(TypeError, match=sentence):
        predict.calibrate(given)


def test_traces_without_anything_to_calibrate_on_are_refused():
    model = SmallModel()
    with pytest.raises(
        ValueError, match="is empty: it contains no step with a positive learning rate"
    ):
        predict.calibrate(NormTrace(torch.optim.AdamW(model.parameters())))
    controlled = AdamWN(model.parameters(), ratio=1.0)
    recorded = NormTrace(controlled)
    train(model, controlled, range(2))
    with pytest.raises(ValueError, match="or is of an optimizer under norm control"):
        predict.calibrate(recorded)
