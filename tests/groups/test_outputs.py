"""Gains: the norm in units of sqrt(outputs), in every scope, and how outputs are counted."""

import math

import pytest
import torch
from small import SmallModel, matrices, total_norm
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

from normcontrol import AdamWN, NormControl, param_groups, set_norm_
from normcontrol.groups.outputs import split_by_outputs


def on_target(params, **settings) -> NormControl:
    opt = NormControl(torch.optim.SGD(params, lr=0.0), rate=1.0, **settings)
    opt.step()
    return opt


def weight(*shape) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(shape))


def test_the_joint_norm_is_the_gain_times_the_root_of_all_outputs():
    model = SmallModel()
    outputs = sum(p.shape[0] for p in matrices(model))
    on_target(model.parameters(), gain=0.8)
    assert total_norm(matrices(model)) == pytest.approx(0.8 * math.sqrt(outputs))


@pytest.mark.parametrize(
    ("shape", "scope", "expected"),
    [
        ((50, 8), "tensor", math.sqrt(50)),  # a linear layer, or an embedding of 50 tokens
        ((24, 8), "tensor", math.sqrt(24)),  # fused QKV counts all its outputs
        ((6, 4, 3, 3), "tensor", math.sqrt(6)),  # a convolution
        ((6, 4), "row", 1.0),
        ((6, 4), "col", math.sqrt(6 / 4)),
    ],
)
def test_every_part_has_its_share_of_the_outputs(shape, scope, expected):
    p = weight(*shape)
    readings = on_target([p], gain=1.0, scope=scope).norms()
    (reading,) = readings.values()
    assert torch.allclose(reading.norm, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("shape", "outputs", "count"),
    [((8, 24), 1, 24), ((4, 16, 8), (0, 1), 64), ((4, 8, 16), (0, 2), 64), ((8, 4, 3), 0, 8)],
    ids=["transposed", "experts", "experts transposed", "convolution of one dimension"],
)
def test_outputs_can_be_told(shape, outputs, count):
    p = weight(*shape)
    on_target([{"params": [p], "outputs": outputs}], gain=0.5)
    assert p.norm().item() == pytest.approx(0.5 * math.sqrt(count))


def test_stacked_experts_have_a_norm_each():
    p = weight(4, 16, 8)
    on_target([p], gain=0.5, scope=(0,), outputs=(0, 1))
    assert torch.allclose(p.flatten(1).norm(dim=1), torch.full((4,), 0.5 * 4.0))


def test_a_tied_tensor_counts_once():
    embed, head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
    head.weight = embed.weight
    on_target([{"params": [embed.weight]}], gain=1.0)
    assert embed.weight.norm().item() == pytest.approx(math.sqrt(50))


class Conv1D(nn.Module):
    """Hugging Face's linear layer: its weight is stored as (inputs, outputs)."""

    def __init__(self):
        super().__init__()
        self.weight = weight(8, 24)


def test_layouts_that_store_the_transpose_are_recognised_by_their_module():
    model = nn.Sequential(Conv1D(), nn.Linear(8, 4, bias=False), nn.ConvTranspose2d(8, 16, 3))
    groups = param_groups(model, {})
    on_target(groups, gain=1.0)
    assert total_norm(p for p in model.parameters() if p.dim() > 1) == pytest.approx(
        math.sqrt(24 + 4 + 16)
    )


class Product(nn.Module):
    """A parametrisation: a weight that is the product of two factors."""

    def forward(self, left, right):
        return left @ right

    def right_inverse(self, weight):
        return weight[:, :2].clone(), weight[:2].clone()


def parametrized_by_factors(module):
    return register_parametrization(module, "weight", Product())


class Upsampling(nn.ConvTranspose2d):
    """A subclass is recognised as its base is; FSDP2 makes such classes for what it shards."""


class Conv1DOfSignals(nn.Conv1d):
    """A convolution, whatever its name."""


Conv1DOfSignals.__name__ = "Conv1D"


@pytest.mark.parametrize(
    ("module", "outputs"),
    [
        (lambda: Upsampling(8, 16, 3), 16),
        (lambda: nn.ConvTranspose2d(8, 16, 3, groups=8), 16),
        (lambda: Conv1DOfSignals(8, 16, 3), 16),
        (lambda: nn.Bilinear(3, 4, 5), 5),
        (lambda: nn.Conv2d(8, 16, 3, groups=4), 16),
        (lambda: nn.MultiheadAttention(8, 2).in_proj_weight, 24),
    ],
    ids=["subclass", "one group an input", "Conv1D", "bilinear", "groups", "fused QKV"],
)
def test_modules_have_the_outputs_of_their_base(module, outputs):
    found = module()
    p = found if isinstance(found, nn.Parameter) else found.weight
    set_norm_([p] if found is p else found, gain=1.0)
    assert p.norm().item() == pytest.approx(math.sqrt(outputs))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (spectral_norm(nn.ConvTranspose2d(4, 64, 3)), [64]),
        (spectral_norm(nn.Linear(4, 6)), [6]),
        (weight_norm(nn.Conv1d(4, 6, 3)), [6, 6]),
        (weight_norm(nn.ConvTranspose1d(4, 6, 3), dim=1), [6, 6]),
        (weight_norm(nn.Linear(4, 6)), [6, 6]),
        (nn.utils.spectral_norm(nn.ConvTranspose2d(4, 64, 3)), [64]),
        (parametrized_by_factors(nn.Linear(4, 6)), [6, 2]),
    ],
)
def test_a_weight_that_is_computed_has_its_outputs_in_what_it_is_computed_from(module, expected):
    set_norm_(param_groups(module, {}), gain=1.0, scope="tensor")
    stored = [p for p in module.parameters() if p.dim() > 1]
    assert [p.norm().item() ** 2 for p in stored] == pytest.approx(expected)


def test_norms_of_inputs_have_no_axis_of_outputs():
    """Weight normalisation of a transposed convolution stores a norm for every input, unless it is
    told the axis of the outputs."""
    model = weight_norm(nn.ConvTranspose2d(4, 64, 3))
    with pytest.raises(ValueError, match=r"original0 has the shape \(4, 1, 1, 1\), and no axis"):
        set_norm_(model, gain=1.0)
    groups = param_groups(model, {})
    found = {name: g.get("outputs") for g in groups for name, _ in g["params"]}
    assert found == {
        "bias": None,
        "parametrizations.weight.original0": (),
        "parametrizations.weight.original1": (1,),
    }


def test_a_transposed_convolution_in_groups_has_no_axis_of_outputs():
    model = nn.Sequential(nn.ConvTranspose2d(8, 16, 3, groups=2), nn.Linear(4, 4))
    before = total_norm(p for p in model.parameters() if p.dim() > 1)
    with pytest.raises(ValueError, match=r"0.weight has the shape .* no axis that counts its outp"):
        set_norm_(model, gain=1.0)
    on_target(param_groups(model, {}))  # told nothing, the norm is held
    assert total_norm(p for p in model.parameters() if p.dim() > 1) == pytest.approx(before)


def test_a_module_with_the_name_of_another_needs_no_weight():
    class Conv1d(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(4, 6, 3)

    model = nn.Sequential(Conv1d(), nn.ConvTranspose1d(4, 2, 3))
    groups = param_groups(model, {})
    assert {g["params"][0][0]: g.get("outputs") for g in groups if "outputs" in g} == {
        "0.conv.weight": (0,),
        "1.weight": (1,),
    }


def test_what_is_told_holds_for_the_tensors_that_are_not_recognised():
    model = nn.Sequential(nn.Conv1d(4, 6, 3), nn.Linear(8, 5))
    with torch.no_grad():
        model[1].weight = nn.Parameter(model[1].weight.T.contiguous())
    set_norm_(model, gain=1.0, outputs=1)
    assert total_norm([model[0].weight, model[1].weight]) == pytest.approx(math.sqrt(6 + 5))


def test_groups_are_split_only_where_outputs_must_be_told():
    model = SmallModel()
    groups = [{"params": list(model.named_parameters())}]
    assert split_by_outputs(groups, model) == groups
    told = [{"params": [("weight", Conv1D().weight)], "outputs": 0}]
    assert split_by_outputs(told, Conv1D()) == told


def test_the_report_shows_the_gain_of_every_tensor():
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4))
    text = AdamWN(model.named_parameters()).report()
    (row,) = (line.split() for line in text.splitlines() if line.startswith("0.weight"))
    assert float(row[4]) == pytest.approx(model[0].weight.norm().item() / math.sqrt(32), abs=1e-4)
    (row,) = (line.split() for line in text.splitlines() if line.startswith("all of them"))
    joint = total_norm([model[0].weight, model[1].weight])
    assert float(row[5]) == pytest.approx(joint / math.sqrt(36), abs=1e-4)


def test_the_report_shows_no_gain_where_the_size_is_no_norm():
    opt = NormControl(
        torch.optim.SGD([weight(6, 4)], lr=0.0), size="spectral", scope="tensor", ratio=1.0
    )
    *_, row = opt.report().splitlines()
    assert row.split()[4] == "-"


def test_told_nothing_a_stack_of_vectors_is_no_stack_of_matrices():
    stacks = nn.Parameter(0.01 * torch.ones(4, 6, 8)), nn.Parameter(0.01 * torch.ones(4, 6))
    groups = [{"params": [p], "scope": "group", "outputs": (0, 1)} for p in stacks]
    opt = on_target(groups)
    raised, held = (reading.ratio.item() for reading in opt.norms().values())
    assert raised == pytest.approx(0.8 * math.sqrt(24) / (0.01 * math.sqrt(192)))
    assert held == pytest.approx(1.0)


def test_a_factor_that_starts_at_zero_does_not_raise_the_norm_of_the_other_one():
    """An adapter: the rows of B are many, and its norm is zero."""
    a, b = weight(8, 64), nn.Parameter(torch.zeros(1024, 8))
    opt = AdamWN([a, b], lr=1e-4)
    assert opt.norms()["global"].target.item() == pytest.approx(a.detach().norm().item())
    alone = AdamWN([nn.Parameter(torch.zeros(4, 8))], lr=1e-4)
    assert alone.norms()["global"].target.item() == pytest.approx(0.8 * 2)


def test_a_joint_ratio_to_zeros_alone_is_refused():
    zeros = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="has an initial norm of zero, and scope='global' has no"):
        NormControl(torch.optim.SGD([zeros], lr=0.1), ratio=1.0)


@pytest.mark.parametrize("axes", [(0, 0), (7,)])
def test_axes_of_outputs_that_a_tensor_lacks_are_refused_without_a_gain_too(axes):
    with pytest.raises(ValueError, match="names an axis"):
        AdamWN([weight(4, 6)], outputs=axes)


def test_a_gain_survives_a_checkpoint():
    p = weight(6, 4)
    opt = on_target([p], gain=1.0, outputs=1)
    other = NormControl(torch.optim.SGD([weight(6, 4)], lr=0.0))
    other.load_state_dict(opt.state_dict())
    assert other.norms()["global"].target.item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("shape", "settings", "message"),
    [
        ((6,), {"controlled": True}, r"group0.tensor0 has the shape \(6,\): it has no inputs"),
        ((), {"controlled": True}, "it has no inputs"),
        ((4, 6, 8), {}, r"the outputs cannot be known: give outputs=0 .* convolution"),
        ((4, 6), {"outputs": 2}, r"outputs=\(2,\) names an axis that group0.tensor0 does not have"),
        ((4, 6), {"outputs": "rows"}, "outputs='rows' is not known"),
        ((4, 6), {"outputs": (True,)}, r"outputs=\(True,\) is not known"),
        ((4, 6), {"outputs": (0, -2)}, r"outputs=\(0, -2\) names an axis of .* twice"),
        ((4, 6), {"outputs": (0, 1)}, r"outputs=\(0, 1\) names every axis of group0.tensor0"),
        ((4, 6), {"ratio": 1.0}, "ratio and gain were both given"),
        ((4, 6), {"gain": -1.0}, "gain=-1.0 takes the value -1: a norm cannot be negative"),
        ((4, 6), {"gain": math.nan}, "gain=nan takes the value nan"),
        ((4, 6), {"gain": math.inf}, "gain=inf takes the value inf"),
        ((4, 6), {"size": "spectral", "scope": "tensor"}, "a ratio or norm as target"),
    ],
)
def test_what_cannot_be_is_refused(shape, settings, message):
    with pytest.raises(ValueError, match=message):
        NormControl(torch.optim.SGD([weight(*shape)], lr=0.0), **{"gain": 0.8, **settings})
