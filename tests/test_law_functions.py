"""Laws given as functions: those of the library are stored by name, those of a user are not."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import normcontrol
from normcontrol import AdamWN, NormControl, law


def halfway(norm, target, rate):
    """A law of a user: half of the proportional one."""
    return law.proportional(norm, target, rate / 2)


def controlled(given, **settings) -> tuple[nn.Parameter, NormControl]:
    p = nn.Parameter(torch.eye(4))
    opt = NormControl(torch.optim.SGD([p], lr=0.0), norm=4.0, law=given, rate=0.5, **settings)
    p.grad = torch.ones_like(p)
    return p, opt


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (law.proportional, "proportional"),
        (law.projection, "projection"),
        (law.upper_bound, "upper"),
        (law.lower_bound, "lower"),
        (law.Band(0.75), "band(0.75)"),
        (law.Band(np.float64(0.5)), "band(0.5)"),
        (law.Band(torch.tensor(0.5)), "band(0.5)"),
        (law.Band(1e-05), "band(1e-05)"),
        (law.Integral, "integral"),
    ],
)
def test_a_law_of_the_library_is_the_same_by_function_and_by_name(given, name):
    (p, first), (q, second) = controlled(given), controlled(name)
    for _ in range(3):
        first.step()
        second.step()
    assert torch.equal(p, q)
    assert first.state_dict()["param_groups"][0]["control"]["law"] == name
    second.load_state_dict(first.state_dict())


def test_a_law_of_ones_own_is_applied_and_must_be_given_again_when_resuming(tmp_path):
    p, opt = controlled(halfway)
    opt.step()
    assert p.detach().norm().item() == pytest.approx(2.0 + 0.25 * 2.0)
    torch.save(opt.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["param_groups"][0]["control"]["law"] == "law('halfway')"
    _, resumed = controlled(halfway)
    resumed.load_state_dict(state)
    _, other = controlled("proportional")
    with pytest.raises(
        ValueError, match="the function 'halfway' as the law, and a function cannot"
    ):
        other.load_state_dict(state)
    assert copy.deepcopy(opt).sets[0].law(torch.ones(1), torch.ones(1), 1.0) == 1.0


def test_a_law_can_be_replaced_by_a_function_between_steps():
    p, opt = controlled("proportional")
    opt.param_groups[0]["control"]["law"] = halfway
    opt.step()
    assert p.detach().norm().item() == pytest.approx(2.5)
    opt.param_groups[0]["control"]["law"] = law.projection
    opt.step()
    assert p.detach().norm().item() == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda norm, target, rate: 1.0, "returned 1.0 for two norms: a law is a function"),
        (lambda norm, target, rate: norm.sum(), r"returned shape \(\) for two norms"),
        (lambda n, target, rate: target / n * torch.ones(1), r"shape \(1,\) for a single norm: a"),
        (3, "law=3 is not known: give one of 'proportional'"),
        ("sideways", "or a function of"),
    ],
)
def test_what_is_no_law_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        controlled(given)


def test_the_public_names_are_where_users_look():
    assert callable(normcontrol.methods.adamh)
    assert [normcontrol.every(2)(s) for s in (1, 2)] == [0.0, 1.0]
    assert normcontrol.lr_squared_times(2.0).at(None, {"lr": 3.0}) == 18.0
    assert AdamWN([nn.Parameter(torch.eye(2))], law=normcontrol.law.projection).sets
    assert {"every", "law", "methods", "lr_squared_times", "sqrt_lr_times"} <= set(dir(normcontrol))
