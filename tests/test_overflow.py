"""A step that GradScaler skips because of an overflow teaches the controller nothing: laws and
starts with a memory keep it, and the run continues as if the step had not been tried."""

import pytest
import torch
from torch import nn

from normcontrol import AdamWN, NormControl, linear

MAKERS = {
    "plain": lambda params, **settings: NormControl(
        torch.optim.AdamW(params, lr=0.01, weight_decay=0.0, fused=True), **settings
    ),
    "folded": lambda params, **settings: AdamWN(params, lr=0.01, fused=True, **settings),
}
SETTINGS = {
    "integral": {"law": "integral", "ratio": 0.5, "rate": 1.0, "scope": "tensor"},
    "projection": {"law": "projection", "ratio": linear(1.0, 2.0, steps=4)},
    "start at a step": {"start": 2, "ratio": 1.5, "rate": 0.5},
    "start at the inflection": {"start": "inflection", "ratio": 1.5, "rate": 0.5},
}


def trained(make, settings, overflows: set[int]) -> tuple[list[torch.Tensor], list[dict]]:
    """Weights and the controller's entries after five steps; some are tried once more first, with
    an overflow. Without any, there is no GradScaler."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(n, 3, generator=generator)) for n in (2, 4)]
    opt = make(params, **settings)
    for t in range(5):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        for overflow in [1.0, 0.0] if t in overflows else [0.0]:
            if overflows:
                opt.grad_scale, opt.found_inf = torch.ones(()), torch.tensor(overflow)
            opt.step()
            assert not {"grad_scale", "found_inf"} & opt.optimizer.__dict__.keys()
    entries = [group["control"] for group in opt.state_dict()["param_groups"]]
    return [p.detach() for p in params], [
        {key: value for key, value in entry.items() if isinstance(value, torch.Tensor)}
        for entry in entries
    ]


@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_skipped_step_leaves_no_trace(make, name, order, monkeypatch):
    monkeypatch.setattr("normcontrol.mechanisms.start.SAMPLED_EVERY", 1)
    settings = {**SETTINGS[name], "order": order}
    weights, entries = trained(make, settings, overflows={1, 2, 4})
    expected, kept = trained(make, settings, overflows=set())
    assert all(torch.equal(p, q) for p, q in zip(weights, expected, strict=True))
    for entry, other in zip(entries, kept, strict=True):
        assert entry.keys() == other.keys()
        assert all(torch.equal(entry[key], other[key]) for key in entry)
