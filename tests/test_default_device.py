"""``torch.set_default_device`` is for the user's tensors: what the library computes on the host stays
there. The meta device stands for an accelerator: what is made on it by mistake cannot be read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normcontrol import AdamWN, NormControl, linear, predict, recipes, trace

SETTINGS = {
    "schedule": {"ratio": linear(1.0, 2.0, steps=5)},
    "function": {"ratio": lambda step: 1 + step / 10, "rate": 0.5},
    "recorded": {"ratio": trace([1.0, 2.0], [0, 3])},
    "rows": {"scope": "row", "start": 2},
    "integral": {"law": "integral", "scope": "tensor", "ratio": 0.5, "rate": 1.0},
    "own law": {"law": lambda norm, target, rate: 1 - rate * (1 - target / norm)},
    "own size": {"size": lambda p: p.abs().max(), "norm": 1.0},
    "spectral": {"size": "spectral", "scope": "tensor", "ratio": 1.5},
    "step length": {"relative_step": 0.1},
    "cautious": {"cautious": True, "ratio": 0.5},
}


def trained(settings, device: str) -> tuple[list[torch.Tensor], dict]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in ((400, 300), (5, 4))]
    params = [nn.Parameter(w) for w in weights]
    fused = settings == "folded"
    own = {} if fused else SETTINGS[settings]
    opt = AdamWN(params, fused=True) if fused else NormControl(torch.optim.SGD(params), **own)

    def step() -> None:
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, device="cpu")
        opt.step()

    if fused:
        step()  # Adam's own state is made on the default device
    with torch.device(device):
        for _ in range(4):
            step()
        opt.report()
        opt.state_dict()
        return [p.detach() for p in params], opt.norms()


@pytest.mark.filterwarnings("ignore:The trace ends")
@pytest.mark.parametrize("settings", [*SETTINGS, "folded"])
def test_a_step_is_the_same_whatever_the_default_device_is(settings):
    (ours, found), (theirs, expected) = (trained(settings, device) for device in ("meta", "cpu"))
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    for name, reading in found.items():
        assert all(map(torch.equal, reading, expected[name]))


def test_predictions_are_the_same_whatever_the_default_device_is():
    model = nn.Linear(8, 8)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD(model.parameters()), 9)

    def numbers():
        plan = predict.adamw(model, linear(0.1, 0.0, steps=9), 0.1, steps=9)
        by_scheduler = predict.adamw(model, cosine, 0.1, steps=9)
        decay = predict.decay_for(model, 0.5 * (1 + plan.ratio), 0.1, steps=9)
        return plan.ratios, by_scheduler.ratio, decay, recipes.adamc(plan, "update").settings

    expected = numbers()
    with torch.device("meta"):
        assert numbers() == expected
        assert linear(1.0, 2.0, steps=4)(2) == 1.5
