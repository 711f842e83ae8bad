"""Settings that are edited in ``param_groups``: each is checked and takes effect at the next step,
or the step refuses it and changes nothing."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from normcontrol import AdamWN, NormControl, linear
from normcontrol.groups.settings import FIXED, setting_names
from normcontrol.target import RELATIVE, TARGETS

WEIGHT = torch.linspace(-1, 2, 12).reshape(3, 4)
BASE = {"norm": 3.0, "rate": 0.5, "scope": "tensor"}
OTHER = {
    "ratio": 1.5,
    "norm": 5.0,
    "rms": 0.25,
    "gain": 0.8,
    "hold": 1.5,
    "rate": 0.25,
    "law": "upper",
    "order": "before",
    "relative_step": 0.1,
    "min_relative_step": 0.1,
    "cautious": True,
    "scope": "global",
    "controlled": True,
    "outputs": (1,),
    "size": "spectral",
    "start": 5,
}
"""Another value that can be given for every setting, in place of the one in BASE."""
WRONG = {
    "ratio": -1.0,
    "norm": float("nan"),
    "rms": -0.1,
    "gain": -0.1,
    "hold": -0.1,
    "rate": 1.5,
    "law": "sideways",
    "order": "sideways",
    "relative_step": "sideways",
    "min_relative_step": "sideways",
    "cautious": "sideways",
    "scope": "sideways",
    "controlled": "sideways",
    "outputs": "sideways",
    "size": "sideways",
    "start": -1,
}
"""A value that no setting can have."""


def optimizer(weight: torch.Tensor, **settings) -> tuple[nn.Parameter, NormControl]:
    p = nn.Parameter(weight.clone())
    return p, NormControl(torch.optim.SGD([p], lr=0.1), **settings)


def step(p: nn.Parameter, opt: NormControl) -> None:
    p.grad = torch.arange(12.0).reshape(p.shape) / 10
    opt.step()


def trained(steps: int = 2) -> tuple[nn.Parameter, NormControl]:
    p, opt = optimizer(WEIGHT, **BASE)
    for _ in range(steps):
        step(p, opt)
    return p, opt


def edit(opt: NormControl, name: str, value, flat: bool) -> None:
    group = opt.param_groups[0]
    (group if flat else group["control"])[name] = value


def test_every_setting_has_a_case_here():
    assert set(OTHER) == set(WRONG) == set(setting_names())


FLAT = pytest.mark.parametrize("flat", [True, False], ids=["in the group", "in group['control']"])
WHEN = {"before the first step": 0, "later": 2}
TAKEN = [
    pytest.param(name, steps, id=f"{name} {when}")
    for name in OTHER
    for when, steps in WHEN.items()
    if steps == 0 or name not in FIXED
]
REFUSED = [
    pytest.param(name, value, steps, id=f"{name}={value!r} {when}")
    for when, steps in WHEN.items()
    for name, value in [*WRONG.items(), *((name, OTHER[name]) for name in FIXED if steps)]
]


@FLAT
@pytest.mark.parametrize(("name", "steps"), TAKEN)
def test_an_edited_setting_takes_effect_at_the_next_step(name, steps, flat):
    p, opt = trained(steps)
    is_relative = name in RELATIVE  # to the reference of the first optimizer
    other = OTHER | {"norm": 1.5 * float(WEIGHT.norm())} if is_relative else OTHER
    if name == "start":  # which needs a ratio
        opt.param_groups[0]["control"]["ratio"] = 1.0
    settings = {
        k: v for k, v in BASE.items() if k not in TARGETS or name not in (*TARGETS, "start")
    }
    settings["norm" if is_relative else name] = other["norm" if is_relative else name]
    if name == "start":
        settings["ratio"] = 1.0
    fresh, expected = optimizer(p.detach(), **settings)
    edit(opt, name, OTHER[name], flat)
    step(p, opt)
    step(fresh, expected)
    assert torch.allclose(p, fresh, rtol=1e-6, atol=0)
    assert name not in opt.param_groups[0]
    assert opt.param_groups[0]["control"][name] == OTHER[name]


@FLAT
@pytest.mark.parametrize(("name", "value", "steps"), REFUSED)
def test_a_value_that_cannot_be_is_refused_and_nothing_changes(name, value, steps, flat):
    p, opt = trained(steps)
    undisturbed = copy.deepcopy((p, opt))
    edit(opt, name, value, flat)
    for _ in range(2):  # it is refused until it is corrected
        with pytest.raises((ValueError, TypeError), match=name):
            step(p, opt)
        assert torch.equal(p, undisturbed[0])
    if flat:
        del opt.param_groups[0][name]
    elif BASE.get(name) is None and name in TARGETS:
        del opt.param_groups[0]["control"][name]
    else:
        edit(opt, name, undisturbed[1].param_groups[0]["control"][name], flat)
    step(p, opt)
    step(*undisturbed)
    assert torch.equal(p, undisturbed[0])


def build_again(opt: NormControl, how: str) -> NormControl:
    """Let the controller sort its weights again, before the next step."""
    if how == "a copy":
        return copy.deepcopy(opt)
    more = nn.Parameter(torch.ones(2, 2))
    more.grad = torch.zeros(2, 2)
    if how == "another tensor":
        opt.param_groups[0]["params"].append(more)
    elif how == "a tensor in place of another":
        opt.param_groups[0]["params"][0].grad = None
        opt.param_groups[0]["params"][0] = more
    elif how == "another group":
        opt.add_param_group({"params": [more]})
    return opt


@pytest.mark.parametrize("steps", WHEN.values(), ids=WHEN)
@pytest.mark.parametrize(
    "how", ["a copy", "another tensor", "a tensor in place of another", "another group", "nothing"]
)
def test_an_edit_is_checked_whatever_else_changes(how, steps):
    """Each of these sorts the weights again, which must not pass for a check of the settings."""
    _, opt = trained(steps)
    opt.param_groups[0]["control"]["order"] = "sideways"
    with pytest.raises(ValueError, match="order='sideways' is not known"):
        build_again(opt, how).step()
    _, opt = trained(steps)
    opt.param_groups[0]["control"]["rate"] = lambda t: 0.25
    opt = build_again(opt, how)
    opt.step()
    assert float(opt.param_groups[0]["control"]["rate"](7)) == 0.25


@pytest.mark.parametrize(
    ("edits", "sentence"),
    [
        ({"scope": (0, 5)}, "axes"),
        ({"scope": "group", "size": "spectral"}, "belongs to a single matrix"),
        ({"start": 5}, "Give a ratio"),
        ({"controlled": 3}, "controlled"),
    ],
    ids=str,
)
def test_what_can_be_changed_until_the_first_step_is_checked_there(edits, sentence):
    p, opt = trained(0)
    for name, value in edits.items():
        opt.param_groups[0]["control"][name] = value
    for _ in range(2):
        with pytest.raises((ValueError, TypeError), match=sentence):
            step(p, opt)
    assert torch.equal(p, WEIGHT)


def test_a_first_step_that_is_refused_leaves_the_reference_to_the_next_one():
    p, opt = optimizer(WEIGHT, ratio=1.0, rate=1.0)
    opt.param_groups[0]["control"]["order"] = "sideways"
    with pytest.raises(ValueError, match="order"):
        step(p, opt)
    opt.param_groups[0]["control"]["order"] = "after"
    with torch.no_grad():
        p.mul_(3)  # such as weights that are loaded
    before = p.norm().item()
    step(p, opt)
    assert p.norm().item() == pytest.approx(before)


@pytest.mark.parametrize("steps", WHEN.values(), ids=WHEN)
def test_an_entry_that_is_held_can_be_edited_again(steps):
    p, opt = trained(steps)
    held = opt.param_groups[0]["control"]
    for rate in (0.3, 1.5, 0.2, 0.1):
        held["rate"] = rate
        if rate > 1:
            with pytest.raises(ValueError, match="rate"):
                step(p, opt)
            continue
        step(p, opt)
        assert opt.param_groups[0]["control"] is held
        assert held["rate"] == rate


def test_a_name_that_is_no_setting_is_refused_at_once():
    _, opt = trained()
    with pytest.raises(KeyError, match=r"'ration' is no setting of norm control.*ratio, norm"):
        opt.param_groups[0]["control"]["ration"] = 2.0
    with pytest.raises(KeyError, match=r"'ration' is no setting of norm control.*ratio, norm"):
        opt.param_groups[0]["control"] |= {"ration": 2.0}


@pytest.mark.parametrize("several", [torch.tensor([0.1, 0.2]), np.array([0.1, 0.2])])
def test_several_numbers_in_place_of_one_are_refused_at_once(several):
    """The comparison with the last settings failed inside torch, at the next step."""
    _, opt = trained()
    with pytest.raises(ValueError, match=r"rate=.* is 2 numbers, but a group has one. Give a gro"):
        opt.param_groups[0]["control"]["rate"] = several


def test_groups_that_share_a_norm_are_edited_together():
    params = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3, 3))]
    opt = AdamWN([{"params": [p]} for p in params], ratio=1.0, rate=1.0)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.param_groups[1]["control"]["ratio"] = 2.0
    with pytest.raises(ValueError, match=r"share the global norm, but have ratio=1\.0 and 2\.0"):
        opt.step()
    opt.param_groups[0]["control"]["ratio"] = 2.0
    opt.step()
    assert opt.norms()["global"].ratio.item() == pytest.approx(2.0)


def test_an_edit_takes_effect_in_a_compiled_step_too():
    p, opt = trained()
    same, eager = copy.deepcopy((p, opt))
    compiled = torch.compile(opt.step, backend="eager")
    for group in (opt.param_groups[0], eager.param_groups[0]):
        group["control"]["law"] = "upper"
        group["control"]["norm"] = 2.0
    p.grad = same.grad = torch.arange(12.0).reshape(p.shape) / 10
    for _ in range(2):
        compiled()
        eager.step()
    for group in (opt.param_groups[0], eager.param_groups[0]):
        group["control"]["norm"] = 1.0
    compiled()
    eager.step()
    assert torch.allclose(p, same, rtol=1e-6)


def test_an_edited_target_that_suits_no_tensor_is_refused():
    conv = nn.Conv1d(4, 8, 3, bias=False)
    opt = AdamWN(conv.parameters(), ratio=1.0, rate=0.5)
    opt.param_groups[0]["control"]["gain"] = 1.0
    conv.weight.grad = torch.ones_like(conv.weight)
    with pytest.raises(ValueError, match="the outputs cannot be known: give outputs=0"):
        opt.step()


def test_several_settings_at_a_time_are_checked_by_name():
    opt = AdamWN([nn.Parameter(WEIGHT.clone())], ratio=1.0)
    with pytest.raises(KeyError, match="'ratoi' is no setting of norm control"):
        opt.param_groups[0]["control"].update(rate=0.2, ratoi=3.0)


def test_edited_axes_of_outputs_that_cannot_be_are_refused():
    weight = nn.Parameter(WEIGHT.clone())
    opt = AdamWN([weight], gain=1.0)
    opt.param_groups[0]["control"]["outputs"] = (0, 0)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match=r"names an axis"):
        opt.step()


def test_a_ratio_to_rows_of_zeros_is_refused_when_it_is_edited_in():
    weight = nn.Parameter(torch.zeros(3, 4))
    opt = NormControl(torch.optim.SGD([weight], lr=0.1), norm=1.0, scope="row")
    weight.grad = torch.ones_like(weight)
    opt.step()
    opt.param_groups[0]["control"]["ratio"] = 1.0
    with pytest.raises(ValueError, match="has an initial norm of zero"):
        opt.step()


@pytest.mark.parametrize("steps", WHEN.values(), ids=WHEN)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [
        ("norm", linear(1, 2, steps=1), "linear(start=1, end=2, steps=1)"),
        ("norm", "linear(1, 2, steps=1)", "linear(start=1, end=2, steps=1)"),
        ("rate", lambda step: 0.5, "custom('<lambda>')"),
        ("law", lambda norm, target, rate: target / norm, "law('<lambda>')"),
    ],
)
def test_a_state_that_is_saved_before_an_edit_is_used_can_be_loaded(
    name, value, stored, flat, steps, tmp_path
):
    p, opt = trained(steps)
    if flat:
        opt.param_groups[0][name] = value
    else:
        opt.param_groups[0]["control"][name] = value
    torch.save(opt.state_dict(), tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert saved["param_groups"][0]["control"][name] == stored
    before = p.detach().clone()
    step(p, opt)
    assert not torch.equal(p, before)
    opt.load_state_dict(saved)
    with torch.no_grad():
        after = p.clone()
        p.copy_(before)
    step(p, opt)
    assert torch.equal(p, after)


def test_a_wrong_edit_is_refused_when_the_state_is_saved():
    p, opt = trained(1)
    opt.param_groups[0]["control"]["order"] = "sideways"
    with pytest.raises(ValueError, match="order='sideways' is not known"):
        opt.state_dict()
    opt.param_groups[0]["control"]["order"] = "after"
    opt.state_dict()
    step(p, opt)


def test_a_setting_that_was_deleted_can_be_read_and_printed():
    _, opt = trained(0)
    del opt.param_groups[0]["control"]["norm"]
    assert [reading.target.item() for reading in opt.norms().values()] == [3.0]
    assert "control: rate=0.5" in repr(opt)
    assert opt.state_dict()["param_groups"][0]["control"]["norm"] == 3.0
