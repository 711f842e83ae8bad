"""Tests of the constants C: their calibration on a recorded run, their bounds, and the doubts about
tied embeddings."""

from __future__ import annotations

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
    assert (embedding.weights.name, embedding.constant.high) == ("embed.weight", 11.0)
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
        [2.5 * 2.8, 2.5 * 2, 2.5 * 2]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert predict.adamw(model, 1e-2, 1.0, steps=2000).holds  # a long run
        assert predict.adamw(
            [c for c in classes_of(model) if not c.tied], 1e-2, 0.1, steps=200
        ).holds


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
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
