"""Invalid input is refused with a sentence that says what was given, why it is invalid, and what to
do instead. Corner cases that are valid work."""

import copy
import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from small import SmallModel, loss_at, train
from torch.nn import Parameter

from normcontrol import (
    AdamWN,
    NormControl,
    cosine,
    linear,
    lr_times,
    param_groups,
    piecewise,
    trace,
)

W = torch.tensor([[3.0, 4.0]])


def sgd(*params, **settings):
    return NormControl(torch.optim.SGD(list(params) or [Parameter(W.clone())], lr=0.1), **settings)


@pytest.mark.parametrize("kind", ["ratio", "norm", "rms"])
@pytest.mark.parametrize(
    "given",
    [
        -0.1,
        linear(1.0, -1.0, steps=10),
        piecewise((0, 1.0), (5, -2.0)),
        math.nan,
        math.inf,
        lambda step: -1.0,
    ],
)
def test_a_target_below_zero_or_not_finite_is_refused(kind, given):
    with pytest.raises(
        ValueError,
        match=rf"{kind}=.* takes the value .*: a norm cannot be negative, infinite or NaN\. Give 0 or more\.",
    ):
        sgd(**{kind: given})


@pytest.mark.parametrize(
    "given",
    [
        -0.01,
        1.01,
        2.0,
        math.nan,
        linear(0.0, 1.5, steps=10),
        trace([0.1, -0.1]),
        lr_times(-1.0),
        lambda step: 3.0,
    ],
)
def test_a_rate_outside_0_to_1_is_refused(given):
    with pytest.raises(
        ValueError,
        match=r"rate=.* takes the value .*: a rate outside \[0, 1\] overshoots the target .*Give a rate within",
    ):
        sgd(ratio=1.0, rate=given)


@pytest.mark.parametrize("name", ["ratio", "rate"])
@pytest.mark.parametrize("bad", [math.nan, -1.0])
def test_a_schedule_with_an_invalid_value_raises_in_that_step_and_leaves_the_weights(name, bad):
    p = Parameter(W.clone())
    opt = sgd(p, **{"ratio": 1.0, "rate": 0.5, name: lambda step: 1.0 if step < 3 else bad})
    opt.step()
    opt.step()
    with pytest.raises(
        ValueError,
        match=rf"{name}=.* is {bad:g} at step 3: it must stay within .*Correct the schedule",
    ):
        opt.step()
    assert p.tolist() == [[3.0, 4.0]]


def test_a_learning_rate_that_makes_a_tied_rate_too_large_is_refused():
    opt = sgd(ratio=0.0, rate=lr_times(20.0))
    with pytest.raises(
        ValueError,
        match=r"rate=lr_times\(factor=20\.0\) is 2 at step 1: it must stay within \[0, 1\]",
    ):
        opt.step()


@pytest.mark.parametrize(
    ("scope", "where"),
    [("tensor", ""), ("row", " in 1 of its 2 parts"), ("col", " in 1 of its 2 parts")],
)
def test_a_ratio_to_an_initial_norm_of_zero_is_refused(scope, where):
    zero = torch.zeros(2, 2) if scope == "tensor" else torch.tensor([[0.0, 0.0], [0.0, 5.0]])
    named = [("fine", Parameter(torch.ones(2, 2))), ("empty", Parameter(zero))]
    with pytest.raises(
        ValueError,
        match=rf"empty has an initial norm of zero{where}, so it has no ratio to it .*absolute target",
    ):
        AdamWN(named, scope=scope)
    AdamWN(named, scope=scope, rms=0.02)
    zero.mul_(torch.nan)
    with pytest.raises(ValueError, match="empty has an initial norm of NaN"):
        AdamWN(named, scope=scope)
    AdamWN([{"params": named[:1]}, {"params": named[1:], "controlled": False}], scope=scope)


@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_a_frozen_tensor_of_zeros_needs_no_ratio(scope):
    p, frozen = Parameter(W.clone()), Parameter(torch.zeros(2, 2), requires_grad=False)
    opt = sgd(p, frozen, ratio=2.0, rate=1.0, scope=scope)
    opt.step()
    assert frozen.abs().sum() == 0
    frozen.requires_grad_(True)
    with pytest.raises(ValueError, match="tensor1 has an initial norm of zero"):
        opt.step()


def test_a_tensor_of_zeros_is_allowed_in_a_joint_norm():
    p, zero = Parameter(W.clone()), Parameter(torch.zeros(2, 2))
    sgd(p, zero, ratio=2.0, rate=1.0).step()
    assert p.tolist() == [[6.0, 8.0]]
    assert zero.abs().sum() == 0


def test_weights_whose_norm_becomes_zero_stay_zero():
    p = Parameter(W.clone())
    opt = sgd(p, ratio=1.0, rate=1.0)
    opt.step()
    with torch.no_grad():
        p.zero_()
    opt.step()
    assert p.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("decay", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_decay_and_control_of_the_same_weights_is_refused(decay):
    sentence = r"Group 0 is under norm control and SGD still decays it with weight_decay=0\.1: the two would pull .*Set weight_decay=0"
    with pytest.raises(ValueError, match=sentence):
        NormControl(torch.optim.SGD([Parameter(W.clone())], lr=0.1, weight_decay=decay))
    opt = sgd()
    opt.param_groups[0]["weight_decay"] = decay
    with pytest.raises(ValueError, match=sentence):
        opt.step()


def test_decay_of_weights_that_are_not_controlled_is_allowed():
    groups = [
        {"params": [Parameter(W.clone())]},
        {"params": [Parameter(torch.ones(3))], "weight_decay": 0.1},
    ]
    NormControl(torch.optim.SGD(groups, lr=0.1)).step()


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(
        ValueError,
        match=r"The pattern 'blocks\.\*' matches no parameter\. .*correct the pattern or remove it",
    ):
        param_groups(SmallModel(), {"blocks.*": {}})


def test_parameters_on_the_meta_device_are_refused():
    with pytest.raises(
        ValueError,
        match=r"weight is on the meta device, so it has no norm yet\. Materialise and initialise",
    ):
        AdamWN(torch.nn.Linear(3, 3, device="meta").named_parameters())


# States that do not fit


def saved(scope="global", groups=1) -> dict:
    model = SmallModel()
    params = list(model.parameters())
    opt = AdamWN(
        [{"params": params[:4]}, {"params": params[4:]}] if groups == 2 else params, scope=scope
    )
    train(model, opt, range(2))
    return opt.state_dict()


def assert_refused(opt, state, sentence):
    """Assert that the state is refused, and that the optimizer is unchanged."""
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=sentence):
        opt.load_state_dict(state)
    assert str(opt.state_dict()) == str(before)


def test_a_state_of_another_scope_is_refused():
    sentence = r"group 0 was saved with scope='tensor', but the optimizer has scope='global'.*Construct the optimizer with the saved scope"
    assert_refused(AdamWN(SmallModel().parameters()), saved(scope="tensor"), sentence)


def test_a_state_with_another_number_of_tensors_is_refused():
    sentence = r"The state is of groups with \[8\] tensors, but this optimizer has groups with \[6\]: they are of different models"
    assert_refused(AdamWN(list(SmallModel().parameters())[:6]), saved(), sentence)


def test_a_state_with_another_number_of_groups_is_refused():
    assert_refused(
        AdamWN(SmallModel().parameters()),
        saved(groups=2),
        r"groups with \[4, 4\] tensors, but .* groups with \[8\]",
    )


def test_a_state_in_which_other_tensors_were_controlled_is_refused():
    opt = AdamWN([{"params": list(SmallModel().parameters()), "controlled": True}])
    assert_refused(
        opt,
        saved(),
        r"contains 3 reference norms, but 8 are needed: other tensors were controlled when it was saved",
    )


@pytest.mark.parametrize("fused", [False, True])
def test_a_state_with_moments_of_another_shape_is_refused(fused):
    """torch's fused kernels would read and write past the end of the moments."""
    models = torch.nn.Linear(4, 6), torch.nn.Linear(4, 9)
    small, large = (AdamWN(m.parameters(), ratio=1.0, fused=fused) for m in models)
    models[0](torch.ones(2, 4)).sum().backward()
    small.step()
    sentence = (
        r"shape \(9, 4\), but its moments \(exp_avg\) the shape \(6, 4\).*Load the state first"
    )
    assert_refused(large, small.state_dict(), sentence)
    adamw = torch.optim.AdamW(models[0].parameters())
    adamw.step()
    with pytest.warns(UserWarning, match="has no reference norms"):
        assert_refused(large, adamw.state_dict(), sentence)


def test_after_loading_a_state_without_reference_norms_the_current_norm_is_the_reference():
    """Fine-tuning from a checkpoint of AdamW: its moments are used, its decay is not."""
    model = SmallModel()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    train(model, adamw, range(3))
    opt = AdamWN(model.parameters(), lr=0.1, ratio=2.0, rate=1.0)
    with torch.no_grad():
        model.up.weight.mul_(3)
    with pytest.warns(
        UserWarning,
        match=r"has no reference norms: .*The weights at the next step become the reference",
    ):
        opt.load_state_dict(adamw.state_dict())
    present = math.sqrt(sum(p.square().sum().item() for p in model.parameters() if p.dim() >= 2))
    train(model, opt, range(3, 4))
    assert opt.norms()["global"].target.item() == pytest.approx(2 * present, rel=1e-6)
    assert opt.param_groups[0]["weight_decay"] == 0.0
    assert opt.state[model.up.weight]["step"] == 4


def test_after_its_end_a_trace_keeps_its_last_value_and_warns_once():
    opt = sgd(ratio=trace([1.0, 2.0]), rate=1.0)
    opt.step()
    with pytest.warns(
        UserWarning,
        match=r"The trace ends at step 1, but the run continues: from now on the last value, 2, is used\.",
    ):
        opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    assert opt.norms()["global"].norm.item() == pytest.approx(10.0)


# NaN, sparse and empty


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_or_inf_in_one_tensor_is_not_spread_to_the_others(bad):
    """If a joint norm is not finite, none of its weights are scaled, and ``norms()`` shows the
    norm."""
    good, broken = Parameter(W.clone()), Parameter(torch.tensor([[1.0, 1.0]]))
    opt = sgd(good, broken, ratio=2.0, rate=1.0)
    opt.step()
    with torch.no_grad():
        broken[0, 0] = bad
        good.copy_(W)
    opt.step()
    assert good.tolist() == [[3.0, 4.0]]
    assert broken[0, 1].item() == 2.0
    assert not math.isfinite(opt.norms()["global"].norm.item())
    assert opt.norms()["global"].scale.item() == 1.0


def test_with_nan_in_one_row_the_other_rows_are_still_controlled():
    p = Parameter(torch.tensor([[3.0, 4.0], [3.0, 4.0]]))
    opt = sgd(p, ratio=2.0, rate=1.0, scope="row")
    opt.step()
    with torch.no_grad():
        p.copy_(torch.tensor([[3.0, 4.0], [math.nan, 4.0]]))
    opt.step()
    assert p[0].tolist() == [6.0, 8.0]
    assert p[1, 1].item() == 4.0


def test_sparse_gradients_are_refused_by_adam_and_allowed_with_sgd():
    embed = torch.nn.Embedding(5, 3, sparse=True)
    initial = embed.weight.detach().norm().item()
    embed(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"AdamW? does not support sparse gradients"):
        AdamWN(embed.parameters()).step()
    opt = sgd(embed.weight, ratio=1.5, rate=1.0)
    opt.step()
    assert embed.weight.detach().norm().item() == pytest.approx(1.5 * initial, rel=1e-6)


@pytest.mark.parametrize("scope", ["global", "group", "tensor", "row"])
def test_tensors_without_elements_are_ignored(scope):
    p, nothing = Parameter(W.clone()), Parameter(torch.ones(0, 3))
    opt = sgd(p, nothing, ratio=2.0, rate=1.0, scope=scope)
    opt.step()
    assert p.tolist() == [[6.0, 8.0]]
    assert opt.report()


# Settings that are not known


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"scope": "layer"},
            r"scope='layer' is not known: give one of 'global', 'group', 'tensor', 'row', 'col', or a tuple of axes",
        ),
        ({"scope": ()}, r"scope=\(\) is not known"),
        (
            {"law": "integrl"},
            r"law='integrl' is not known: give one of 'proportional', 'upper', 'lower', 'projection'",
        ),
        (
            {"law": "band(2)"},
            r"law='band\(2\)' is not known: .*LOW is a fraction of the target, within \[0, 1\]",
        ),
        (
            {"order": "during"},
            r"order='during' is not known: give 'after' \(Algorithm 1\) or 'before'",
        ),
        (
            {"ratio": 1.0, "norm": 2.0},
            r"ratio and norm were both given, but weights have one target: give one of them",
        ),
        (
            {"scope": (0, 1)},
            r"needs a tensor with axes \(0, 1\) and at least one more .* but group0\.tensor0 has shape \(1, 2\)",
        ),
        ({"scope": 5}, r"needs a tensor with axes \(5,\)"),
        (
            {"scope": (0, 0)},
            r"scope=\(0, 0\) names an axis twice for group0\.tensor0, which has shape \(1, 2\)\. Give",
        ),
        ({"scope": (True,)}, r"scope=\(True,\) is not known: give one of 'global'"),
        ({"scope": (0, -2)}, r"scope=\(0, -2\) names an axis twice"),
        *(
            ({"law": f"band({low})"}, rf"law='band\({low}\)' is not known: .*LOW is a fraction")
            for low in ("1e", "1.0.0", "--1", "-0.5", "")
        ),
    ],
)
def test_unknown_or_impossible_settings_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        sgd(**settings)


def test_an_unknown_value_of_controlled_is_refused():
    with pytest.raises(
        ValueError, match=r"controlled='all' is not known: give True, False, 'matrices'"
    ):
        AdamWN([{"params": [Parameter(W.clone())], "controlled": "all"}])


def test_normcontrol_of_a_generator_or_of_a_controlled_optimizer_is_refused():
    with pytest.raises(
        TypeError,
        match=r"NormControl wraps a torch\.optim\.Optimizer, but got generator\. Construct the optimizer first",
    ):
        NormControl(SmallModel().parameters())
    with pytest.raises(TypeError, match="The optimizer is under norm control already"):
        NormControl(AdamWN(SmallModel().parameters()))


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was():
    model = SmallModel()
    opt = AdamWN([model.up.weight], ratio=cosine(1.0, 2.0, steps=10))
    with pytest.raises(ValueError, match="a norm cannot be negative"):
        opt.add_param_group({"params": [model.down.weight], "scope": "tensor", "ratio": -1.0})
    assert len(opt.param_groups) == 1
    loss_at(model, 0).backward()
    opt.step()


ONE_NUMBER = [
    torch.tensor(1),
    torch.tensor([1.0]),
    torch.tensor(1.0, dtype=torch.bfloat16),
    np.int64(1),
    np.float32(1),
    np.array(1.0),
    np.array([1]),
]
TAKE_NUMBERS = ["ratio", "norm", "rms", "gain", "hold", "rate", "relative_step", "max_grad_norm"]


def with_number(name: str, value: Any) -> Any:
    """The setting, or the limit of clipping, as it is stored."""
    params = [Parameter(torch.ones(2, 2))]
    if name == "max_grad_norm":
        return AdamWN(params, max_grad_norm=value).max_grad_norm
    opt = NormControl(torch.optim.SGD(params, lr=0.1), **{name: value})
    return opt.param_groups[0]["control"][name]


@pytest.mark.parametrize("given", ONE_NUMBER, ids=repr)
@pytest.mark.parametrize("name", TAKE_NUMBERS)
def test_a_number_of_torch_or_numpy_is_read_as_a_float(name, given):
    found = with_number(name, given)
    assert (type(found), found) == (float, 1.0)


@pytest.mark.parametrize("given", ONE_NUMBER, ids=repr)
def test_such_a_number_may_be_edited_in(given):
    opt = AdamWN([Parameter(torch.ones(2, 2))], lr=0.0, rate=0.1)
    opt.param_groups[0]["control"]["rate"] = given
    opt.step()
    assert type(opt.param_groups[0]["control"]["rate"]) is float


@pytest.mark.parametrize(
    "given",
    [
        torch.tensor(True),
        np.bool_(True),
        torch.tensor(1 + 0j),
        torch.ones(2),
        np.ones(2),
        torch.ones((), device="meta"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", TAKE_NUMBERS)
def test_what_is_no_single_number_is_refused(name, given):
    with pytest.raises((TypeError, ValueError), match=re.escape(f"{name}={given!r}") + ".*[Gg]ive"):
        with_number(name, given)


def test_a_tensor_that_changes_in_place_is_followed_if_a_function_returns_it():
    weight, rate = Parameter(torch.ones(2, 2)), torch.tensor(0.0)
    opt = AdamWN([weight], lr=0.0, norm=4.0, rate=lambda step: rate)
    for value, norm in ((0.5, 3.0), (1.0, 4.0)):
        rate.fill_(value)
        opt.step()
        assert weight.norm().item() == pytest.approx(norm)


@pytest.mark.parametrize("given", [np.int64(2), torch.tensor(2)], ids=repr)
def test_a_start_may_be_a_whole_number_of_torch_or_numpy(given):
    opt = AdamWN([Parameter(torch.ones(2, 2))], ratio=1.0, start=given)
    start = opt.param_groups[0]["control"]["start"]
    assert (type(start), start) == (int, 2)
