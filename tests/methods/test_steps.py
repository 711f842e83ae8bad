"""Radial brake, relative update and its floor against their definitions."""

from __future__ import annotations

import pytest
import torch
from definitions import ADAM, BETAS, EPS, LR, assert_close, by_definition, rows, trained, weights
from torch import nn

from normcontrol import AdamWN, NormControl, methods


def test_a_radial_brake_keeps_half_of_the_growth_of_a_norm():
    params = weights()
    grew = []

    def rule(w, u, lr, i, t):
        moved = w - lr * u
        growth = moved.norm() - w.norm()
        grew.append(bool(growth > 0))
        norm = w.norm() + (0.5 if growth > 0 else 1.0) * growth
        return norm * moved / moved.norm()

    assert_close(trained(methods.radial_brake(params, **ADAM), params), by_definition(rule))
    assert set(grew) == {True, False}  # both branches were taken


def test_a_brake_that_keeps_nothing_holds_the_norm_and_one_that_keeps_all_is_adam():
    params = weights()
    trained(methods.radial_brake(params, **ADAM, keep=1.0), params)
    assert_close(params, by_definition(lambda w, u, lr, i, t: w - lr * u))
    p = nn.Parameter(torch.eye(3))
    opt = methods.radial_brake([p], keep=0.0)
    for _ in range(5):
        p.grad = -p.detach().clone()  # outward
        opt.step()
    assert p.detach().norm().item() == pytest.approx(3**0.5)


def test_the_brake_works_on_weights_that_start_at_zero():
    """Their norm has no ratio to an initial one, but a norm before each step."""
    p = nn.Parameter(torch.zeros(2, 2))
    opt = NormControl(
        torch.optim.SGD([p], lr=1.0),
        ratio=1.0,
        start="every step",
        law="upper",
        rate=0.5,
        scope="tensor",
    )
    p.grad = -torch.eye(2)
    opt.step()
    assert torch.equal(p.detach(), 0.5 * torch.eye(2))
    opt.step()  # from 0.5 to 1.5: half of the growth is kept
    assert torch.allclose(p.detach(), torch.eye(2))


def test_the_norm_after_a_step_is_the_reference_of_the_next_in_a_checkpoint():
    p = nn.Parameter(torch.eye(2))
    opt = methods.radial_brake([p], lr=0.1)
    p.grad = -torch.eye(2)
    opt.step()
    saved = opt.state_dict()["param_groups"][0]["control"]
    assert saved["start"] == "every step"
    assert saved["reference"].item() == pytest.approx(p.detach().norm().item())


def test_a_relative_update_has_the_length_of_the_learning_rate_times_the_norm():
    params = weights()
    rule = lambda w, u, lr, i, t: w - lr * w.norm() * u / u.norm()  # noqa: E731
    assert_close(trained(methods.relative_update(params, **ADAM), params), by_definition(rule))


@pytest.mark.parametrize("floor", [1e-3, 2.0, 1e3])
def test_an_update_floor_lengthens_the_rows_whose_update_is_short(floor):
    params = weights()
    lifted = []

    def rule(w, u, lr, i, t):
        least = floor * rows(w)
        lifted.extend((rows(u) < least).flatten().tolist())
        return w - lr * u / rows(u) * torch.maximum(rows(u), least)

    opt = methods.update_floor(params, **ADAM, floor=floor)
    few = 5  # a floor of 1e3 multiplies the norm by 20 at every step
    assert_close(trained(opt, params, few), by_definition(rule, steps=few))
    assert (True in lifted, False in lifted) == {
        1e-3: (False, True),
        2.0: (True, True),
        1e3: (True, False),
    }[floor]


def test_rows_of_zeros_have_no_floor_and_move_as_the_optimizer_says():
    p = nn.Parameter(torch.zeros(2, 3))
    opt = methods.update_floor([p], lr=LR, betas=BETAS, eps=EPS)
    p.grad = torch.ones(2, 3)
    opt.step()
    assert torch.allclose(p.detach(), torch.full((2, 3), -LR))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"relative_step": 0.1, "min_relative_step": 0.1}, "were both given: the first sets"),
        ({"min_relative_step": -1.0}, "min_relative_step=-1.0 takes the value -1"),
        ({"min_relative_step": 0.1, "order": "before"}, "min_relative_step=0.1 uses the step"),
        ({"relative_step": 0.0, "order": "before"}, "relative_step=0.0 uses the step"),
        ({"cautious": True, "start": "every step"}, "so that their norm after a step is not known"),
        ({"norm": 1.0, "ratio": None, "start": "every step"}, "Give a ratio, 1.0 to keep"),
        ({"start": "always"}, "start='always' is not known"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        NormControl(torch.optim.SGD(weights(), lr=0.1), **{"ratio": 1.0, **settings})


def test_weights_of_zero_cannot_have_updates_relative_to_them():
    with pytest.raises(ValueError, match="has an initial norm of zero"):
        methods.relative_update([nn.Parameter(torch.zeros(2, 2))])


def test_the_brake_in_the_global_scope_compares_joint_norms():
    params = weights()
    opt = AdamWN(params, **ADAM, ratio=1.0, start="every step", law="upper", rate=1.0)
    norm = lambda: torch.cat([p.detach().flatten() for p in params]).norm().item()  # noqa: E731
    before = norm()
    for p in params:
        p.grad = -p.detach().clone()
    opt.step()
    assert norm() == pytest.approx(before)
