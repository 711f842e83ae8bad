"""The registry of methods: each one constructs, steps, resumes, and is in the documented table."""

from __future__ import annotations

import pytest
import torch
from definitions import BETAS, LR, trained, weights
from methods_table import PAGE, PLACE, table
from torch import nn

from normcontrol import NormControl, methods
from normcontrol.methods import METHODS, hidden


def test_every_method_steps():
    for name, method in METHODS.items():
        if name in ("MuonH", "Muown") and not hasattr(torch.optim, "Muon"):
            continue
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        groups = model if method.takes_model else hidden(model)
        for opt in method(
            groups, lr=1e-2, weight_decay=0.1, largest_logits=lambda p: torch.ones(2)
        ):
            for group in opt.param_groups:
                for p in group["params"]:
                    p.grad = torch.ones_like(p)
            opt.step()
        assert method.build.__doc__, name
        assert all(p.isfinite().all() for p in model.parameters()), name


@pytest.mark.parametrize(
    "name",
    [
        "CPR-WS",
        "CPR-IP",
        "CPR-kI0",
        "AdamH",
        "LAWN",
        "rotational",
        "cautious",
        "spectral",
        "NaP",
        "radial-brake",
        "relative-update",
        "update-floor",
        "AdamW-lr2",
    ],
)
def test_resuming_gives_the_same_bits(name, tmp_path):
    def make() -> tuple[list[nn.Parameter], NormControl]:
        params = weights(torch.float32)
        return params, METHODS[name](params, lr=LR, betas=BETAS, start=10, switch=10, n=3)[0]

    params, opt = make()
    trained(opt, params, steps=30)
    torch.save([opt.state_dict(), [p.detach() for p in params]], tmp_path / "half.pt")
    whole = trained(opt, params, steps=30)
    params, opt = make()
    state, values = torch.load(tmp_path / "half.pt", weights_only=True)
    opt.load_state_dict(state)
    with torch.no_grad():
        for p, value in zip(params, values, strict=True):
            p.copy_(value)
    for found, expected in zip(trained(opt, params, steps=30), whole, strict=True):
        assert torch.equal(found, expected)


def test_a_method_that_is_not_known_is_refused_with_advice():
    with pytest.raises(ValueError, match="There is no method 'hyperbola'"):
        methods.find("hyperbola")
    with pytest.raises(ValueError, match="Do you mean CPR-kI0"):
        methods.find("cpr-ki")


def test_parameters_in_place_of_a_model_are_refused():
    with pytest.raises(TypeError, match=r"looks at the modules of a model, but got a generator"):
        hidden(nn.Linear(4, 4).parameters())


def test_a_model_without_hidden_matrices_is_refused():
    with pytest.raises(ValueError, match="No matrix of the model counts as hidden"):
        hidden(nn.Embedding(4, 4))


def test_the_documented_table_is_made_from_the_registry():
    assert PLACE.search(PAGE.read_text()).group() == table()
