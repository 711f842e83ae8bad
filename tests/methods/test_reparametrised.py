"""Muown and weight normalisation, which train norms and directions of rows."""

from __future__ import annotations

import copy

import pytest
import torch
from definitions import assert_close, rows
from torch import Tensor, nn
from torch.nn import functional as F

from normcontrol import methods

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


def by_definition(w: Tensor, gradient, steps: int, lr: float, decay: float) -> Tensor:
    """Muown from its rule. Muon's update does not depend on the weights, so that torch's own Muon
    on a twin gives it."""
    g, v = rows(w), w.clone()
    mean, square = torch.zeros_like(g), torch.zeros_like(g)
    twin = nn.Parameter(torch.zeros_like(w))
    muon = torch.optim.Muon([twin], lr=lr, weight_decay=0.0, momentum=0.9, nesterov=False,
                            adjust_lr_fn="match_rms_adamw")  # fmt: skip
    for t in range(1, steps + 1):
        unit = v / rows(v)
        grad = gradient(g * unit)
        grad_g = (grad * unit).sum(1, keepdim=True)
        start = twin.detach().clone()
        twin.grad = g / rows(v) * (grad - unit * grad_g)
        muon.step()
        v = v + twin.detach() - start
        mean = 0.9 * mean + 0.1 * grad_g
        square = 0.95 * square + 0.05 * grad_g**2
        update = mean / (1 - 0.9**t) / ((square / (1 - 0.95**t)).sqrt() + 1e-8)
        g = g - lr * decay * g - lr * update
    return g * v / rows(v)


@needs_muon
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_muown_trains_row_norms_with_adam_and_directions_with_muon(decay):
    torch.manual_seed(0)
    model = nn.ModuleDict({"fc": nn.Linear(5, 4, bias=False), "head": nn.Linear(4, 2)})
    initial, x, y = model["fc"].weight.detach().clone(), torch.randn(9, 5), torch.randn(9, 4)

    def gradient(w: Tensor) -> Tensor:
        w = w.clone().requires_grad_()
        return torch.autograd.grad(F.mse_loss(x @ w.T, y), w)[0]

    optimizers = methods.muown(model, lr=0.02, momentum=0.9, weight_decay=decay)
    assert [len(opt.param_groups[0]["params"]) for opt in optimizers] == [1, 1, 2]
    for _ in range(20):
        F.mse_loss(model["fc"](x), y).backward()
        for opt in optimizers:
            opt.step()
            opt.zero_grad()
    expected = by_definition(initial, gradient, 20, 0.02, decay)
    assert (expected - initial).norm() > 0.1 * initial.norm()
    assert_close([model["fc"].weight.detach()], [expected], 1e-4)


@needs_muon
def test_muown_trains_only_hidden_matrices_in_that_way():
    model = nn.ModuleDict(
        {"wte": nn.Embedding(5, 4), "fc": nn.Linear(4, 6), "lm_head": nn.Linear(6, 5)}
    )
    methods.muown(model)
    assert [name for name in model if hasattr(model[name], "parametrizations")] == ["fc"]


def test_weight_normalisation_keeps_the_norms_of_the_directions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    x = torch.randn(32, 4)
    opt = methods.weight_normalised(model, lr=1e-2)
    assert torch.allclose(model(x), twin(x), atol=1e-6)
    directions = [m.parametrizations.weight.original1 for m in (model[0], model[2])]
    before = [rows(v.detach()).clone() for v in directions]
    for _ in range(20):
        opt.zero_grad()
        (model(x) - 1).square().mean().backward()
        opt.step()
    for v, norm in zip(directions, before, strict=True):
        assert torch.allclose(rows(v.detach()), norm, rtol=1e-6)
    assert not torch.allclose(model[0].weight, twin[0].weight, atol=1e-2)


@pytest.mark.parametrize("method", [methods.weight_normalised, methods.muown])
def test_rows_of_zeros_have_no_direction_and_are_refused(method):
    if method is methods.muown and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    model = nn.ModuleDict({"fc": nn.Linear(3, 3), "proj": nn.Linear(3, 3)})
    nn.init.zeros_(model["proj"].weight)
    with pytest.raises(
        ValueError, match=r"proj\.weight has rows of zeros, which have no direction"
    ):
        method(model)
    assert not hasattr(model["fc"], "parametrizations")  # nothing was changed


@pytest.mark.parametrize("method", [methods.weight_normalised, methods.muown])
def test_parameters_in_place_of_a_model_are_refused(method):
    with pytest.raises(TypeError, match="it needs the model, not list"):
        method(list(nn.Linear(2, 2).parameters()))


@pytest.mark.parametrize(
    ("method", "second"),
    [
        (methods.weight_normalised, nn.Embedding(3, 3)),
        (methods.weight_normalised, nn.Linear(3, 3)),
        pytest.param(methods.muown, nn.Linear(3, 3), marks=needs_muon),
    ],
)
def test_weights_that_would_no_longer_be_tied_are_refused(method, second):
    model = nn.ModuleDict({"alone": nn.Linear(3, 3), "first": nn.Linear(3, 3), "second": second})
    second.weight = model["first"].weight
    kind = type(second).__name__
    with pytest.raises(
        ValueError, match=rf"first\.weight is shared by several modules \(Linear, {kind}\), and"
    ):
        method(model)
    assert not hasattr(model["alone"], "parametrizations")  # nothing was changed


def test_a_head_that_is_tied_to_an_embedding_before_it_is_left_alone():
    model = nn.ModuleDict({"wte": nn.Embedding(5, 4), "fc": nn.Linear(4, 4)})
    model["head"] = nn.Linear(4, 5, bias=False)
    model["head"].weight = model["wte"].weight
    methods.weight_normalised(model)
    assert model["head"].weight is model["wte"].weight
    assert hasattr(model["fc"], "parametrizations")


@pytest.mark.parametrize(
    ("method", "layer"),
    [
        (methods.weight_normalised, "linear or convolutional layer"),
        pytest.param(methods.muown, "hidden linear layer", marks=needs_muon),
    ],
)
def test_a_model_without_such_layers_is_refused(method, layer):
    model = nn.Bilinear(3, 3, 3)
    with pytest.raises(ValueError, match=f"The model, Bilinear, has no {layer} whose weight"):
        method(model)
