"""``set_norm_``: weights multiplied to a target once."""

import copy
import math

import pytest
import torch
from small import SmallModel, matrices, total_norm
from torch import nn
from torch.nn.utils import parametrizations, prune

from normcontrol import AdamWN, linear, param_groups, set_norm_


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({"gain": 0.8}, lambda weights: 0.8 * math.sqrt(sum(w.shape[0] for w in weights))),
        ({"norm": 3.0}, lambda weights: 3.0),
        ({"rms": 0.02}, lambda weights: 0.02 * math.sqrt(sum(w.numel() for w in weights))),
        ({"ratio": 2.0}, lambda weights: 2 * total_norm(weights)),
    ],
    ids=["gain", "norm", "rms", "ratio"],
)
def test_one_factor_brings_the_joint_norm_to_the_target(target, expected):
    model = SmallModel()
    before = copy.deepcopy(model)
    set_norm_(model, **target)
    norm = expected([w.detach() for w in matrices(before)])
    assert total_norm(matrices(model)) == pytest.approx(norm, rel=1e-7)
    factor = norm / total_norm(matrices(before))
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.allclose(p, q * factor if p.dim() > 1 else q, rtol=1e-6)


@pytest.mark.parametrize("scope", ["global", "tensor", "row", "col"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_second_call_changes_nothing(scope, dtype):
    model = SmallModel(dtype)
    set_norm_(model, gain=0.8, scope=scope)
    again = copy.deepcopy(model)
    set_norm_(again, gain=0.8, scope=scope)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_every_row_has_its_norm_exactly():
    model = SmallModel(torch.float64)
    set_norm_(model, gain=0.7, scope="row")
    for w in matrices(model):
        assert torch.allclose(
            w.norm(dim=1), torch.full((len(w),), 0.7, dtype=torch.float64), rtol=1e-14
        )


def test_parameters_and_groups_can_be_given_as_to_an_optimizer():
    model = SmallModel()
    set_norm_(model.named_parameters(), norm=2.0, controlled=lambda name, p: "embed" in name)
    assert model.embed.weight.norm().item() == pytest.approx(2.0)
    set_norm_([{"params": [model.up.weight], "norm": 5.0}], norm=1.0)
    assert model.up.weight.norm().item() == pytest.approx(5.0)


def test_a_schedule_stands_for_its_value_before_training():
    weight = nn.Parameter(torch.ones(4, 4))
    set_norm_(weight, norm=linear(3.0, 5.0, steps=10))
    assert weight.norm().item() == pytest.approx(3.0)


def test_gradients_and_modes_are_left_alone():
    model = SmallModel()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    set_norm_(model, gain=1.0)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())


def frozen() -> nn.Module:
    model = SmallModel()
    model.up.weight.requires_grad_(False)
    return model


def all_frozen() -> nn.Module:
    return SmallModel().requires_grad_(False)


def not_finite(value: float) -> nn.Module:
    model = SmallModel()
    model.up.weight.data[1, 2] = value
    return model


def zero() -> nn.Module:
    model = SmallModel()
    nn.init.zeros_(model.up.weight)
    return model


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        (SmallModel, {}, "set_norm_ needs a target"),
        (SmallModel, {"gain": 1.0, "norm": 2.0}, "norm and gain were both given"),
        (frozen, {"gain": 1.0}, "up.weight is frozen"),
        (all_frozen, {"gain": 1.0}, "embed.weight is frozen"),
        (lambda: [torch.ones(3, 3)], {"gain": 1.0}, "group0.tensor0 is frozen"),
        (lambda: not_finite(math.nan), {"gain": 1.0}, "up.weight has weights that are NaN or inf"),
        (lambda: not_finite(math.inf), {"rms": 1.0}, "up.weight has weights that are NaN or inf"),
        (
            lambda: not_finite(math.inf),
            {"rms": 1.0, "scope": "row"},
            "up.weight has weights that are NaN or inf",
        ),
        (zero, {"gain": 1.0}, "up.weight is zero, in whole or in a part"),
        (zero, {"norm": 1.0, "scope": "tensor"}, "up.weight is zero, in whole or in a part"),
        (lambda: nn.LayerNorm(4), {"norm": 1.0}, "nothing to set.*two or more dimensions"),
        (
            lambda: SmallModel().named_parameters(),
            {"norm": 1.0, "controlled": lambda name, p: False},
            "nothing to set.*selected by controlled=",
        ),
        (lambda: [torch.ones(3, 3)], {"gain": -1.0}, "gain=-1.0 takes the value -1"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_cannot_be_is_refused_and_nothing_changes(given, settings, message):
    model = given()
    before = copy.deepcopy(model) if isinstance(model, nn.Module) else None
    with pytest.raises(ValueError, match=message):
        set_norm_(model, **settings)
    if before is not None:
        pairs = zip(model.parameters(), before.parameters(), strict=True)
        assert all(torch.allclose(p, q, rtol=0, atol=0, equal_nan=True) for p, q in pairs)


COMPUTED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight_norm by a hook": nn.utils.weight_norm,
    "spectral_norm by a hook": nn.utils.spectral_norm,
    "pruning": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
}


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_weights_that_are_computed_from_others_are_refused_and_nothing_changes(name):
    """The stored tensors were set: the weight kept its norm, or had another one than the target."""
    model = nn.Sequential(nn.Linear(6, 8), COMPUTED[name](nn.Linear(8, 6))).eval()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"The model computes 1\.weight from 1\.\S*(orig|_g)"):
        set_norm_(model, norm=7.0)
    assert all(map(torch.equal, model.parameters(), before))
    set_norm_(model, norm=7.0, controlled=lambda name, p: name == "0.weight")
    assert model[0].weight.norm().item() == pytest.approx(7.0)
    set_norm_(param_groups(model, {"0.*": None}), norm=3.0)
    assert total_norm(matrices(model[1])) == pytest.approx(3.0)


def test_groups_stay_as_they_are():
    weight = nn.Parameter(torch.ones(4, 4))
    groups = [{"params": [weight], "weight_decay": 0.1, "lr": 1e-3}]
    for gain in (0.8, 2.0):
        set_norm_(groups, gain=gain)
        assert weight.norm().item() == pytest.approx(2 * gain)
    assert groups == [{"params": [weight], "weight_decay": 0.1, "lr": 1e-3}]


def test_the_tensors_of_a_group_are_still_there_if_they_were_an_iterator():
    model = nn.Linear(4, 4)
    groups = [{"params": model.named_parameters()}]
    set_norm_(groups, norm=1.0)
    assert [name for name, _ in groups[0]["params"]] == ["weight", "bias"]


def test_groups_that_decay_are_those_that_are_set():
    weight, bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    groups = [{"params": [weight], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]
    set_norm_(groups, norm=1.0)
    assert (weight.norm().item(), bias.norm().item()) == (1.0, 4.0)


def test_the_weights_of_a_running_optimizer_can_be_set():
    weight = nn.Parameter(torch.ones(4, 4))
    opt = AdamWN([weight], lr=1e-3, ratio=1.0, scope="row")
    weight.grad = torch.ones_like(weight)
    opt.step()
    set_norm_(opt.param_groups, norm=3.0)
    assert weight.norm(dim=1).tolist() == pytest.approx([3.0] * 4)  # the scope of the group
    control = opt.param_groups[0]["control"]
    assert (control["ratio"], int(control["step"]), control.get("norm")) == (1.0, 1, None)


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_a_single_tensor_is_one_tensor_and_not_a_list_of_its_rows(scope):
    weight = nn.Parameter(torch.randn(3, 4, 5))
    set_norm_(weight, norm=1.0, scope=scope)
    assert weight.norm().item() == pytest.approx(1.0)


@pytest.mark.parametrize("given", [None, "model", nn.Linear(2, 2).state_dict()])
def test_what_is_neither_a_model_nor_tensors_is_refused(given):
    with pytest.raises(TypeError, match="Give the model, such as set_norm_"):
        set_norm_(given, norm=1.0)
