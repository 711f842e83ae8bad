"""The folded stepper: with torch's fused AdamW on a CPU, the decay of AdamW does the multiplication
of order "after"."""

import math

import pytest
import torch
from small import SmallModel, train
from torch import nn

from normcontrol import AdamWN, linear
from normcontrol.steppers import folded
from normcontrol.steppers.folded import FoldedStepper
from normcontrol.steppers.stepper import PlainStepper

SETTINGS = {"lr": 1e-3, "ratio": linear(1.0, 2.0, steps=50), "rate": 0.05}


def steady(lr=1e-6) -> tuple[list[nn.Parameter], AdamWN]:
    """Weights with the same gradient in every step, so that their norm changes smoothly."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(30, 20)), nn.Parameter(torch.randn(40))]
    for p in params:
        p.grad = torch.randn_like(p)
    return params, AdamWN(params, lr=lr, ratio=1.0, rate=0.01, fused=True)


def folded_sets(opt: AdamWN) -> int:
    return len(opt.stepper.folded) if isinstance(opt.stepper, FoldedStepper) else 0


def test_steps_are_folded_with_fused_float32_on_a_cpu_only():
    for fused, expected in ((True, 1), (False, 0)):
        model = SmallModel()
        opt = AdamWN(model.parameters(), fused=fused, **SETTINGS)
        train(model, opt, range(3))
        assert folded_sets(opt) == expected
    model = SmallModel(torch.float64)
    opt = AdamWN(model.parameters(), fused=True, **SETTINGS)
    train(model, opt, range(3))
    assert folded_sets(opt) == 0  # the factors of folded steps have the precision of float32


def test_a_small_set_is_multiplied_in_a_pass_of_its_own(monkeypatch):
    monkeypatch.setattr(folded, "FEWEST", 601)
    _, opt = steady()  # 600 weights
    assert folded_sets(opt) == 0
    monkeypatch.setattr(folded, "FEWEST", 600)
    _, opt = steady()
    assert folded_sets(opt) == 1


def test_folded_steps_agree_with_the_plain_stepper():
    ours, theirs = SmallModel(), SmallModel()
    opt = AdamWN(ours.parameters(), fused=True, **SETTINGS)
    other = AdamWN(theirs.parameters(), fused=False, foreach=False, **SETTINGS)
    for t in range(60):
        train(ours, opt, range(t, t + 1))
        train(theirs, other, range(t, t + 1))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        # The two implementations of Adam themselves differ by this much.
        assert ((p - q).norm() / q.norm()).item() < 2e-5
    norm, expected = opt.norms()["global"].norm.item(), other.norms()["global"].norm.item()
    assert norm == pytest.approx(expected, rel=1e-6)


def test_errors_of_the_guess_do_not_accumulate():
    """Errors below the tolerance are not corrected in their step. The law removes them later."""
    params, opt = steady(lr=1e-4)
    for _ in range(3000):
        opt.step()
    reading = opt.norms()["global"]
    true = params[0].detach().double().norm().item()
    assert true == pytest.approx(reading.norm.item(), rel=2**-22)


def test_one_step_follows_the_norm_law():
    params, opt = steady(lr=0.01)
    for _ in range(3):
        opt.step()
    opt.step()
    moved = opt.norms()["global"]
    norm = (moved.norm / moved.scale).item()
    assert moved.norm.item() == pytest.approx(0.99 * norm + 0.01 * moved.target.item(), rel=1e-12)
    assert params[0].detach().double().norm().item() == pytest.approx(moved.norm.item(), rel=3e-7)


@pytest.fixture
def passes(monkeypatch):
    """A list with an entry for every second pass."""
    made = []
    plain = PlainStepper.multiply_local_
    monkeypatch.setattr(
        PlainStepper,
        "multiply_local_",
        lambda self, s, scale: (made.append(1), plain(self, s, scale)),
    )
    return made


def test_no_second_pass_is_needed_while_a_norm_settles(passes):
    _, opt = steady(lr=1e-8)
    opt.param_groups[0]["control"].update(ratio=1.001, rate=0.3)
    for _ in range(10):
        opt.step()
    assert passes == [1, 1]  # until there are two scales to guess from


def test_a_second_pass_is_needed_only_if_the_norm_jumps(passes):
    params, opt = steady()
    for _ in range(6):
        opt.step()
    passes.clear()
    for _ in range(5):
        opt.step()
    assert passes == []
    before = params[0].detach().norm().item()
    opt.param_groups[0]["ratio"] = 1.5
    opt.step()
    assert passes == [1]
    assert params[0].detach().norm().item() / before == pytest.approx(1.005, abs=1e-5)


def test_weights_that_are_not_controlled_are_those_of_adam_bit_for_bit():
    params, opt = steady(lr=0.01)
    bias = nn.Parameter(params[1].detach().clone())
    adam = torch.optim.Adam([bias], lr=0.01, fused=True)
    bias.grad = params[1].grad.clone()
    for _ in range(10):
        opt.step()
        adam.step()
    assert torch.equal(bias, params[1])


def test_steps_that_cannot_be_folded_are_right_too():
    """An overflow under GradScaler, a tensor without a gradient, and a learning rate of zero."""
    results = []
    for fused in (True, False):
        params, _ = steady()
        params.append(nn.Parameter(torch.ones(3, 3)))
        params[2].grad = torch.ones(3, 3)
        opt = AdamWN(params, lr=0.01, ratio=2.0, rate=0.1, fused=fused)
        for t in range(9):
            params[2].grad = None if t == 3 else torch.ones(3, 3)
            opt.param_groups[0]["lr"] = 0.0 if t == 5 else 0.01
            if t == 7:
                if fused:
                    opt.grad_scale, opt.found_inf = torch.tensor(1.0), torch.tensor(1.0)
                    opt.step()
                    del opt.grad_scale, opt.found_inf
                continue
            opt.step()
        results.append(params)
    for p, q in zip(*results, strict=True):
        assert torch.allclose(p, q, rtol=2e-6, atol=1e-7)


def test_a_factor_of_zero_is_applied():
    params, opt = steady()
    opt.param_groups[0].update(ratio=0.0, rate=1.0)
    opt.step()
    assert params[0].detach().norm().item() == 0
    opt.step()
    assert all(math.isfinite(p.detach().norm().item()) for p in params)
