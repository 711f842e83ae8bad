"""The methods with a target, a bound or a band against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from definitions import (
    ADAM,
    BETAS,
    INITIAL,
    LR,
    STEPS,
    AdamDirection,
    GradientDirection,
    assert_close,
    by_definition,
    gradients,
    lr_at,
    rows,
    trained,
    weights,
)
from torch import nn

from normcontrol import methods, paper_ratio
from normcontrol.target import TARGETS


def test_adamwn_uses_the_joint_norm():
    params = weights()
    found = trained(methods.adamwn(params, ratio=1.5, rate=0.05, **ADAM), params)
    ws = [w.clone() for w in INITIAL]
    adam, start = AdamDirection(ws), math.sqrt(sum(float(w.square().sum()) for w in ws))
    for step in range(1, STEPS + 1):
        ws = [w - lr_at(step) * u for w, u in zip(ws, adam(gradients(step, ws)), strict=True)]
        norm = math.sqrt(sum(float(w.square().sum()) for w in ws))
        ws = [w - 0.05 * (1 - 1.5 * start / norm) * w for w in ws]
    assert_close(found, ws)


def test_adamwn_is_the_papers_unless_another_target_is_given():
    def target(**settings):
        control = methods.METHODS["AdamWN"](weights(), **settings)[0].param_groups[0]["control"]
        return {name: control[name] for name in TARGETS if name in control}

    assert target() == {"ratio": paper_ratio()}
    assert target(ratio=1.5) == {"ratio": 1.5}
    assert target(gain=0.8) == {"gain": 0.8}
    held = methods.adamwn(weights(), hold=1.0).param_groups[0]["control"]
    assert (held["hold"], held["rate"], held.get("ratio")) == (1.0, 0.01, None)


def test_max_norm():
    params = weights()

    def rule(w, u, lr, i, t):
        w = w - lr * u
        return w * (1.2 / rows(w)).clamp(max=1)

    assert_close(
        trained(methods.max_norm(params, lr=LR, norm=1.2), params),
        by_definition(rule, direction=GradientDirection),
    )


def test_min_max_norm():
    params = weights()

    def rule(w, u, lr, i, t):
        w = w - lr * u
        return w * ((1 - 0.3) * rows(w) + 0.3 * rows(w).clamp(0.8, 1.1)) / rows(w)

    opt = methods.min_max_norm(params, lr=LR, betas=BETAS, low=0.8, high=1.1, rate=0.3)
    assert_close(trained(opt, params), by_definition(rule))


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (2.0, 1.0), (-1.0, 1.0), (0.0, math.nan)])
def test_min_max_norm_between_bounds_that_cannot_be_is_refused(low, high):
    with pytest.raises(ValueError, match=f"low={low} and high={high}: no norm can be kept between"):
        methods.min_max_norm(weights(), low=low, high=high)


def test_min_max_norm_equals_keras(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    theirs = keras.constraints.MinMaxNorm(min_value=0.8, max_value=1.1, rate=0.3, axis=1)
    params = weights(torch.float32)[:1]
    opt = methods.min_max_norm(params, lr=LR, low=0.8, high=1.1, rate=0.3)
    adam = torch.optim.Adam([twin := nn.Parameter(params[0].detach().clone())], lr=LR)
    for step in range(1, 20):
        (grad,) = gradients(step, params)
        with torch.no_grad():
            # Compared step by step: Keras divides by the norm plus 1e-7, and that would add up.
            twin.copy_(params[0])
        twin.grad, params[0].grad = grad.clone(), grad.clone()
        adam.step()
        opt.step()
        assert_close([params[0].detach()], [torch.as_tensor(theirs(twin.detach()))])


def test_normalize_and_project():
    params = weights()

    def rule(w, u, lr, i, t):
        w = w - lr * u
        return w * INITIAL[i].norm() / w.norm() if t % 7 == 0 else w

    assert_close(trained(methods.nap(params, n=7, **ADAM), params), by_definition(rule))


def test_lawn():
    params, norm_at_switch = weights(), {}

    def rule(w, u, lr, i, t):
        w = w - lr * u
        if t == 20:
            norm_at_switch[i] = w.norm()
        return w * norm_at_switch[i] / w.norm() if t > 20 else w

    assert_close(trained(methods.lawn(params, switch=20, **ADAM), params), by_definition(rule))


def test_ngpt_and_edm2():
    params = weights()
    assert_close(
        trained(methods.ngpt(params, **ADAM), params),
        by_definition(lambda w, u, lr, i, t: (w - lr * u) / rows(w - lr * u)),
    )
    params = weights()
    columns = by_definition(
        lambda w, u, lr, i, t: (w - lr * u) / (w - lr * u).norm(dim=0, keepdim=True)
    )
    assert_close(trained(methods.ngpt(params, scope="col", **ADAM), params), columns)
    params = weights()
    unit = by_definition(
        lambda w, u, lr, i, t: (w - lr * u) / rows(w - lr * u) * math.sqrt(w.shape[1])
    )
    assert_close(trained(methods.edm2(params, **ADAM), params), unit)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: methods.nap(weights(), n=0), "every got n=0"),
    ],
)
def test_invalid_arguments_are_refused_with_a_sentence(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
