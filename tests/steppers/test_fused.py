"""The Triton kernels agree with Algorithm 1 of the paper, and in low precision on average."""

import copy
import math

import numpy as np
import pytest
import torch
from kernel_cases import (
    BETAS,
    CUDA,
    DEVICE,
    FEW,
    LR,
    RAGGED,
    STEPS,
    everything,
    gradients,
    here,
    kernels,
    run,
    slow_if_interpreted,
    tensors,
    worst,
)
from reference import algorithm_1
from torch import nn

from normcontrol import AdamWN, linear

pytest.importorskip("triton")
pytestmark = [pytest.mark.cuda] if CUDA else []


@here
@pytest.mark.parametrize(
    "shift", [pytest.param(0, marks=slow_if_interpreted), 1], ids=["aligned", "misaligned"]
)
@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_ragged_tensors_follow_algorithm_1(scope, order, shift):
    params = tensors(RAGGED if CUDA or not shift else FEW, shift=shift)
    theta = {str(i): p.detach().double().cpu().numpy().copy() for i, p in enumerate(params)}
    sharing = [list(theta.values())] if scope == "global" else [[w] for w in theta.values()]
    algorithm_1(
        theta,
        lambda _, t: {str(i): g.double().cpu().numpy() for i, g in enumerate(gradients(params, t))},
        STEPS,
        line="13.c", sharing=sharing, alpha=LR, beta1=BETAS[0], beta2=BETAS[1], order=order,
        r=lambda t: 1 + min(t / 5, 1), k=lambda t: 0.05,
    )  # fmt: skip
    opt = kernels(params, scope=scope, order=order, ratio=linear(1.0, 2.0, steps=5), rate=0.05)
    run(opt, params)
    assert opt.implementation == "Triton kernels"
    assert worst(params, [torch.from_numpy(w).to(DEVICE) for w in theta.values()]) < 1e-6
    if order == "after":
        true = math.sqrt(sum(np.sum(w**2) for w in theta.values()))
        got = (
            opt.norms()["global"].norm.item()
            if scope == "global"
            else math.sqrt(sum(r.norm.item() ** 2 for r in opt.norms().values()))
        )
        assert got == pytest.approx(true, rel=1e-6)


@here
@pytest.mark.parametrize("scope", ["group", "row", "col", (0,)])
def test_every_other_scope_matches_the_plain_stepper(scope):
    ours = [
        nn.Parameter(p.detach().reshape(-1, 8)) for p in tensors([8 * n for n in (1, 5, 64, 130)])
    ]
    theirs = copy.deepcopy(ours)
    settings = {"scope": scope, "ratio": 1.5, "rate": 0.1}
    run(kernels(ours, **settings), ours)
    run(AdamWN(everything(theirs), LR, BETAS, fused=False, **settings), theirs)
    assert worst(ours, theirs) < 1e-6


@here
@pytest.mark.parametrize(
    "options",
    [{"amsgrad": True}, {"maximize": True}, {"eps": 1e-3}, {"lr": torch.tensor(1e-3)}],
    ids=str,
)
def test_the_options_of_adam_match_torchs_implementation(options):
    ours = tensors()
    theirs = copy.deepcopy(ours)
    settings = {"lr": LR, "betas": BETAS, "ratio": 1.2, "rate": 0.1, **options}
    opt = AdamWN(everything(ours), fused=True, **settings)
    run(opt, ours)
    run(AdamWN(everything(theirs), fused=False, **settings), theirs)
    assert opt.implementation == "Triton kernels"
    assert worst(ours, theirs) < 1e-6


@here
def test_a_schedule_of_learning_rate_betas_and_eps_compiles_no_new_kernel():
    """OneCycleLR changes a beta at every step. If betas were constants of the kernels, a kernel
    would be compiled at every step."""
    ours = tensors()
    theirs = copy.deepcopy(ours)
    fast = kernels(ours, ratio=1.2, rate=0.1)
    plain = AdamWN(everything(theirs), LR, BETAS, fused=False, ratio=1.2, rate=0.1)
    for t in range(1, 5):
        for opt, params in ((fast, ours), (plain, theirs)):
            changed = {"lr": LR * t, "betas": (0.8 + 0.01 * t, 0.9 + 0.01 * t), "eps": 1e-8 * t}
            opt.param_groups[0].update(changed)
            run(opt, params, range(t, t + 1))
    assert worst(ours, theirs) < 1e-6
    assert [len(b.launches) for b in fast.stepper.plan.buckets] == [1]


@here
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_weights_are_scaled_right_on_average(dtype):
    """Equal weights are multiplied by a factor that changes them by a fraction of one unit in the
    last place."""
    params = [nn.Parameter(torch.full((4_000,), 1.5, dtype=dtype, device=DEVICE))]
    opt = kernels(params, ratio=0.0, rate=2e-4)
    opt.param_groups[0]["lr"] = 0.0
    run(opt, params, range(1, 5))
    mean, spread = params[0].double().mean().item(), params[0].double().std().item()
    assert torch.finfo(dtype).eps > 4e-4  # rounding to nearest would not change the weights
    assert mean == pytest.approx(1.5 * (1 - 2e-4) ** 4, abs=5 * spread / 63)
    assert spread > 0


@here
@pytest.mark.parametrize("order", ["after", "before"])
def test_adams_own_update_of_bf16_is_right_on_average(order):
    """Each step changes a weight by about a hundredth of one unit in the last place. Rounded to
    nearest, the weights would never change."""
    params = [nn.Parameter(torch.ones(4_000, dtype=torch.bfloat16, device=DEVICE))]
    opt = kernels(params, ratio=1.0, rate=0.0, order=order)
    opt.param_groups[0]["lr"] = 1e-4
    for _ in range(5):
        params[0].grad = torch.ones_like(params[0])
        opt.step()
    spread = params[0].double().std().item()
    assert params[0].double().mean().item() == pytest.approx(1 - 5e-4, abs=5 * spread / 63)
