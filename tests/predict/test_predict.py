"""Prediction of AdamW's norm: the paper's two runs, the recursion itself, its inverses, what it
accepts and what it doubts."""

from __future__ import annotations

import math
import time
import warnings

import pytest
import torch
from small import SmallModel, loss_at, total_norm, train, with_eta
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from normcontrol import AdamWN, NormTrace, constant, linear, lr_times, trace
from normcontrol import predict as p
from normcontrol.groups.classes import TensorClass, classes_of
from normcontrol.predict.learning_rates import learning_rates

WIDTH, LAYERS, WORDS, CONTEXT = 768, 12, 50_304, 1024
PROJECTIONS = LAYERS * 5 * WIDTH**2
GPT2 = [
    TensorClass("others", WORDS * WIDTH + CONTEXT * WIDTH + LAYERS * 7 * WIDTH**2, 0.02),
    TensorClass("c_proj", PROJECTIONS, 0.02 / math.sqrt(2 * LAYERS)),
]


def nanogpt(steps, lr=1e-3, warmup=2000):
    """nanoGPT's learning rates: a linear warm-up, then a cosine to a tenth."""

    def at(t):
        return (
            lr * t / warmup
            if t < warmup
            else lr * (0.55 + 0.45 * math.cos(math.pi * (t - warmup) / (steps - warmup)))
        )

    return at


def recursion(classes, lrs, decay, constants):
    """q <- (1 - lr * decay)^2 q + C * lr^2, written down once more; the joint ratio."""
    squares = [c.rms**2 for c in classes]
    for lr in lrs:
        squares = [
            (1 - lr * decay) ** 2 * q + c * lr**2 for q, c in zip(squares, constants, strict=True)
        ]
    start = sum(c.count * c.rms**2 for c in classes)
    return math.sqrt(sum(c.count * q for c, q in zip(classes, squares, strict=True)) / start)


# The paper's runs


@pytest.mark.parametrize(
    ("steps", "constant", "predicted", "measured"),
    [
        (50_000, 1.0, 2.648, 2.415),
        (50_000, 0.84, 2.427, 2.415),
        (100_000, 1.0, 2.167, 2.0),
        (100_000, 0.84, 1.986, 2.0),
    ],
)
def test_the_two_norms_that_the_paper_measured(steps, constant, predicted, measured):
    prediction = p.adamw(GPT2, nanogpt(steps), 0.1, steps=steps, constants=constant)
    assert round(prediction.ratio, 3) == predicted
    assert prediction.low < measured < prediction.high
    if constant != 1.0:
        assert prediction.ratio == pytest.approx(measured, rel=0.02)
    assert prediction.holds


def test_the_classes_are_those_of_gpt2():
    assert sum(c.count for c in GPT2) == 124_354_560
    assert math.sqrt(sum(c.count * c.rms**2 for c in GPT2)) == pytest.approx(190.2, abs=0.05)


# The recursion and its inverses


def test_every_number_is_that_of_the_recursion():
    classes = [TensorClass("a", 300, 0.02), TensorClass("b", 700, 0.05, tied=False)]
    lrs = [nanogpt(400, 2e-3, 20)(t) for t in range(1, 401)]
    constants = {
        "a": p.Constant(0.7, 0.6, 0.8),
        "b": p.Constant(1.2, 1.0, 1.5),
    }  # and a factor of 2, for another run than theirs
    prediction = p.adamw(classes, lrs, 0.5, constants=constants)
    assert prediction.ratio == pytest.approx(recursion(classes, lrs, 0.5, (0.7, 1.2)), rel=1e-12)
    assert prediction.low == pytest.approx(
        recursion(classes, lrs, 0.5, (0.6 / 2, 1.0 / 2)), rel=1e-12
    )
    assert prediction.high == pytest.approx(
        recursion(classes, lrs, 0.5, (0.8 * 2, 1.5 * 2)), rel=1e-12
    )
    assert prediction.ratios[0] == 1.0
    assert prediction.ratios[100] == pytest.approx(
        recursion(classes, lrs[:100], 0.5, (0.7, 1.2)), rel=1e-12
    )
    assert prediction.ratios[-1] == pytest.approx(prediction.ratio, rel=1e-12)
    start = math.sqrt(sum(c.count * c.rms**2 for c in classes))
    assert prediction.norm == pytest.approx(prediction.ratio * start, rel=1e-12)
    alone = prediction.classes[0]
    assert alone.ratio == pytest.approx(recursion(classes[:1], lrs, 0.5, (0.7,)), rel=1e-12)
    assert alone.rms == pytest.approx(alone.ratio * 0.02, rel=1e-12)


def test_at_a_constant_learning_rate_it_settles_where_the_formula_says():
    lr, decay = 1e-3, 0.2
    end = p.adamw([TensorClass("a", 1, 0.02)], lr, decay, steps=50_000, constants=0.84).classes[0]
    assert end.rms == pytest.approx(math.sqrt(0.84 * lr / (2 * decay)), rel=1e-3)


def test_adamc_settles_at_the_same_norm_whatever_the_learning_rate_does():
    decay = p.decay_for(GPT2, 2.0, nanogpt(50_000), steps=50_000, constants=0.84, method="AdamC")
    assert decay == pytest.approx(0.36, abs=0.01)  # C * lr / (2 * rms^2)
    ratios = p.adamc(GPT2, nanogpt(50_000), decay, steps=50_000, constants=0.84).ratios
    assert ratios[20_000:] == pytest.approx([2.0] * len(ratios[20_000:]), rel=0.01)


@pytest.mark.parametrize("method", ["AdamW", "AdamC"])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5])
def test_the_decay_for_a_ratio_gives_that_ratio(method, ratio):
    classes = [TensorClass("a", 300, 0.02), TensorClass("b", 700, 0.05)]
    lr = linear(2e-3, 1e-4, steps=3000)
    decay = p.decay_for(classes, ratio, lr, steps=3000, method=method)
    predicted = (p.adamw if method == "AdamW" else p.adamc)(classes, lr, decay, steps=3000)
    assert predicted.ratio == pytest.approx(ratio, rel=1e-6)


def test_a_hundred_thousand_steps_take_less_than_a_second():
    lrs = [nanogpt(100_000)(t) for t in range(1, 100_001)]
    start = time.perf_counter()
    p.adamw(GPT2, lrs, 0.1)
    assert time.perf_counter() - start < 1.0
    start = time.perf_counter()
    p.decay_for(GPT2, 2.0, lrs)
    assert time.perf_counter() - start < 5.0


# What is trained on noise is predicted


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
def test_independent_gradients_are_predicted_with_no_constant(beta1):
    model, adamw, noise, recorded = noisy_run(2e-3, 0.5, 600, beta1=beta1)
    predicted = p.adamw(adamw, steps=600)  # its own learning rate and decay
    for _ in range(600):
        model.weight.grad = noise()
        adamw.step()
    assert recorded.ratios[-1] == pytest.approx(predicted.ratio, rel=0.03)
    assert recorded.ratios[-1] > 1.9
    assert p.calibrate(recorded)["weight"].value == pytest.approx(1.0, abs=0.07)


def test_a_run_is_calibrated_to_end_where_it_did():
    model = SmallModel()
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = with_eta(adamw)
    lrs = with_eta(torch.optim.AdamW(model.named_parameters(), lr=1e-2))
    classes = classes_of(model)
    recorded = NormTrace(adamw, every=7)
    train(model, adamw, range(140), scheduler)
    constants = p.calibrate(recorded)
    assert list(constants) == ["embed.weight", "up.weight", "down.weight"]
    with pytest.warns(
        UserWarning,
        match=r"The calibrated C of down.weight is -[\d.]+: gradients shortened it by more than noise",
    ):
        again = p.adamw(classes, lrs, 0.1, steps=140, constants=constants)
    assert again.ratio == pytest.approx(recorded.ratios[-1], rel=1e-6)
    assert again.ratio == pytest.approx(
        total_norm(q for q in model.parameters() if q.dim() > 1) / recorded.norms[0], rel=1e-6
    )
    assert all(c.low <= c.value <= c.high for c in constants.values())
    assert again.low <= again.ratio <= again.high
    assert not again.holds  # these weights start too large to be left alone by the gradients


# What it takes


def test_learning_rates_in_every_form_are_the_same():
    model, steps = SmallModel(), 60
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = linear(1e-2, 1e-3, steps=50)
    values = [schedule(t) for t in range(1, steps + 1)]
    forms = [
        schedule,
        values,
        tuple(values),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64).numpy(),
        lambda t: schedule(t),
        trace(values, range(1, steps + 1)),
        LambdaLR(adamw, lambda i: schedule(i + 1) / 1e-2),
    ]
    for form in forms:
        assert learning_rates(form, steps)[0] == pytest.approx(values, rel=1e-9), form
    assert (
        learning_rates(0.1, 3)
        == learning_rates(constant(0.1), 3)
        == learning_rates(torch.tensor(0.1, dtype=torch.float64), 3)
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda o: CosineAnnealingLR(o, T_max=20, eta_min=1e-4),
        lambda o: OneCycleLR(o, max_lr=0.1, total_steps=31),
        lambda o: SequentialLR(
            o, [LinearLR(o, 0.1, total_iters=5), CosineAnnealingLR(o, T_max=25)], milestones=[5]
        ),
    ],
    ids=["cosine", "one-cycle", "sequential"],
)
def test_a_scheduler_is_asked_and_not_moved(make):
    model = SmallModel()
    adamw = torch.optim.AdamW(
        [{"params": [model.up.weight], "lr": 0.02}, {"params": [model.down.weight]}], lr=0.01
    )
    scheduler = make(adamw)
    before = [dict(g) for g in adamw.param_groups]
    asked = learning_rates(scheduler, 30)
    assert [dict(g) for g in adamw.param_groups] == before
    seen = [[], []]
    for _ in range(30):
        for kept, group in zip(seen, adamw.param_groups, strict=True):
            kept.append(group["lr"])
        adamw.step()
        scheduler.step()
    assert asked == seen


def test_an_optimizers_groups_are_predicted_each_with_its_own_settings():
    model = SmallModel()
    groups = [
        {"params": [("up.weight", model.up.weight)], "weight_decay": 0.5, "lr": 2e-3},
        {"params": [("down.weight", model.down.weight)], "weight_decay": 0.1},
        {"params": [("up.bias", model.up.bias)], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-3)
    both = p.adamw(adamw, steps=300)
    assert [c.weights.name for c in both.classes] == ["up.weight", "down.weight"]
    for c, lr, decay in zip(both.classes, (2e-3, 1e-3), (0.5, 0.1), strict=True):
        assert c.rms == pytest.approx(
            p.adamw([c.weights], lr, decay, steps=300).classes[0].rms, rel=1e-12
        )
    scheduled = p.adamw(adamw, LambdaLR(adamw, lambda i: 1.0), steps=300)
    assert scheduled.ratio == pytest.approx(both.ratio, rel=1e-12)


def test_a_prediction_is_adamwns_ratio():
    torch.manual_seed(0)
    model = SmallModel()
    total, lr = 400, 5e-3
    opt = AdamWN(
        model.parameters(),
        lr=lr,
        ratio=p.adamw(model, lr, weight_decay=2.0, steps=total).final(),
        rate=0.2,
    )  # the one line
    assert isinstance(opt.param_groups[0]["ratio"], linear)
    assert opt.param_groups[0]["ratio"].steps == 20
    train(model, opt, range(total))
    assert opt.norms()["global"].ratio.item() == pytest.approx(
        opt.param_groups[0]["ratio"].end, rel=0.02
    )
    curve = p.adamw(model, lr, 2.0, steps=total).curve(points=50)
    assert isinstance(curve, trace)
    assert (len(curve.values), curve.steps[-1], curve.values[0]) == (51, total, 1.0)


def test_a_prediction_prints_its_numbers_assumptions_and_bounds():
    said = str(p.adamw(GPT2, nanogpt(50_000), 0.1, steps=50_000, constants=0.84))
    assert said.startswith("AdamW after 50,000 steps: 2.427 times the initial norm, from ")
    assert "c_proj" in said
    assert "assumed: each step adds C * lr^2" in said
    assert "bounds: C from 0.23 to 1.5, embeddings from 0" in said
    assert "no embedding is tied to the head: none is known to be" in said
    assert "DOUBTFUL" not in said


# What it doubts


def test_a_tied_embedding_in_a_short_run_is_doubted():
    model = SmallModel()
    with pytest.warns(
        UserWarning,
        match=r"embed.weight is an embedding tied to the head, and the run is short: decay leaves \d+%",
    ):
        short = p.adamw(model, 1e-2, 0.1, steps=200)
    assert not short.holds
    assert "DOUBTFUL: embed.weight" in str(short)
    embedding = next(c for c in short.classes if c.weights.tied)
    assert (embedding.weights.name, embedding.constant.high) == ("embed.weight", 11.0)
    with pytest.warns(UserWarning, match="tied to the head, and the run is short"):
        p.decay_for(model, short.ratio, 1e-2, steps=200)
    measured = {c.weights.name: p.Constant(2.0, 1.5, 2.5) for c in short.classes}
    with pytest.warns(
        UserWarning,
        match="its C was 2 in the run calibrated on, and up to about twice that at half the "
        "learning rate",
    ):
        calibrated = p.adamw(model, 1e-2, 0.1, steps=200, constants=measured)
    assert not calibrated.holds
    assert [c.constant.high for c in calibrated.classes] == pytest.approx(
        [2.5 * 2.8, 2.5 * 2, 2.5 * 2]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert p.adamw(
            model, 1e-2, 1.0, steps=2000
        ).holds  # long: decay has left nothing of the beginning
        assert p.adamw([c for c in classes_of(model) if not c.tied], 1e-2, 0.1, steps=200).holds


def test_tying_by_hand_must_be_said():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))
    assert not any(c.tied for c in classes_of(model))
    assert [c.tied for c in classes_of(model, tied=["0.*"])] == [True, False]
    assert [c.hidden for c in classes_of(model)] == [False, True]
    with pytest.raises(
        ValueError,
        match=r"tied='head.\*' matches no regularised tensor. Names are, for example, 0.weight",
    ):
        classes_of(model, tied=["head.*"])


# What it refuses

ONE = [TensorClass("a", 100, 0.02)]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: p.adamw(ONE, 0.0, 0.1, steps=100),
            r"The learning rate is 0 at every one of the 100 steps: no weight would move",
        ),
        (
            lambda: p.adamw(ONE, lambda t: 0.0, 0.1, steps=5),
            r"The learning rate is 0 at every one of the 5 steps",
        ),
        (
            lambda: p.decay_for(ONE, 2.0, [0.0, 0.0]),
            r"The learning rate is 0 at every one of the 2 steps",
        ),
        (
            lambda: p.adamw(ONE, -1e-3, 0.1, steps=5),
            r"The learning rate is -0.001 at step 1: it must be a number, 0 or more",
        ),
        (lambda: p.adamw(ONE, [1e-3, math.nan], 0.1), r"The learning rate is nan at step 2"),
        (
            lambda: p.adamw(ONE, 1e-3, -0.1, steps=5),
            r"weight_decay=-0.1: decay shortens weights, so it cannot be negative or NaN",
        ),
        (lambda: p.adamw(ONE, 1e-3, math.nan, steps=5), r"weight_decay=nan"),
        (
            lambda: p.adamw(ONE, 0.1, 20.0, steps=5),
            r"weight_decay=20 at a learning rate of 0.1 takes 2 times the weights off in one step",
        ),
        (
            lambda: p.adamw(ONE, 1e-3, 0.1, steps=0),
            r"steps=0: a horizon is a whole number of steps, 1 or more",
        ),
        (lambda: p.adamw(ONE, 1e-3, 0.1), r"steps=None: a horizon is a whole number of steps"),
        (
            lambda: p.adamw(ONE, [1e-3], 0.1, steps=2),
            r"lr holds 1 learning rates, but the run has 2 steps",
        ),
        (
            lambda: p.adamw(ONE, lr_times(0.1), 0.1, steps=2),
            r"follows the learning rate, and so cannot be it",
        ),
        (lambda: p.adamw(ONE, 1e-3, steps=5), r"No weight decay was given, and a model has none"),
        (
            lambda: p.adamw(nn.Linear(3, 3), weight_decay=0.1, steps=5),
            r"No learning rate was given, and a model has none",
        ),
        (
            lambda: p.adamw(nn.LayerNorm(3), 1e-3, 0.1, steps=5),
            r"Nothing is regularised: no trained tensor has two or more dimensions",
        ),
        (lambda: p.adamw([], 1e-3, 0.1, steps=5), r"Nothing is regularised"),
        (
            lambda: p.adamw(nn.Linear(3, 3, device="meta"), 1e-3, 0.1, steps=5),
            r"weight is on the meta device, so it has no norm yet",
        ),
        (
            lambda: p.adamw([TensorClass("a", 9, 0.0)], 1e-3, 0.1, steps=5),
            r"All the weights are zero, so there is no initial norm",
        ),
        (
            lambda: p.adamw(ONE, 1e-3, 0.1, steps=5, constants=0.0),
            r"constants=0.0: C is the mean square that a step of lr 1 adds",
        ),
        (
            lambda: p.adamw(ONE, 1e-3, 0.1, steps=5, constants={"b": p.Constant(1, 1, 1)}),
            r"there is none for a. Calibrate on a run",
        ),
        (
            lambda: p.decay_for(ONE, 9.0, 1e-3, steps=100),
            r"No decay gives a ratio of 9 at the end of 100 steps of AdamW: without any decay",
        ),
        (
            lambda: p.decay_for(ONE, 0.01, 1e-3, steps=100),
            r"No decay gives a ratio of 0.01 .*: with a decay of 1000 it is still 0.05",
        ),
        (
            lambda: p.decay_for(ONE, -1.0, 1e-3, steps=100),
            r"ratio=-1.0: a norm is a positive multiple",
        ),
        (
            lambda: p.calibrate({}),
            r"The trace holds no norms of classes to find constants from: it is empty",
        ),
        (
            lambda: p.adamw([1, 2], 1e-3, 0.1, steps=5),
            r"Give a model, an optimizer, or a list of TensorClass",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_a_sentence(call, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        call()


def test_traces_without_anything_to_calibrate_on_are_refused():
    model = SmallModel()
    with pytest.raises(ValueError, match="is empty: no step that moved it is recorded"):
        p.calibrate(NormTrace(torch.optim.AdamW(model.parameters())))
    controlled = AdamWN(model.parameters(), ratio=1.0)
    recorded = NormTrace(controlled)
    train(model, controlled, range(2))
    with pytest.raises(ValueError, match="or is of an optimizer under norm control"):
        p.calibrate(recorded)


def test_schedulers_and_groups_that_do_not_fit_are_refused():
    model = SmallModel()
    adamw = torch.optim.AdamW(
        [{"params": [model.up.weight], "lr": 0.02}, {"params": [model.down.weight]}], lr=0.01
    )
    with pytest.raises(ValueError, match=r"the groups have different ones: \[0.01, 0.02\]"):
        p.adamw(adamw, 0.1, 0.1, steps=5)
    with pytest.raises(
        ValueError, match="The scheduler is of 2 groups, which do not fit the weights given"
    ):
        p.adamw(model, LambdaLR(adamw, lambda i: 1.0), 0.1, steps=5)
    with pytest.raises(ValueError, match="ReduceLROnPlateau follows the loss"):
        p.adamw(adamw, ReduceLROnPlateau(adamw), 0.1, steps=5)


# The classes


def test_classes_are_by_name_without_numbers_by_shape_and_by_group():
    model = SmallModel()
    assert [c.name for c in classes_of(model)] == ["embed.weight", "up.weight", "down.weight"]
    unnamed = torch.optim.AdamW(model.parameters())
    assert [c.name for c in classes_of(unnamed)] == ["11x8", "16x8", "8x16"]
    apart = [
        {"params": [(f"h.{i}.up", nn.Parameter(torch.ones(2, 2)))], "weight_decay": 0.1 * (i + 1)}
        for i in range(2)
    ]
    assert [c.name for c in classes_of(torch.optim.AdamW(apart))] == [
        "h.*.up, group 0",
        "h.*.up, group 1",
    ]
    sizes = {c.name: (c.count, c.rms) for c in classes_of(model)}
    assert sizes["up.weight"] == (
        128,
        pytest.approx(model.up.weight.square().mean().sqrt().item(), rel=1e-6),
    )


def test_the_loss_is_not_touched_by_asking():
    model = SmallModel()
    before = loss_at(model, 0).item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p.adamw(model, 1e-2, 0.1, steps=10)
    assert loss_at(model, 0).item() == before
