"""Optimizers that store weights in their state: these are scaled too, or there is a sentence."""

import warnings

import pytest
import torch
from small import SmallModel, loss_at, matrices, total_norm
from torch import nn

from normcontrol import NormControl

schedulefree = pytest.importorskip("schedulefree")


def weights(*shape, seed=0):
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


def train(model, opt, steps, batch=None):
    for t in range(steps):
        opt.zero_grad()
        loss_at(model, t if batch is None else batch).backward()
        opt.step()


@pytest.mark.parametrize("scope", ["global", "tensor", "row", "col"])
@pytest.mark.parametrize("order", ["after", "before"])
def test_the_averaged_weights_of_schedule_free_are_scaled_with_the_training_weights(scope, order):
    """Almost without steps of its own, all its weights are multiples of the initial ones."""
    model = SmallModel()
    inner = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-9)
    opt = NormControl(inner, ratio=2.0, rate=0.5, scope=scope, order=order)
    opt.train()
    train(model, opt, 20)
    opt.eval()
    for p, first in zip(matrices(model), matrices(SmallModel()), strict=True):
        assert torch.allclose(p, 2 * first, rtol=1e-4, atol=1e-5)
    opt.train()
    assert total_norm(matrices(model)) == pytest.approx(
        2 * total_norm(matrices(SmallModel())), rel=1e-4
    )


def test_schedule_free_evaluates_as_well_as_it_trains():
    model = SmallModel()
    opt = NormControl(
        schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2), ratio=0.5, rate=1.0
    )
    opt.train()
    train(model, opt, 100, batch=0)
    trained = loss_at(model, 0).item()
    opt.eval()
    assert loss_at(model, 0).item() < 1.3 * trained


def test_a_tensor_without_gradient_has_no_stored_weights():
    a, b, c = weights(3, 4), weights(4, 4, seed=1), weights(5, 4, seed=2)
    opt = NormControl(
        schedulefree.SGDScheduleFree([a, b, c], lr=1e-9), ratio=2.0, rate=1.0, scope="row"
    )
    opt.train()
    for p in (a, c):
        p.grad = torch.ones_like(p)
    for _ in range(3):
        opt.step()
    opt.eval()
    unscaled = weights(3, 4), weights(4, 4, seed=1), weights(5, 4, seed=2)
    for p, first in zip((a, b, c), unscaled, strict=True):
        assert torch.allclose(p, 2 * first, rtol=1e-5)


class Lookahead(torch.optim.Optimizer):
    """The slow weights are in the state of the optimizer inside, as in timm."""

    def __init__(self, inner):
        self.inner, self.defaults, self.param_groups = inner, inner.defaults, inner.param_groups
        self.state, self.count = {}, 0

    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        for p in self.param_groups[0]["params"]:
            slow = self.inner.state[p].setdefault("lookahead_slow_buff", p.detach().clone())
            if self.count % 3 == 0:
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)


def test_slow_weights_in_the_state_of_an_optimizer_inside_are_scaled():
    p = weights(4, 4)
    opt = NormControl(Lookahead(torch.optim.SGD([p], lr=1e-9)), ratio=2.0, rate=0.5)
    for _ in range(12):
        p.grad = torch.ones_like(p)
        opt.step()
    assert total_norm([p]) == pytest.approx((2 - 0.5**12) * total_norm([weights(4, 4)]), rel=1e-5)


@pytest.mark.parametrize("setting", [{"relative_step": 0.1}, {"cautious": True}])
def test_a_mechanism_that_changes_single_weights_is_refused(setting):
    inner = schedulefree.AdamWScheduleFree([weights(4, 4)])
    with pytest.raises(ValueError, match=rf"{next(iter(setting))} changes .* \(z, x, y\)"):
        NormControl(inner, **setting)


class FTRL(torch.optim.SGD):
    """Any optimizer with the name of one that is refused."""


def test_an_optimizer_that_undoes_the_control_may_be_used_without_it():
    with pytest.raises(ValueError, match=r"FTRL computes the weights anew .*Use another optimizer"):
        NormControl(FTRL([weights(4, 4)], lr=0.1))
    with pytest.warns(UserWarning, match="Nothing is controlled"):
        NormControl(FTRL([{"params": [weights(4, 4)], "controlled": False}], lr=0.1))


def test_an_optimizer_that_undoes_the_control_is_found_inside_another():
    outer = type("Outer", (Lookahead,), {})
    with pytest.raises(ValueError, match="Outer computes the weights anew"):
        NormControl(outer(FTRL([weights(4, 4)], lr=0.1)))


class Anchored(torch.optim.SGD):
    """An unknown optimizer that pulls the weights back to where they were at first."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            anchor = self.state[p].setdefault("anchor", p.detach().clone())
            p.data.lerp_(anchor, 0.5)


def test_there_is_a_warning_if_an_unknown_optimizer_stores_weights():
    p = weights(8, 8)
    p.grad = weights(8, 8, seed=1).detach()
    opt = NormControl(Anchored([p], lr=1e-3), ratio=2.0)
    with pytest.warns(UserWarning, match=r"Anchored stores weights in its state, as 'anchor'"):
        opt.step()


class FromElsewhere(torch.optim.SGD):
    """Torch's own optimizers are not searched."""


def test_a_gradient_that_is_like_the_weights_is_not_taken_for_stored_weights():
    """The gradient of half the square is the weights, and so is the momentum."""
    p = weights(8, 8)
    (0.5 * p.square().sum()).backward()
    opt = NormControl(FromElsewhere([p], lr=1e-3, momentum=0.9), ratio=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
