"""A target that grows as a random walk with the learning rate's steps."""

from __future__ import annotations

import math

import pytest
import torch

from normcontrol import AdamWN, predict
from normcontrol.schedule import cosine


def lr(step):
    return 1e-2 * min(step / 20, 1 - (step - 20) / 100)


def test_its_square_grows_with_the_squared_learning_rate():
    ratios = predict.growth(1.5, lr, steps=100, points=100)
    total = sum(lr(step) ** 2 for step in range(1, 101))
    assert ratios(0) == 1.0
    assert ratios(100) == 1.5
    for step in range(1, 101):
        grown = ratios(step) ** 2 - ratios(step - 1) ** 2
        assert grown == pytest.approx((1.5**2 - 1) * lr(step) ** 2 / total)


def test_it_is_what_is_predicted_for_adamw_without_decay():
    model = torch.nn.Linear(8, 8)
    predicted = predict.adamw(model, lr, weight_decay=0.0, steps=100)
    grown = predict.growth(predicted.ratio, lr, steps=100)
    assert [grown(step) for step in range(101)] == pytest.approx(predicted.ratios)


def test_it_may_fall_to_a_norm_below_the_initial_one_and_to_zero():
    assert predict.growth(0.5, 1e-3, steps=4)(2) == pytest.approx(math.sqrt(1 - 0.75 / 2))
    assert predict.growth(0.0, 1e-3, steps=4)(4) == 0.0


def test_the_learning_rate_may_be_given_in_every_form_and_be_tiny():
    rates = [lr(step) for step in range(1, 101)]
    by_function = predict.growth(2.0, lr, steps=100)
    assert predict.growth(2.0, rates) == by_function
    assert predict.growth(2.0, [1e-200 * rate for rate in rates])(50) == pytest.approx(
        by_function(50)
    )
    assert predict.growth(2.0, cosine(1.0, 0.0, steps=10), steps=10)(10) == 2.0
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=5)
    assert predict.growth(2.0, scheduler, steps=10) == predict.growth(2.0, [0.05] * 5 + [0.1] * 5)


def test_adamwn_follows_it():
    model = torch.nn.Linear(8, 8)
    opt = AdamWN(model.parameters(), lr=1e-3, ratio=predict.growth(1.5, lr, steps=10), rate=1.0)
    initial = model.weight.norm().item()
    for _ in range(10):
        model(torch.ones(1, 8)).sum().backward()
        opt.step()
    assert model.weight.norm().item() == pytest.approx(1.5 * initial)


@pytest.mark.parametrize("end", [-1.0, math.nan, math.inf, "two", None])
def test_an_end_that_no_norm_can_have_is_refused(end):
    with pytest.raises(ValueError, match="final ratio of the norm"):
        predict.growth(end, 1e-3, steps=10)


def test_a_first_group_that_does_not_move_is_refused():
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in (0.0, 0.1)]
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(groups), factor=1.0)
    with pytest.raises(ValueError, match="first group is 0"):
        predict.growth(2.0, scheduler, steps=10)
