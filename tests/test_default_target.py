"""What AdamWN does when it is told nothing: it holds the norm that the weights have, or that of a
gain of 0.8 if they start smaller."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normcontrol import AdamWN, NormControl, linear, paper_ratio, set_norm_
from normcontrol.optax import parts
from normcontrol.target import HELD_GAIN


def stepped(model: nn.Module, **settings) -> AdamWN:
    opt = AdamWN(model.parameters(), lr=0.0, rate=1.0, **settings)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    return opt


@pytest.mark.parametrize(("start", "held"), [(0.2, 0.8), (0.8, 0.8), (1.5, 1.5)])
def test_small_weights_grow_to_a_gain_of_08_and_others_keep_their_norm(start, held):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    set_norm_(model, gain=start)
    stepped(model)
    norm = math.sqrt(sum(p.square().sum().item() for p in model.parameters() if p.dim() == 2))
    assert norm == pytest.approx(held * math.sqrt(16 + 4))


def test_weights_whose_outputs_are_not_known_keep_their_norm():
    stack = nn.Parameter(torch.full((2, 3, 4), 0.01))
    opt = stepped(nn.ParameterList([stack]))
    assert stack.norm().item() == pytest.approx(0.01 * math.sqrt(24))
    assert opt.norms()["global"].ratio.item() == pytest.approx(1.0)


def test_a_row_of_zeros_is_refused_as_for_a_ratio():
    p = nn.Parameter(torch.tensor([[1.0, 2.0], [0.0, 0.0]]))
    with pytest.raises(ValueError, match="has an initial norm of zero"):
        AdamWN([p], scope="row")


def test_control_that_starts_later_holds_the_norm_of_then_or_a_gain_of_08():
    for size, expected in ((0.01, 0.8 * 2), (5.0, 5.0 * 4 * 2)):
        p = nn.Parameter(torch.full((4, 4), 1.0))
        opt = NormControl(torch.optim.SGD([p], lr=0.0), rate=1.0, start=2)
        for step in range(4):
            if step == 1:
                p.data.fill_(size * 2)
            p.grad = torch.ones_like(p)
            opt.step()
        assert p.norm().item() == pytest.approx(expected)


def test_a_size_that_is_no_norm_is_held_as_it_is():
    p = nn.Parameter(0.1 * torch.eye(4))
    control = NormControl(
        torch.optim.SGD([p], lr=0.0), rate=1.0, size="spectral-exact", scope="tensor"
    )
    p.grad = torch.ones_like(p)
    control.step()
    assert p[0, 0].item() == pytest.approx(0.1)


def test_the_default_is_saved_and_read_back():
    p = nn.Parameter(0.01 * torch.ones(4, 4))
    opt = AdamWN([p], lr=0.0)
    other = AdamWN([nn.Parameter(torch.ones(4, 4))], lr=0.0, gain=1.0)
    other.load_state_dict(opt.state_dict())
    assert other.param_groups[0]["control"]["hold"] == 1.0


def test_the_papers_schedule_has_a_name():
    assert paper_ratio() == linear(1.0, 2.0, steps=2500)


def test_torch_and_jax_agree_on_the_gain():
    assert parts.HELD_GAIN == HELD_GAIN
