"""Hyperball and rotational AdamW against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from definitions import (
    ADAM,
    BETAS,
    INITIAL,
    assert_close,
    by_definition,
    rows,
    trained,
    weights,
)
from torch import nn

from normcontrol import methods
from normcontrol.methods import hidden

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


def test_adamh_turns_every_matrix_by_the_learning_rate():
    params = weights()

    def rule(w, u, lr, i, t):
        radius = INITIAL[i].norm()
        moved = w - lr * radius * u / u.norm()
        return radius * moved / moved.norm()

    assert_close(trained(methods.adamh(params, **ADAM), params), by_definition(rule))


@needs_muon
def test_muonh():
    """Muon's update does not depend on the weights, so torch's own Muon on a twin gives u."""
    model = nn.ModuleDict({"wte": nn.Embedding(5, 4), "fc": nn.Linear(4, 6)})
    controlled, adam = methods.muonh(hidden(model), lr=0.05)
    w, radius = model["fc"].weight.detach().clone(), model["fc"].weight.detach().norm()
    twin = nn.Parameter(torch.zeros_like(w))
    muon = torch.optim.Muon([twin], lr=0.05, weight_decay=0.0, momentum=0.95)
    before = model["wte"].weight.detach().clone()
    for step in range(20):
        grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(step))
        start = twin.detach().clone()
        twin.grad = grad.clone()
        muon.step()
        u = start - twin.detach()
        moved = w - 0.05 * radius * u / u.norm()
        w = radius * moved / moved.norm()
        model["fc"].weight.grad = grad.clone()
        model["wte"].weight.grad = torch.ones(5, 4)
        controlled.step()
        adam.step()
    assert_close([model["fc"].weight.detach()], [w], 1e-5)
    assert not torch.equal(model["wte"].weight, before)
    assert list(controlled.norms()) == ["fc.weight"]


def test_rotational_adamw():
    params = weights()

    def rule(w, u, lr, i, t):
        radius = rows(INITIAL[i])
        turn = math.sqrt(2 * lr * 0.4 * (1 - BETAS[0]) / (1 + BETAS[0]))
        moved = w - turn * radius * u / rows(u)
        return radius * moved / rows(moved)

    assert_close(
        trained(methods.rotational(params, weight_decay=0.4, **ADAM), params), by_definition(rule)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: methods.muonh([{"params": [nn.Parameter(torch.ones(3))], "controlled": True}]),
            "MuonH controls matrices, but a tensor has",
        ),
        (lambda: methods.muonh(nn.Linear(2, 2).parameters()), r"muonh\(hidden\(model\)\)"),
    ],
)
def test_muonh_refuses_other_groups_than_those_of_hidden(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
