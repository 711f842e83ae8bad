"""Clipping within the step of AdamWN, on torch's own implementations."""

import copy
import re

import pytest
import torch
from torch import nn

from normcontrol import AdamWN


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("limit", [0.1, 1e6])
def test_it_is_clip_grad_norm_before_the_step(limit, fused):
    ours = [nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(3))]
    theirs = copy.deepcopy(ours)
    clipping = AdamWN(ours, fused=fused, max_grad_norm=limit)
    other = AdamWN(theirs, fused=fused)
    for step in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        norm = nn.utils.clip_grad_norm_(theirs, limit)
        clipping.step()
        other.step()
        assert clipping.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_without_gradients_has_nothing_to_clip(fused):
    p = nn.Parameter(torch.eye(3))
    opt = AdamWN([p], max_grad_norm=1.0, ratio=0.5, rate=1.0, fused=fused)
    opt.step()
    assert opt.grad_norm.item() == 0.0
    assert torch.allclose(p, 0.5 * torch.eye(3))  # control acts without gradients too


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), "1", torch.ones(2)])
def test_a_limit_that_is_not_positive_is_refused(limit):
    sentence = re.escape(f"max_grad_norm={limit!r}: ") + ".*Give a positive one, or None"
    with pytest.raises(ValueError, match=sentence):
        AdamWN([nn.Parameter(torch.eye(3))], max_grad_norm=limit)
    opt = AdamWN([nn.Parameter(torch.eye(3))], max_grad_norm=2.0)
    with pytest.raises(ValueError, match=sentence):
        opt.max_grad_norm = limit
    assert opt.max_grad_norm == 2.0
    opt.max_grad_norm = None
    assert opt.max_grad_norm is None


def test_gradients_that_are_no_longer_clipped_have_no_norm():
    p = nn.Parameter(torch.eye(3))
    opt = AdamWN([p], max_grad_norm=1.0)
    p.grad = torch.eye(3)
    opt.step()
    assert opt.grad_norm is not None
    opt.max_grad_norm = None
    opt.step()
    assert opt.grad_norm is None


def test_gradients_are_clipped_without_the_scale_of_gradscaler():
    params = [torch.nn.Parameter(torch.eye(3)) for _ in range(2)]
    scaled, plain = (AdamWN([p], lr=0.1, eps=1e-2, fused=True, max_grad_norm=0.5) for p in params)
    params[0].grad, params[1].grad = torch.full((3, 3), 1024.0), torch.ones(3, 3)
    scaled.grad_scale, scaled.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    scaled.step()
    plain.step()
    assert scaled.grad_norm.item() == pytest.approx(3.0)
    assert torch.allclose(*params)
