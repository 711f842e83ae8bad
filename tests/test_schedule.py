"""Schedules: their values, their plots, their checks, and how a norm follows them."""

import math
import sys
import warnings

import matplotlib
import numpy as np
import pytest
import torch
from schedule_examples import SCHEDULES
from small import SmallModel, total_norm, train

from normcontrol import (
    AdamWN,
    NormControl,
    Schedule,
    constant,
    cosine,
    eta_times,
    every,
    linear,
    lr_squared_times,
    lr_times,
    paper_ratio,
    piecewise,
    trace,
)
from normcontrol.custom_schedule import custom

matplotlib.use("Agg")


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (constant(0.3), {0: 0.3, 1: 0.3, 10**9: 0.3}),
        (linear(1.0, 2.0, steps=2500), {0: 1.0, 625: 1.25, 2500: 2.0, 2501: 2.0, 10**9: 2.0}),
        (linear(2.0, 0.0, steps=4), {1: 1.5, 3: 0.5, 4: 0.0, 5: 0.0}),
        (cosine(1.0, 3.0, steps=4), {0: 1.0, 1: 2 - math.sqrt(0.5), 2: 2.0, 4: 3.0, 5: 3.0}),
        (
            piecewise((10, 1.0), (20, 2.0), (40, 1.5)),
            {0: 1.0, 10: 1.0, 15: 1.5, 20: 2.0, 30: 1.75, 40: 1.5, 99: 1.5},
        ),
        (piecewise((7, 1.25)), {0: 1.25, 7: 1.25, 99: 1.25}),
        (
            trace([1.0, 3.0, 2.0], steps=[0, 4, 6]),
            {0: 1.0, 1: 1.5, 4: 3.0, 5: 2.5, 6: 2.0, 99: 2.0},
        ),
        (trace([1.0, 3.0, 2.0], steps=[10, 14, 16]), {0: 1.0, 10: 1.0, 11: 1.5}),
        (trace([1.5]), {0: 1.5, 1: 1.5, 99: 1.5}),
        (custom(lambda step: 1.0 if step < 10 else 2.0), {9: 1.0, 10: 2.0}),
    ],
    ids=repr,
)
def test_values(schedule, values):
    for step, value in values.items():
        assert schedule(step) == pytest.approx(value, rel=1e-15)
        on_device = schedule(torch.tensor(step, dtype=torch.float64))
        assert on_device.shape == ()
        assert on_device.item() == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("schedule", [*SCHEDULES, every(3, 0.5), piecewise((7, 1.25))], ids=repr)
def test_whole_steps_of_any_type_give_the_values_of_the_same_numbers(schedule):
    values = [schedule(step) for step in range(8)]
    for dtype in (torch.int64, torch.uint8, torch.float64):
        steps = torch.arange(8, dtype=dtype)
        assert schedule(steps).tolist() == schedule.at(steps, {}).tolist() == values


def test_a_call_in_one_type_does_not_change_the_values_in_another():
    ratio = trace([1.0, 1.6], steps=[0, 100])
    for dtype in (torch.int64, torch.bfloat16, torch.float32):
        ratio(torch.tensor(50, dtype=dtype))
    assert (ratio(50), ratio(100.0)) == (1.3, 1.6)
    fresh = trace([1.0, 1.6], steps=[0, 100])
    opts = [AdamWN([torch.nn.Parameter(torch.eye(3))], ratio=r, rate=1.0) for r in (ratio, fresh)]
    for opt in opts:
        opt.step()
    assert opts[0].norms()["global"].target == opts[1].norms()["global"].target


def test_a_function_of_the_step_is_a_schedule():
    seen = []

    def ratio(step):
        seen.append(int(step))
        return 1.0 + 0.5 * step

    p = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    opt = NormControl(
        torch.optim.SGD([p], lr=0.1), ratio=ratio, rate=lambda step: torch.ones_like(step)
    )
    opt.step()
    assert p.tolist() == [[4.5, 6.0]]
    opt.step()
    assert p.tolist() == [[6.0, 8.0]]
    assert set(seen) == {1, 2}, "steps count from 1"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_trace_of_one_record_is_a_constant(dtype):
    """It was NaN at the record in float32, in which the least distance between steps was zero."""
    steps = torch.tensor([0.0, 3.0, 5.0], dtype=dtype)
    assert trace([1.25], steps=[3])(steps).tolist() == [1.25] * 3


def test_a_trace_warns_once_that_it_has_ended():
    model = SmallModel()
    opt = AdamWN(model.parameters(), lr=0.0, ratio=trace([1.0, 1.5, 2.0]), rate=1.0)
    first = total_norm([p for p in model.parameters() if p.dim() >= 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            opt.step()
    with pytest.warns(
        UserWarning,
        match="trace ends at step 2, but the run continues: from now on the last value, 2, is used",
    ):
        opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    assert total_norm([p for p in model.parameters() if p.dim() >= 2]) == pytest.approx(
        2 * first, rel=1e-6
    )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_schedule_can_be_plotted_before_training(schedule):
    axes = schedule.plot(200, color="blue")
    steps, values = axes.lines[0].get_data()
    assert isinstance(axes, matplotlib.axes.Axes)
    assert (steps[0], steps[-1]) == (0, 200)
    assert list(values) == [schedule(int(s)) for s in steps]
    assert schedule.plot(100, ax=axes) is axes
    assert len(axes.lines) == 2
    matplotlib.pyplot.close("all")


def test_a_trace_is_printed_in_a_few_words_where_its_numbers_are_not_asked_for():
    """A recorded curve has thousands of points, and the report had all of them in one line."""
    ratio, words = trace([1 + i / 4000 for i in range(4001)]), "trace of 4001 points from 1 to 2"
    assert str(ratio) == words
    opt = AdamWN([torch.nn.Parameter(torch.ones(3, 3))], ratio=ratio)
    assert f"scope global, ratio {words}, rate 0.1," in opt.report()
    assert repr(opt.param_groups[0]["control"]).startswith(f"ratio={words}, rate=0.1, scope='glo")
    with pytest.raises(ValueError, match=f"rate={words} takes the value 1.00025: a"):
        AdamWN([torch.nn.Parameter(torch.ones(3, 3))], rate=ratio)


def test_a_plot_without_matplotlib_is_an_error_with_advice(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ModuleNotFoundError, match=r"plot needs matplotlib.*'normcontrol\[plot\]'"):
        linear(1.0, 2.0, steps=10).plot(20)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: linear(1.0, 2.0, steps=0), "linear got steps=0: a ramp needs at least one step"),
        (lambda: cosine(1.0, math.nan, steps=10), "cosine got end=nan: give a finite number"),
        (lambda: piecewise(), "it needs at least one point, and the steps must increase"),
        (lambda: piecewise((5, 1.0), (5, 2.0)), "and the steps must increase"),
        (
            lambda: lr_squared_times(0.1, 0),
            "lr_squared_times got lr_max=0: .* Give a positive number",
        ),
        (lambda: trace([]), "it needs at least one value, a step for each value"),
        (lambda: trace([1.0, 2.0], steps=[3]), "trace got 2 values at 1 steps"),
        (lambda: trace([1.0, 2.0], steps=[3, 3]), "and steps that increase"),
        (lambda: piecewise((0, 1.0), (math.nan, 2.0)), "must increase and be finite"),
        (lambda: piecewise((-math.inf, 1.0), (0, 2.0)), "must increase and be finite"),
        (lambda: trace([1.0, 2.0], steps=[0, math.nan]), "that increase and are finite"),
        (lambda: constant(math.nan), "constant got level=nan: give a finite number"),
        (lambda: lr_times(math.inf), "lr_times got factor=inf: give a finite number"),
        (lambda: lr_squared_times(0.1, math.inf), "lr_max=inf: give a finite number"),
        (lambda: piecewise((0, 1.0), (9, math.inf)), "piecewise got the value inf: give finite"),
        (lambda: trace([1.0, math.nan]), "trace got the value nan: give finite numbers"),
        (lambda: every(True), "every got n=True: give a whole number of steps"),
    ],
)
def test_invalid_arguments_are_refused_with_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: constant("a"), "constant got level='a', which is no number. Give one"),
        (lambda: constant(None), "constant got level=None"),
        (lambda: linear("a", 1.0, steps=3), "linear got start='a'"),
        (lambda: lr_times("a"), "lr_times got factor='a'"),
        (lambda: lr_squared_times(0.1, "a"), "lr_squared_times got lr_max='a'"),
        (lambda: every(3, "a"), "every got level='a'"),
        (lambda: linear(torch.ones(2), 1.0, steps=3), r"linear got start=tensor\(\[1., 1.\]\)"),
        (lambda: piecewise((0, "a")), r"piecewise got \(0, 'a'\): every point is a pair of numb"),
        (lambda: piecewise(0, 1), r"piecewise got 0, 1: every point is a pair"),
        (lambda: piecewise([(0, 1), (1, 2)]), r"Give such pairs, as in piecewise\(\(0, 1.0\), "),
        (lambda: trace(["a"]), r"trace got the values \['a'\]: both are lists of numbers"),
        (lambda: trace(5), "trace got the values 5: both"),
        (lambda: trace([1.0], steps=["a"]), r"trace got the values \[1.0\] at \['a'\]: both"),
        # Digits are no numbers, and neither are truth values.
        (lambda: linear("1", 2.0, steps=3), "linear got start='1'"),
        (lambda: linear(1.0, 2.0, steps=True), "linear got steps=True"),
        (lambda: constant(np.bool_(True)), "constant got level=True"),
        (lambda: piecewise((0, "1")), r"piecewise got \(0, '1'\): every point"),
        (lambda: piecewise((0, 1.0, 2.0)), r"piecewise got \(0, 1.0, 2.0\): every point"),
        (lambda: piecewise((0, None)), r"piecewise got \(0, None\): every point"),
        (lambda: piecewise((False, 1.0)), r"piecewise got \(False, 1.0\): every point"),
        (lambda: trace("12"), "trace got the values '12': both are lists of numbers"),
        (lambda: trace([1.0, True]), r"trace got the values \[1.0, True\]: both"),
        (lambda: trace([1.0], steps="0"), r"trace got the values \[1.0\] at '0': both"),
        (lambda: custom(None), "custom got None, which cannot be called: give a function of the"),
        # What makes a schedule is none itself.
        (lambda: custom(paper_ratio), "custom got .*paper_ratio.* cannot be called with a step"),
        (
            lambda: custom(linear),
            r"custom got .*linear.* give what it returns, as in paper_ratio\(\)",
        ),
        (lambda: custom(lambda step, group: 1.0), "cannot be called with a step: give a function"),
    ],
)
def test_arguments_that_are_no_numbers_are_refused_with_a_sentence(make, sentence):
    with pytest.raises(TypeError, match=sentence):
        make()


@pytest.mark.parametrize("value", [None, "a", torch.ones(2), [1.0, 2.0]], ids=repr)
def test_a_function_that_returns_no_number_is_refused(value):
    p = torch.nn.Parameter(torch.eye(2))
    for name in ("ratio", "rate"):
        with pytest.raises(ValueError, match=r"custom\('<lambda>'\) returned .* is no number: a"):
            AdamWN([p], **{name: lambda step: value})
    opt = AdamWN([p], rate=lambda step: 0.5 if step < 2 else value)
    opt.step()
    before = p.detach().clone()
    with pytest.raises(ValueError, match="Correct the function"):
        opt.step()
    assert torch.equal(p, before)


def test_a_subclass_must_define_value():
    with pytest.raises(TypeError, match="does not define value"):
        Schedule()(1)


# How the norm follows a schedule: weight norm control is a proportional controller with the time
# constant 1/k.


def ratios_under(ratio, rate, steps) -> list[float]:
    """The norm divided by the initial norm after each step. The learning rate is 0, so that only
    the controller moves the weights."""
    p = torch.nn.Parameter(torch.full((2, 2), 0.5, dtype=torch.float64))
    opt = NormControl(torch.optim.SGD([p], lr=0.0), ratio=ratio, rate=rate)
    seen = []
    for _ in range(steps):
        opt.step()
        seen.append(total_norm([p]))
    return seen


def test_the_distance_to_the_target_shrinks_by_1_minus_k_each_step():
    seen = ratios_under(2.0, 1e-2, steps=100)
    assert seen == pytest.approx([2 - 0.99**t for t in range(1, 101)], rel=1e-12)
    assert 2 - seen[-1] == pytest.approx(1 / math.e, rel=0.01)  # the time constant: 1/k = 100 steps


def test_the_papers_ramp_lags_by_slope_times_1_minus_k_over_k():
    """1 -> 2.415 in 2,500 steps at k = 1e-2: the ratio lags by 0.056 at the end of the ramp, and
    reaches the target soon after it."""
    seen = ratios_under(linear(1.0, 2.415, steps=2500), 1e-2, steps=3500)
    lag = 1.415 / 2500 * 0.99 / 0.01
    assert 2.415 - seen[2499] == pytest.approx(lag, rel=1e-9)
    assert round(lag, 3) == 0.056
    assert seen[-1] == pytest.approx(2.415, rel=1e-5)


def test_noise_raises_the_norm_by_lr2_over_2_k_rms2():
    """Random steps of +-lr add lr^2 to the mean square. At the paper's k, the norm converges to
    2.5 % above its target."""
    rate, offset = 1e-2, 0.025
    lr = math.sqrt(2 * rate * offset)
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.ones(100, 100))
    opt = NormControl(torch.optim.SGD([p], lr=lr), ratio=1.0, rate=rate)
    seen = []
    for t in range(800):
        p.grad = torch.randint(2, p.shape, generator=generator).float() * 2 - 1
        opt.step()
        if t >= 500:
            seen.append(opt.norms()["global"].ratio.item() - 1)
    assert sum(seen) / len(seen) == pytest.approx(offset, rel=0.05)


def test_eta_times_uses_the_schedulers_initial_lr():
    model = SmallModel()
    opt = AdamWN(model.parameters(), lr=0.5, ratio=0.0, rate=eta_times(0.25))
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    scales = []
    for t in range(3):
        train(model, opt, range(t, t + 1), scheduler)
        scales.append(opt.norms()["global"].scale.item())
    assert scales == [1 - 0.25, 1 - 0.125, 1 - 0.0625]


def test_eta_times_uses_the_first_value_of_a_tensor_that_is_changed_in_place():
    p = torch.nn.Parameter(torch.eye(2))
    opt = AdamWN([p], lr=torch.tensor(0.5), ratio=0.0, rate=eta_times(0.5))
    scales = []
    for lr in (0.5, 0.25):
        opt.param_groups[0]["lr"].fill_(lr)
        opt.step()
        scales.append(opt.norms()["global"].scale.item())
    assert scales == [0.5, 0.75]
    again = AdamWN([p], lr=torch.tensor(1.0), ratio=0.0, rate=eta_times(0.5))
    again.load_state_dict(opt.state_dict())
    again.step()
    assert again.norms()["global"].scale.item() == 0.75


def test_eta_times_of_a_learning_rate_that_began_at_zero_is_refused():
    p = torch.nn.Parameter(torch.eye(2))
    opt = AdamWN([p], lr=0.0, ratio=0.0, rate=eta_times(0.5))
    opt.param_groups[0]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"rate was 0 when the group was added\. .*'initial_lr'"):
        opt.step()
    assert p.tolist() == torch.eye(2).tolist()
    opt.param_groups[0]["initial_lr"] = 1.0
    opt.step()
    assert p.tolist() == (torch.eye(2) * 0.75).tolist()
