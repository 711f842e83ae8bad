"""A step that raises was not made: weights, state and the number of steps are as before."""

import copy

import pytest
import torch
from small import SmallModel, loss_at

from normcontrol import AdamWN, NormControl, linear

SETTINGS = {"ratio": linear(1.0, 2.0, steps=5), "rate": 0.2}
MAKERS = {
    "plain": lambda params: AdamWN(params, lr=0.01, fused=False, **SETTINGS),
    "foreach": lambda params: AdamWN(params, lr=0.01, foreach=True, **SETTINGS),
    "folded": lambda params: AdamWN(params, lr=0.01, fused=True, **SETTINGS),
    "before": lambda params: AdamWN(params, lr=0.01, order="before", **SETTINGS),
    "clipped": lambda params: AdamWN(params, lr=0.01, max_grad_norm=0.1, **SETTINGS),
    "SGD": lambda params: NormControl(torch.optim.SGD(params, lr=0.1, momentum=0.9), **SETTINGS),
    "LBFGS": lambda params: NormControl(torch.optim.LBFGS(params, max_iter=2), **SETTINGS),
}
every_path = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def closure_of(model, opt, t):
    def closure():
        opt.zero_grad()
        loss = loss_at(model, t)
        loss.backward()
        return loss

    return closure


def bad_at_step_3(step):
    return torch.where(step == 3, -1.0, 1.0)


def failing():
    raise FloatingPointError("the loss is not finite")


def content(model, opt) -> list:
    """Everything that a step changes, as plain data."""
    saved = copy.deepcopy(opt.state_dict())
    control = [
        {key: value for key, value in group["control"].items() if isinstance(value, torch.Tensor)}
        for group in saved["param_groups"]
    ]
    if isinstance(opt.optimizer, torch.optim.LBFGS):  # it counts its calls of the closure first
        saved["state"] = {}
    return [model.state_dict(), saved["state"], control, opt.clock.calls]


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@every_path
@pytest.mark.parametrize("made", [0, 3], ids=["at the first step", "later"])
def test_after_an_error_in_the_closure_nothing_has_changed(make, made):
    model, twin = SmallModel(), SmallModel()
    opt, other = make(list(model.parameters())), make(list(twin.parameters()))
    for t in range(made):
        opt.step(closure_of(model, opt, t))
        other.step(closure_of(twin, other, t))
    before = copy.deepcopy(content(model, opt))
    with pytest.raises(FloatingPointError):
        opt.step(failing)
    assert same(content(model, opt), before)
    if not made:  # the weights at the first step that is made are the reference
        with torch.no_grad():
            for p in [*model.parameters(), *twin.parameters()]:
                p.mul_(1.5)
    for t in range(made, made + 2):
        opt.step(closure_of(model, opt, t))
        other.step(closure_of(twin, other, t))
    assert same(content(model, opt), content(twin, other))


@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "folded"])
@pytest.mark.parametrize("setting", ["ratio", "rate"])
def test_a_value_that_cannot_be_is_refused_before_anything_changes(setting, options, order):
    """Also the groups whose own values are good are as they were."""
    model = SmallModel()
    groups = [{"params": [p]} for p in (model.up.weight, model.down.weight)]
    opt = AdamWN(groups, lr=0.01, scope="group", order=order, ratio=1.2, rate=0.5, **options)
    for t in range(2):
        opt.step(closure_of(model, opt, t))
    good = opt.param_groups[1]["control"][setting]
    opt.param_groups[1]["control"][setting] = bad_at_step_3
    before = copy.deepcopy(content(model, opt))
    with pytest.raises(
        ValueError, match=rf"{setting}=.* is -1 at step 3: .* this step was not made"
    ):
        opt.step()
    assert same(content(model, opt), before)
    opt.param_groups[1]["control"][setting] = good
    opt.step()
    assert opt.clock.calls == opt.clock.step.item() == 3


def test_the_gradients_that_a_closure_computes_are_clipped():
    ends = []
    for fused in (False, True):
        model = SmallModel()
        opt = AdamWN(model.parameters(), eps=1e-2, max_grad_norm=0.1, fused=fused, **SETTINGS)
        for t in range(3):
            loss = opt.step(closure_of(model, opt, t))
            assert loss.item() > 0
        ends.append([p.detach() for p in model.parameters()])
    for p, q in zip(*ends, strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-7)
