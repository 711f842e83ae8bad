"""Schedules: their values, their way through a checkpoint, their picture, and what a norm makes of
them."""

import io
import math
import pickle
import warnings

import matplotlib
import pytest
import torch
from small import SmallModel, total_norm, train

from normcontrol import (
    AdamWN,
    NormControl,
    Schedule,
    constant,
    cosine,
    eta_times,
    linear,
    lr_times,
    piecewise,
    trace,
)
from normcontrol.schedule import custom, from_plain, to_plain

matplotlib.use("Agg")

SCHEDULES = [
    constant(0.3),
    linear(1.0, 2.0, steps=100),
    linear(0.1 + 0.2, 1 / 3, steps=math.pi),
    cosine(1.0, 0.5, steps=1e6),
    piecewise((0, 1.0), (10, 2.5), (30, 0.5)),
    trace([1.0, 1.2, 1.1], steps=[0, 5, 20]),
    trace([1.0, 2.0]),
]
TIED = [lr_times(0.1), eta_times(1e-2)]


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


@pytest.mark.parametrize("schedule", SCHEDULES + TIED, ids=repr)
def test_round_trip_as_plain_data(schedule):
    plain = to_plain(schedule)
    assert isinstance(plain, str)
    assert from_plain(plain) == schedule
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_round_trip_through_a_checkpoint(schedule):
    """A checkpoint carries its schedules: the loading optimizer need not know them."""
    opt = AdamWN(SmallModel().parameters(), ratio=schedule, rate=0.5)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other = AdamWN(SmallModel().parameters(), ratio=1.0, rate=linear(0.1, 0.2, steps=7))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.param_groups[0]["ratio"] == schedule
    assert other.param_groups[0]["rate"] == 0.5


@pytest.mark.parametrize("schedule", TIED, ids=repr)
def test_rates_tied_to_the_learning_rate_round_trip_too(schedule):
    opt = AdamWN(SmallModel().parameters(), ratio=0.0, rate=schedule)
    other = AdamWN(SmallModel().parameters())
    other.load_state_dict(opt.state_dict())
    assert other.param_groups[0]["rate"] == schedule
    with pytest.raises(TypeError, match="follows the optimizer's learning rate"):
        schedule(1)


def test_numbers_stay_numbers():
    assert to_plain(0.25) == 0.25
    assert from_plain(0.25) == 0.25
    assert from_plain(None) is None


@pytest.mark.parametrize(
    "plain",
    [
        "__import__('os').system('true')",
        "open('x')",
        "linear",
        "1 + 1",
        "linear(1, 2, steps=exit())",
    ],
)
def test_a_checkpoint_cannot_run_code(plain):
    with pytest.raises(ValueError):
        from_plain(plain)


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


def test_a_function_must_be_given_again_when_resuming():
    def ratio(step):
        return 1.0 + 0.01 * step

    state = AdamWN(SmallModel().parameters(), ratio=ratio).state_dict()
    again = AdamWN(SmallModel().parameters(), ratio=ratio)
    again.load_state_dict(state)
    assert again.param_groups[0]["ratio"].function is ratio
    with pytest.raises(
        ValueError,
        match=r"made with the function 'ratio' as a schedule, and a function cannot be stored.*same function",
    ):
        AdamWN(SmallModel().parameters(), ratio=1.0).load_state_dict(state)


def test_a_replayed_trace_says_once_that_it_has_ended():
    model = SmallModel()
    opt = AdamWN(model.parameters(), lr=0.0, ratio=trace([1.0, 1.5, 2.0]), rate=1.0)
    first = total_norm([p for p in model.parameters() if p.dim() >= 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            opt.step()
    with pytest.warns(
        UserWarning, match="trace ends at step 2 and the run goes on: its last value, 2, is held"
    ):
        opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    assert total_norm([p for p in model.parameters() if p.dim() >= 2]) == pytest.approx(
        2 * first, rel=1e-6
    )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_schedule_can_be_drawn_before_training(schedule):
    axes = schedule.plot(200, color="blue")
    steps, values = axes.lines[0].get_data()
    assert isinstance(axes, matplotlib.axes.Axes)
    assert (steps[0], steps[-1]) == (0, 200)
    assert list(values) == [schedule(int(s)) for s in steps]
    assert schedule.plot(100, ax=axes) is axes
    assert len(axes.lines) == 2
    matplotlib.pyplot.close("all")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: linear(1.0, 2.0, steps=0), "linear got steps=0: a ramp needs at least one step"),
        (lambda: cosine(1.0, math.nan, steps=10), "cosine got end=nan: give a finite number"),
        (lambda: piecewise(), "they must be there and increase"),
        (lambda: piecewise((5, 1.0), (5, 2.0)), "they must be there and increase"),
        (lambda: trace([]), "needs one increasing step for each value, and at least one"),
        (lambda: trace([1.0, 2.0], steps=[3]), "trace got 2 values at 1 steps"),
        (lambda: trace([1.0, 2.0], steps=[3, 3]), "needs one increasing step for each value"),
        (
            lambda: from_plain("spline(1, 2)"),
            "holds the schedule 'spline\\(1, 2\\)'; known are constant, linear",
        ),
    ],
)
def test_what_cannot_be_a_schedule_is_refused_with_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_an_own_schedule_class_needs_a_value():
    with pytest.raises(TypeError, match="does not define value"):
        Schedule()(1)


# What a norm makes of its schedule: weight norm control is a proportional controller with time
# constant 1/k.


def ratios_under(ratio, rate, steps) -> list[float]:
    """The norm over its initial value after each step, with nothing but the controller at work."""
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
    """1 -> 2.415 in 2,500 steps at k = 1e-2: behind by .056 at the end of the ramp, and soon after
    it on target."""
    seen = ratios_under(linear(1.0, 2.415, steps=2500), 1e-2, steps=3500)
    lag = 1.415 / 2500 * 0.99 / 0.01
    assert 2.415 - seen[2499] == pytest.approx(lag, rel=1e-9)
    assert round(lag, 3) == 0.056
    assert seen[-1] == pytest.approx(2.415, rel=1e-5)


def test_noise_lifts_the_norm_by_lr2_over_2_k_rms2():
    """Steps of +-lr without direction add lr^2 to the mean square; at the paper's k the norm
    settles 2.5 % above target."""
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


def test_a_rate_tied_to_the_schedule_follows_the_schedulers_initial_lr():
    model = SmallModel()
    opt = AdamWN(model.parameters(), lr=0.5, ratio=0.0, rate=eta_times(0.25))
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    scales = []
    for t in range(3):
        train(model, opt, range(t, t + 1), scheduler)
        scales.append(opt.norms()["global"].scale.item())
    assert scales == [1 - 0.25, 1 - 0.125, 1 - 0.0625]
