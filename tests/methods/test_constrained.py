"""The four rules of CPR against their definitions, and what its multiplier does in training."""

from __future__ import annotations

import math

import torch
from definitions import ADAM, INITIAL, STEPS, assert_close, by_definition, trained, weights
from torch import Tensor, nn

from normcontrol import methods
from normcontrol.mechanisms import start


def cpr(kappa_of) -> list[Tensor]:
    """``lambda <- max(0, lambda + (R - kappa) / n); theta <- theta (1 - 2 lambda)``, without a
    learning rate. ``kappa_of(i, step, R)`` returns the bound of tensor i, or infinity for none."""
    multiplier = [0.0, 0.0]

    def rule(w, u, lr, i, t):
        w = w - lr * u
        square = float(w.square().sum())
        kappa = kappa_of(i, t, square)
        multiplier[i] = (
            max(0.0, multiplier[i] + (square - kappa) / w.numel()) if math.isfinite(kappa) else 0.0
        )
        return w * (1 - 2 * multiplier[i])

    return by_definition(rule)


def test_a_bound_that_depends_on_the_initial_weights():
    params = weights()
    expected = cpr(lambda i, t, square: 1.1 * float(INITIAL[i].square().sum()))
    assert_close(trained(methods.cpr(params, kappa=1.1, **ADAM), params), expected)


def test_a_uniform_bound():
    params = weights()
    opt = methods.cpr_uniform(params, mean_square=0.3, **ADAM)
    assert_close(trained(opt, params), cpr(lambda i, t, square: 0.3 * INITIAL[i].numel()))


def test_a_warm_start():
    params, kappa = weights(), {}

    def bound(i, t, square):
        if t == 15:
            kappa[i] = square
        return kappa[i] if t >= 15 else math.inf

    assert_close(trained(methods.cpr_warm_start(params, start=15, **ADAM), params), cpr(bound))


def test_the_inflection_point(monkeypatch):
    """Sampled at every 4th step, because at every 200th the test would need 600 steps."""
    monkeypatch.setattr(start, "SAMPLED_EVERY", 4)
    kappa, mean, samples, started = {}, {}, {0: [], 1: []}, {}

    def bound(i, t, square):
        mean[i] = square if t == 1 else 0.9 * mean[i] + 0.1 * square
        if t % 4 == 0:
            samples[i].append(mean[i])
            s = samples[i]
            if i not in kappa and len(s) >= 3 and (s[-1] - s[-2]) - (s[-2] - s[-3]) < 0:
                kappa[i], started[i] = square, t
        return kappa[i] if i in kappa and t > started[i] else math.inf

    params = weights()
    expected = cpr(bound)
    # Otherwise the test would compare runs without a start.
    assert 12 <= min(started.values()) <= max(started.values()) < STEPS, started
    assert_close(trained(methods.cpr_inflection(params, **ADAM), params), expected)


def test_training_ends_with_the_constraint_satisfied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    opt = methods.cpr(model.parameters(), lr=1e-2, kappa=1.5)
    x = torch.randn(256, 8)
    y = (x[:, :1] * x[:, 1:2]).sin() * 3
    for _ in range(400):
        loss = (model(x) - y).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    first, second = opt.norms().values()
    for reading in (first, second):
        assert reading.norm <= reading.target * 1.01


def test_the_multiplier_of_an_inactive_constraint_is_zero():
    loose = methods.cpr([nn.Parameter(torch.ones(4, 4))], lr=1e-3, kappa=100.0)
    loose.param_groups[0]["params"][0].grad = torch.ones(4, 4)
    loose.step()
    assert loose.param_groups[0]["control"]["memory"][0].item() == 0
    assert loose.norms()["group0.tensor0"].scale == 1
