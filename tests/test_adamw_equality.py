"""AdamW is a special case: order "before", ratio 0 and rate lr * weight_decay give
``torch.optim.AdamW``, bit for bit."""

from copy import deepcopy

import pytest
import torch
from small import SmallModel, eta, train, with_eta

from normcontrol import AdamWN, eta_times, lr_times

DECAY = 0.1
IMPLEMENTATIONS = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
implementations = pytest.mark.parametrize(
    "implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS
)


def decayed(model) -> list[dict]:
    """nanoGPT's two groups: matrices are decayed, the rest is not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def everything(model) -> list[dict]:
    return [{"params": list(model.parameters()), "weight_decay": DECAY, "controlled": True}]


def assert_same_bits(
    groups, steps=40, dtype=torch.float32, rate=None, scope="global", lr=3e-3, **settings
):
    theirs, ours = SmallModel(dtype), SmallModel(dtype)
    adamw = torch.optim.AdamW(groups(theirs), lr=deepcopy(lr), **settings)
    control = {"ratio": 0.0, "rate": rate or lr_times(DECAY), "order": "before", "scope": scope}
    adamwn = AdamWN(groups(ours), lr=deepcopy(lr), **settings, **control)
    schedulers = with_eta(adamw), with_eta(adamwn)
    for t in range(steps):
        for model, opt, scheduler in zip((theirs, ours), (adamw, adamwn), schedulers, strict=True):
            train(model, opt, range(t, t + 1), scheduler)
    assert not torch.equal(theirs.up.weight, SmallModel(dtype).up.weight)
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b), f"{name} differs by {(a - b).abs().max():g}"


@implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [decayed, everything])
def test_adamw_is_adamwn_at_ratio_0(implementation, dtype, groups):
    assert_same_bits(groups, dtype=dtype, **implementation)


@implementations
@pytest.mark.parametrize(
    "flags",
    [
        {"amsgrad": True},
        {"maximize": True},
        {"amsgrad": True, "maximize": True, "betas": (0.8, 0.95), "eps": 1e-6},
    ],
)
def test_it_holds_with_every_flag_of_adamw(implementation, flags):
    assert_same_bits(decayed, **implementation, **flags)


@pytest.mark.parametrize("implementation", ["for-loop", "fused"])
def test_it_holds_with_the_learning_rate_in_a_tensor(implementation):
    """AdamW itself refuses this for foreach without capturable."""
    assert_same_bits(decayed, lr=torch.tensor(3e-3), **IMPLEMENTATIONS[implementation])


@implementations
def test_it_holds_with_a_learning_rate_for_each_group(implementation):
    def groups(model):
        first, second = decayed(model)
        more = {"params": [first["params"].pop()], "weight_decay": DECAY, "lr": 1e-2}
        return [first, second, more]

    assert_same_bits(groups, scope="group", **implementation)


@implementations
@pytest.mark.parametrize("scope", ["group", "tensor", "row"])
def test_it_holds_in_every_scope_because_a_target_of_0_needs_no_norm(implementation, scope):
    assert_same_bits(decayed, scope=scope, **implementation)


@implementations
def test_the_adamw_papers_decay_is_a_rate_tied_to_the_schedule(implementation):
    """Line 13.b: theta <- (1 - eta_t * lambda) theta, which torch's AdamW does with weight_decay =
    lambda / initial lr."""
    lr, lam = 2.0**-8, 2.0**-6  # powers of two: their quotient and products are exact
    theirs, ours = SmallModel(), SmallModel()
    adamw = torch.optim.AdamW(
        [{"params": list(theirs.parameters())}], lr=lr, weight_decay=lam / lr, **implementation
    )
    groups = [{"params": list(ours.parameters()), "controlled": True}]
    adamwn = AdamWN(groups, lr=lr, ratio=0.0, rate=eta_times(lam), order="before", **implementation)
    for model, opt in ((theirs, adamw), (ours, adamwn)):
        train(model, opt, range(100), with_eta(opt))
    assert eta(50) not in (0.0, 1.0)
    assert all(
        torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True)
    )
