"""Every implementation in the library is Algorithm 1: over 100 steps it agrees with
``reference.py``, which is written from the paper."""

from functools import cache

import numpy as np
import pytest
import torch
import torch._inductor.config
from reference import algorithm_1, shares
from small import MATRICES, SmallModel, eta, loss_at, train, with_eta

from normcontrol import AdamWN, NormControl, cosine, eta_times, linear, lr_times

STEPS = 100
LR, BETAS = 3e-3, (0.9, 0.95)
GROUPS = [MATRICES[:2], MATRICES[2:]]
RATIO, RATE = linear(1.0, 2.0, steps=50), cosine(0.05, 0.01, steps=75)


@cache
def reference(**settings) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """The weights after all steps, and the gradients of all steps."""
    theta = {
        name: p.detach().numpy().copy() for name, p in SmallModel(torch.float64).named_parameters()
    }
    model, met = SmallModel(torch.float64), []

    def gradient(theta, t):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(torch.from_numpy(theta[name]))
        model.zero_grad()
        loss_at(model, t).backward()
        met.append({name: p.grad.numpy().copy() for name, p in model.named_parameters()})
        return met[-1]

    sharing = shares(theta, GROUPS, settings.pop("scope"))
    algorithm_1(
        theta,
        gradient,
        STEPS,
        alpha=LR,
        beta1=BETAS[0],
        beta2=BETAS[1],
        eta=eta,
        sharing=sharing,
        **settings,
    )
    return theta, met


def paper_ratio(t: int) -> float:
    return 1 + min(t / 50, 1)


def paper_rate(t: int) -> float:
    return 0.01 + 0.04 * (1 + np.cos(np.pi * min(t / 75, 1))) / 2


def groups_of(model) -> list[dict]:
    """Two groups with matrices, biases and norm layers in each, so that the scopes "global" and
    "group" differ."""
    named = dict(model.named_parameters())
    second = [name for name in named if name.startswith("down") or name.startswith("norm")]
    return [
        {"params": [named[n] for n in named if n not in second]},
        {"params": [named[n] for n in second]},
    ]


PATHS = {
    "for-loop": lambda groups, **s: AdamWN(groups, LR, BETAS, foreach=False, **s),
    "foreach": lambda groups, **s: AdamWN(groups, LR, BETAS, foreach=True, **s),
    "fused": lambda groups, **s: AdamWN(groups, LR, BETAS, fused=True, **s),
    "NormControl around Adam": lambda groups, **s: NormControl(
        torch.optim.Adam(groups, LR, BETAS), **s
    ),
}


def assert_close(model, expected, rtol):
    for name, p in model.named_parameters():
        apart = np.abs(p.detach().double().numpy() - expected[name]).max()
        assert apart <= rtol * np.abs(expected[name]).max(), f"{name} is off by {apart:g}"


@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("scope", ["global", "group", "tensor", "row"])
@pytest.mark.parametrize("path", PATHS)
def test_line_13c_in_float64(path, scope, order):
    """The gradients are those at the library's own weights. Float64 rounds by 1e-16 in each step,
    which training may amplify; 1e-12 allows for a factor of a thousand."""
    model = SmallModel(torch.float64)
    opt = PATHS[path](groups_of(model), ratio=RATIO, rate=RATE, scope=scope, order=order)
    train(model, opt, range(1, STEPS + 1), with_eta(opt))
    expected, _ = reference(line="13.c", scope=scope, r=paper_ratio, k=paper_rate, order=order)
    assert_close(model, expected, 1e-12)


@pytest.mark.parametrize("scope", ["global", "row"])
@pytest.mark.parametrize("path", PATHS)
def test_line_13c_in_float32(path, scope):
    """The gradients are those of the reference, so that only the optimizer itself rounds. A step
    rounds the weights about three times by up to 2^-24; 300 independent roundings add up to
    sqrt(300) * 6e-8 = 1e-6 of the largest weight. Three times that is allowed."""
    expected, gradients = reference(line="13.c", scope=scope, r=paper_ratio, k=paper_rate)
    model = SmallModel(torch.float32)
    opt = PATHS[path](groups_of(model), ratio=RATIO, rate=RATE, scope=scope)
    scheduler = with_eta(opt)
    for g in gradients:
        for name, p in model.named_parameters():
            p.grad = torch.from_numpy(g[name]).float()
        opt.step()
        scheduler.step()
    assert_close(model, expected, 3e-6)


@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("line", "rate"), [("13.a", lr_times(0.5)), ("13.b", eta_times(0.01))])
def test_lines_13a_and_13b_are_ratio_0_with_a_rate_tied_to_the_learning_rate(
    line, rate, path, order
):
    model = SmallModel(torch.float64)
    opt = PATHS[path](groups_of(model), ratio=0.0, rate=rate, order=order)
    train(model, opt, range(1, STEPS + 1), with_eta(opt))
    expected, _ = reference(line=line, scope="global", lam=rate.factor, order=order)
    assert_close(model, expected, 1e-12)


# No processes to compile in, and code without vectors: to find out which ones the compiler knows
# takes as long as to compile the step.
@torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": False})
def test_a_compiled_step_is_algorithm_1():
    """Compiled, torch's Adam corrects its bias in float32 for weights of any dtype: each update of
    about lr is off by up to 2^-24 of itself, and 100 of them by 100 * 3e-3 * 6e-8 = 2e-8."""
    model = SmallModel(torch.float64)
    opt = AdamWN(
        groups_of(model), torch.tensor(LR, dtype=torch.float64), BETAS, ratio=RATIO, rate=RATE
    )
    scheduler = with_eta(opt)
    torch._dynamo.reset()
    train(model, opt, range(1, STEPS + 1), scheduler, step=torch.compile(opt.step))
    expected, _ = reference(line="13.c", scope="global", r=paper_ratio, k=paper_rate)
    assert_close(model, expected, 2e-8)


def test_the_reference_is_not_trivial():
    """Scopes, orders and lines end in different weights: agreeing with one of them means agreeing
    with no other."""
    ends = [
        reference(line="13.c", scope=scope, r=paper_ratio, k=paper_rate, order=order)[0]
        for scope in ("global", "group", "tensor", "row")
        for order in ("after", "before")
    ]
    ends += [reference(line=line, scope="global", lam=0.01)[0] for line in ("13.a", "13.b")]
    for i, one in enumerate(ends):
        for other in ends[:i]:
            assert max(np.abs(one[name] - other[name]).max() for name in MATRICES) > 1e-4
