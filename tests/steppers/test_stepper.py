"""How a stepper calls the wrapped optimizer: hooks, threads, schedulers."""

import threading
import warnings

import pytest
import torch
from torch.nn import Parameter
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from normcontrol import AdamWN, NormControl
from normcontrol.groups.sets import usable
from normcontrol.law import Integral, proportional
from normcontrol.steppers.stepper import TOLERANCE, next_scale


@pytest.fixture
def seen():
    """The optimizers that hooks on all optimizers saw, before and after their steps."""
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda opt, *_: calls.append(("before", opt))),
        register_optimizer_step_post_hook(lambda opt, *_: calls.append(("after", opt))),
    ]
    yield calls
    for handle in handles:
        handle.remove()


def weight() -> Parameter:
    p = Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3)
    return p


class Interrupted(torch.optim.SGD):
    """During its step another thread makes a step of its own optimizer."""

    other: torch.optim.Optimizer

    def step(self, closure=None):
        thread = threading.Thread(target=self.other.step)
        thread.start()
        thread.join()


def test_hooks_of_other_threads_run_during_a_step(seen):
    inner = Interrupted([weight()], lr=0.1)
    inner.other = torch.optim.SGD([weight()], lr=0.1)
    opt = NormControl(inner)
    opt.step()
    assert seen == [
        ("before", opt), ("before", inner.other), ("after", inner.other), ("after", opt)
    ]  # fmt: skip


def test_the_hooks_of_the_wrapped_optimizer_itself_run(seen):
    inner, own = torch.optim.SGD([weight()], lr=0.1), []
    inner.register_step_pre_hook(lambda opt, *_: own.append("before"))
    inner.register_step_post_hook(lambda opt, *_: own.append("after"))
    opt = NormControl(inner)
    opt.step()
    assert own == ["before", "after"]
    assert seen == [("before", opt), ("after", opt)]


def test_a_scheduler_of_the_wrapped_optimizer_counts_its_steps(seen):
    inner = torch.optim.SGD([weight()], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    opt = NormControl(inner)
    opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as "lr_scheduler.step() before optimizer.step()"
        scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.05
    assert seen == [("before", opt), ("after", opt)]


def test_a_step_that_was_put_in_place_of_the_optimizers_own_is_called():
    inner, calls = torch.optim.SGD([weight()], lr=0.1), []
    inner.step = lambda closure=None: calls.append(closure)
    NormControl(inner).step()
    assert calls == [None]


def scales_that_settle(rate: float, target: float = 1.0, norm: float = 1.001) -> list[float]:
    """The scales of three steps towards a target, where the optimizer leaves the norm alone."""
    scales = []
    for _ in range(3):
        scales.append(proportional(norm, target, rate))
        norm *= scales[-1]
    return scales


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.9])
def test_the_guess_holds_while_a_norm_settles_and_a_straight_line_does_not(rate):
    first, second, third = scales_that_settle(rate)
    assert abs(third / next_scale(second, first, rate) - 1) < TOLERANCE
    assert abs(third / next_scale(second, first, 0.0) - 1) > TOLERANCE


def test_a_guess_far_from_one_is_not_made():
    assert next_scale(0.5, 0.75, 0.0) == next_scale(1.5, 1.0, 0.0) == 1.0
    assert next_scale(0.75, 0.875, 0.0) == 0.625


def test_weights_stay_as_they_are_where_the_norm_or_the_scale_is_not_finite():
    inf, nan = float("inf"), float("nan")
    norm = torch.tensor([1.0, inf, nan, 1.0, 1.0])
    scale = torch.tensor([0.5, 0.5, 0.5, inf, nan])
    assert usable(scale, norm, None).tolist() == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert usable(scale, norm, torch.ones(())).tolist() == [1.0] * 5


@pytest.mark.parametrize(("dtype", "sets"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_only_float32_is_folded(dtype, sets):
    opt = AdamWN([Parameter(torch.ones(3, 3, dtype=dtype))], fused=True)
    assert len(opt.stepper.folded) == sets


def test_the_norm_of_every_part_is_that_of_the_weights_after_the_step():
    p, q = weight(), weight()
    opt = NormControl(torch.optim.SGD([p, q], lr=0.1), ratio=2.0, rate=0.5)
    opt.step()
    expected = [p.detach().norm().item(), q.detach().norm().item()]
    assert opt.sets[0].last_norms.tolist() == pytest.approx(expected)


def test_the_length_of_an_update_is_a_fraction_of_the_target():
    p = weight()
    opt = NormControl(torch.optim.SGD([p], lr=0.1), ratio=2.0, rate=0.0, relative_step=0.01)
    before = p.detach().clone()
    opt.step()
    assert (p.detach() - before).norm().item() == pytest.approx(0.01 * 2 * 3, rel=1e-4)


def test_the_multiplier_of_the_integral_law_is_never_negative():
    law = Integral(torch.zeros(1), count=torch.ones(1))
    assert law(torch.tensor([1.0]), torch.tensor([2.0]), 1.0).item() == 1.0
    assert law.multiplier.item() == 0.0
