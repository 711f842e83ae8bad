"""The numbers of a step: floats where the host may read the norm, tensors elsewhere, and the same
bits in both."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from normcontrol import AdamWN, NormControl, constant, cosine, linear, lr_times, piecewise, trace
from normcontrol.groups.clock import Clock
from normcontrol.groups.sets import AHEAD
from normcontrol.schedule import Schedule, every


def make(dtype=torch.float32, **settings) -> tuple[list[nn.Parameter], NormControl]:
    torch.manual_seed(0)
    shapes = (70, 50), (150, 120), (9,)  # one is summed in blocks, one at once, one is free
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    return params, NormControl(torch.optim.SGD(params, lr=0.1), **settings)


def step(params: list[nn.Parameter], opt: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for p in params:
        p.grad = torch.randn_like(p)
    opt.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("order", ["before", "after"])
def test_floats_and_tensors_give_the_same_bits(dtype, order):
    settings = {"ratio": linear(1.0, 2.0, steps=5), "rate": 0.1, "order": order}
    (ours, host), (theirs, other) = make(dtype, **settings), make(dtype, **settings)
    for seed in range(8):
        other.clock.known = False  # as after a step that may have been skipped
        step(ours, host, seed)
        step(theirs, other, seed)
        assert host.sets[0].on_host
        assert not other.sets[0].on_host
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
        for mine, reference in zip(host.norms()["global"], other.norms()["global"], strict=True):
            assert mine.dtype == torch.float64
            assert torch.equal(mine, reference)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_weights_whose_norm_is_zero_or_not_finite_are_left_alone(bad):
    params, opt = make(norm=1.0, rate=0.5)
    with torch.no_grad():
        for p in params:
            p.fill_(bad)
            p.grad = torch.zeros_like(p)
    opt.step()
    assert opt.sets[0].on_host
    assert opt.norms()["global"].scale.item() == 1.0
    assert torch.equal(params[0].isnan(), torch.full((70, 50), bad != bad))


@pytest.mark.parametrize(
    "settings",
    [
        {"scope": "tensor"},
        {"law": "upper"},
        {"law": "integral"},
        {"start": 2},
        {"relative_step": 0.1},
    ],
)
def test_other_settings_are_computed_with_tensors(settings):
    params, opt = make(**settings)
    step(params, opt, 0)
    assert not opt.sets[0].on_host


def test_a_differentiable_step_is_computed_with_tensors():
    weight = torch.randn(4, 4, requires_grad=True)
    opt = AdamWN([weight.clone()], differentiable=True, foreach=False)
    opt.param_groups[0]["params"][0].grad = torch.ones(4, 4)
    opt.step()
    assert not opt.sets[0].on_host
    assert not opt.norms()["global"].scale.requires_grad


DIFFERENTIABLE = {
    "a rate that follows the learning rate": lambda x: {"rate": lr_times(2.0)},
    "a target that is a function": lambda x: {"norm": lambda step: 2 + x},
    "a rate of some steps": lambda x: {"rate": every(2, 0.3)},
    "a relative step": lambda x: {"relative_step": lr_times(3.0), "rate": 0.1},
    "a least relative step": lambda x: {"min_relative_step": 0.2, "scope": "row"},
    "cautious": lambda x: {"cautious": True},
}


def torch_has_derivatives_by_the_learning_rate() -> bool:
    weight = torch.randn(2, 2, requires_grad=True).clone()
    weight.grad = torch.ones(2, 2)
    lr = torch.tensor(0.1, requires_grad=True)
    try:
        torch.optim.SGD([weight], lr=lr, differentiable=True).step()
    except TypeError:  # such as torch 2.6
        return False
    return True


@pytest.mark.skipif(
    not torch_has_derivatives_by_the_learning_rate(),
    reason=f"the SGD of torch {torch.__version__} itself cannot do it",
)
@pytest.mark.parametrize("settings", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE.keys())
def test_derivatives_pass_through_settings_and_mechanisms(settings):
    """The derivatives by weights, gradients, learning rate and a number of the schedule."""

    def after_two_steps(w, grad, lr, x):
        w = w.clone()
        sgd = torch.optim.SGD([w], lr=lr, differentiable=True)
        opt = NormControl(sgd, **{"norm": 2.0, "rate": 0.3, **settings(x)})
        for factor in (1.0, 0.5):
            w.grad = grad * factor
            opt.step()
        return w

    torch.manual_seed(0)
    w, grad = (torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    lr, x = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.1, 0.5))
    assert torch.autograd.gradcheck(after_two_steps, (w, grad, lr, x))


@pytest.mark.parametrize("start", [2, "every step", "inflection"])
def test_a_start_is_refused_where_derivatives_are_asked_for(start):
    weight = torch.randn(4, 4, requires_grad=True).clone()
    sgd = torch.optim.SGD([weight], lr=0.1, differentiable=True)
    message = (
        f"start={start!r} measures the reference in training, and no derivative is passed through "
        "it, which differentiable=True asks for. Leave out start, or give the target itself, such "
        "as norm=."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        NormControl(sgd, start=start)


def test_clipping_is_refused_where_derivatives_are_asked_for():
    weight = torch.randn(4, 4, requires_grad=True).clone()
    opt = AdamWN([weight], differentiable=True, foreach=False, max_grad_norm=1.0)
    weight.grad = torch.ones(4, 4)
    before = weight.detach().clone()
    with pytest.raises(
        ValueError,
        match=r"max_grad_norm was given, but no derivative is passed through the clipping, which "
        r"differentiable=True asks for\. Clip the gradients yourself before the step\.",
    ):
        opt.step()
    assert torch.equal(weight, before)


SCHEDULES = [
    constant(1.5),
    linear(1.0, 2.0, steps=300),
    cosine(1.0, 2.0, steps=300),
    piecewise((0, 1.0), (10, 2.0), (400, 1.5)),
    trace([1.0, 1.2, 1.6], steps=[0, 200, 10_000]),
    every(3),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_values_from_a_table_are_those_of_the_schedule(schedule: Schedule):
    _, opt = make(ratio=schedule)
    (s,) = opt.sets
    for at in (1, 2, AHEAD - 1, AHEAD, AHEAD + 1, 3 * AHEAD + 5, 1):
        clock = Clock(torch.tensor(at), calls=at)
        assert s.value("ratio", clock, 9.0) == pytest.approx(schedule(at), rel=1e-15)


def test_a_changed_schedule_has_a_table_of_its_own():
    params, opt = make(ratio=linear(1.0, 2.0, steps=10))
    step(params, opt, 0)
    opt.param_groups[0]["control"]["ratio"] = linear(3.0, 5.0, steps=10)
    step(params, opt, 1)
    reading = opt.norms()["global"]
    assert (reading.target / opt.sets[0].unit).item() == pytest.approx(3.4)


def test_a_schedule_of_a_users_class_is_evaluated_at_every_step_as_a_function_is():
    class Switch(Schedule):
        high = 3.0

        def value(self, step):
            return 2.0 if step < 2 else self.high

    schedule = Switch()
    params, opt = make(norm=schedule)
    step(params, opt, 0)
    assert opt.norms()["global"].target.item() == 2.0
    step(params, opt, 1)
    assert opt.norms()["global"].target.item() == 3.0
    schedule.high = 4.0
    step(params, opt, 2)
    assert opt.norms()["global"].target.item() == 4.0
    assert [schedule(at) for at in (1, 2)] == [2.0, 4.0]


@pytest.mark.parametrize("found", [torch.ones(3), None, "2"], ids=repr)
def test_a_schedule_whose_value_is_no_number_is_refused(found):
    class Wrong(Schedule):
        def value(self, step):
            return found

    params, opt = make(norm=Wrong())
    before = [p.clone() for p in params]
    with pytest.raises(ValueError, match=r"norm=.*at step 1: a schedule returns a number"):
        step(params, opt, 0)
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("settings", "found_inf"), [({"start": 1}, None), ({}, 0.0), ({"rate": every(2, 0.1)}, None)]
)
def test_a_rate_is_as_exact_as_the_norms_whatever_the_default_dtype_is(
    settings, found_inf, default
):
    p = nn.Parameter(torch.eye(3, dtype=torch.float64))
    sgd = torch.optim.SGD([p], lr=0.1, fused=True)
    opt = NormControl(sgd, **{"ratio": 2.0, "rate": 0.1, **settings})
    torch.set_default_dtype(default)
    try:
        for _ in range(2):
            p.grad = torch.zeros_like(p)
            if found_inf is not None:
                opt.found_inf = torch.tensor(found_inf, dtype=torch.float32)
            opt.step()
    finally:
        torch.set_default_dtype(torch.float32)
    expected = 1.1 if settings else 2 - 0.9**2
    assert p[0, 0].item() == pytest.approx(expected, rel=1e-15, abs=0)
