"""Tests of the forms in which learning rates can be given, and of those that are refused."""

from __future__ import annotations

import math

import pytest
import torch
from small import SmallModel
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from normcontrol import constant, linear, lr_times, predict, trace
from normcontrol.groups.classes import TensorClass
from normcontrol.predict.learning_rates import learning_rates

ONE = [TensorClass("a", 100, 0.02)]


def test_learning_rates_are_the_same_in_every_form():
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
def test_a_scheduler_is_simulated_and_does_not_advance(make):
    model = SmallModel()
    adamw = torch.optim.AdamW(
        [{"params": [model.up.weight], "lr": 0.02}, {"params": [model.down.weight]}], lr=0.01
    )
    scheduler = make(adamw)
    before = [dict(g) for g in adamw.param_groups]
    simulated = learning_rates(scheduler, 30)
    assert [dict(g) for g in adamw.param_groups] == before
    seen = [[], []]
    for _ in range(30):
        for values, group in zip(seen, adamw.param_groups, strict=True):
            values.append(group["lr"])
        adamw.step()
        scheduler.step()
    assert simulated == seen


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: predict.adamw(ONE, 0.0, 0.1, steps=100),
            r"The learning rate is 0 at all 100 steps, so no weight would change",
        ),
        (
            lambda: predict.adamw(ONE, lambda t: 0.0, 0.1, steps=5),
            r"The learning rate is 0 at all 5 steps",
        ),
        (
            lambda: predict.decay_for(ONE, 2.0, [0.0, 0.0]),
            r"The learning rate is 0 at all 2 steps",
        ),
        (
            lambda: predict.adamw(ONE, -1e-3, 0.1, steps=5),
            r"The learning rate is -0.001 at step 1: it must be finite, and 0 or more",
        ),
        (lambda: predict.adamw(ONE, [1e-3, math.nan], 0.1), r"The learning rate is nan at step 2"),
        (
            lambda: predict.adamw(ONE, 1e-3, 0.1, steps=0),
            r"steps=0: it is the length of the run, a whole number of steps, 1 or more",
        ),
        (lambda: predict.adamw(ONE, 1e-3, 0.1), r"steps=None: it is the length of the run"),
        *(
            (
                lambda steps=steps: predict.adamw(ONE, 1e-3, 0.1, steps=steps),
                f"steps={steps!r}: it is the length of the run",
            )
            for steps in (math.inf, math.nan, "10", 1.5)
        ),
        (
            lambda: predict.adamw(ONE, [1e-3], 0.1, steps=2),
            r"lr contains 1 learning rates, but the run has 2 steps",
        ),
        (
            lambda: predict.adamw(ONE, lr_times(0.1), 0.1, steps=2),
            r"is a multiple of the learning rate, so it cannot define",
        ),
    ],
)
def test_learning_rates_that_cannot_be_used_are_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize(
    ("lr", "found"),
    [
        ("1e-3", "'1e-3'"),
        (["a"], "'a'"),
        (lambda step: None, "None"),
        (torch.ones(1, 2), r"tensor\(.*\)"),
    ],
)
def test_a_learning_rate_that_is_no_number_is_refused(lr, found):
    with pytest.raises(TypeError, match=f"The learning rate {found} is no number. Give a number"):
        predict.adamw(ONE, lr, 0.1, steps=1)


def test_a_scheduler_that_depends_on_the_loss_is_refused():
    adamw = torch.optim.AdamW(SmallModel().parameters(), lr=0.01)
    with pytest.raises(ValueError, match="ReduceLROnPlateau depends on the loss"):
        predict.adamw(adamw, ReduceLROnPlateau(adamw), 0.1, steps=5)
