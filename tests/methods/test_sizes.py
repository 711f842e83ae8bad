"""The methods that control another size than the norm against their definitions."""

from __future__ import annotations

import pytest
import torch
from definitions import ADAM, INITIAL, assert_close, by_definition, trained, weights

from normcontrol import methods


@pytest.mark.parametrize("cap", [False, True])
def test_spectral_norm_constant_and_bounded(cap):
    params = weights()

    def rule(w, u, lr, i, t):
        w = w - lr * u
        factor = 0.9 * torch.linalg.svdvals(INITIAL[i])[0] / torch.linalg.svdvals(w)[0]
        return w * (factor.clamp(max=1) if cap else factor)

    assert_close(
        trained(methods.spectral(params, ratio=0.9, cap=cap, exact=True, **ADAM), params),
        by_definition(rule),
    )


def test_the_spectral_norm_by_power_iteration_stays_near_its_target():
    params = weights()
    trained(methods.spectral(params, ratio=0.9, **ADAM), params)
    for p, initial in zip(params, INITIAL, strict=True):
        ratio = torch.linalg.svdvals(p.detach())[0] / torch.linalg.svdvals(initial)[0]
        assert ratio.item() == pytest.approx(0.9, rel=1e-3)


def test_qk_clip_scales_the_heads_whose_logits_are_too_large():
    params = weights()[:1]  # 6 rows: 3 heads of 2
    logits = torch.tensor([50.0, 150.0, 400.0])
    opt = methods.qk_clip(params, lambda p: logits, threshold=100.0, lr=0.0)
    before = params[0].detach().clone()
    params[0].grad = torch.zeros_like(before)
    # With lr=0 and gradients that are all zero, the step would count as a dry run of a checkpoint.
    params[0].grad[0, 0] = 1.0
    opt.step()
    factor = (100.0 / logits).clamp(max=1).sqrt().repeat_interleave(2)[:, None]
    assert_close([params[0].detach()], [before * factor])
