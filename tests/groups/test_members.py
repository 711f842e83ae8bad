"""Which tensors are controlled: existing parameter groups keep their meaning, patterns make groups,
and tied or frozen tensors are counted correctly."""

import copy
import warnings

import pytest
import torch
from small import MATRICES, SmallModel, matrices, total_norm, train
from torch import nn
from torch.nn import Parameter

from normcontrol import AdamWN, NormControl, linear, param_groups


def controlled(opt) -> list[str]:
    """The names of all controlled tensors, over all sets."""
    return [name for s in opt.sets for name in s.names]


def split(model, decay=0.1, rest=0.0) -> list[dict]:
    """The two groups of nanoGPT and Hugging Face: tensors with two or more dimensions are decayed,
    the rest is not."""
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.dim() >= 2], "weight_decay": decay},
        {"params": [(n, p) for n, p in named if p.dim() < 2], "weight_decay": rest},
    ]


def test_by_default_matrices_are_controlled_and_biases_and_norm_layers_are_not():
    model = SmallModel()
    opt = AdamWN(model.named_parameters(), lr=0.0, ratio=2.0, rate=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt.step()
    assert controlled(opt) == MATRICES
    for name, p in model.named_parameters():
        assert torch.allclose(p, before[name] * (2 if name in MATRICES else 1))


@pytest.mark.parametrize("default", [1e-2, 0.1, 0.0])
def test_the_two_groups_of_nanogpt_control_what_they_decayed(default):
    assert controlled(AdamWN(split(SmallModel()), weight_decay=default)) == MATRICES


def test_all_tensors_of_a_decayed_group_are_controlled_also_biases():
    model = SmallModel()
    named = list(model.named_parameters())
    groups = [
        {"params": named[:3], "weight_decay": 0.1},
        {"params": named[3:], "weight_decay": 0.0},
    ]
    assert controlled(AdamWN(groups)) == ["embed.weight", "up.weight", "up.bias"]


def test_hugging_face_groups_by_name_control_what_they_decayed():
    """Trainer excludes norm layers and every tensor whose name contains "bias"."""
    model = SmallModel()
    decayed = [(n, p) for n, p in model.named_parameters() if "norm" not in n and "bias" not in n]
    rest = [(n, p) for n, p in model.named_parameters() if "norm" in n or "bias" in n]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    assert controlled(AdamWN(groups, lr=5e-5, betas=(0.9, 0.999), eps=1e-8)) == MATRICES


def test_hugging_faces_default_of_no_decay_anywhere_marks_nothing():
    assert controlled(AdamWN(split(SmallModel(), decay=0.0))) == MATRICES


@pytest.mark.parametrize("decay", [0.01, 0.02, 0.1, 0.5])
def test_one_decay_for_everything_marks_nothing(decay):
    """``AdamW(model.parameters(), weight_decay=0.1)`` does not distinguish biases from matrices."""
    params = list(SmallModel().named_parameters())
    assert controlled(AdamWN(params, weight_decay=decay)) == MATRICES
    assert controlled(AdamWN([{"params": params, "weight_decay": decay}])) == MATRICES


def test_controlled_in_a_group_decides_which_of_its_tensors_are_controlled():
    model = SmallModel()
    groups = [
        {"params": list(model.embed.named_parameters(prefix="embed")), "controlled": False},
        {"params": list(model.norm.named_parameters(prefix="norm")), "controlled": True},
        {"params": list(model.down.named_parameters(prefix="down"))},
    ]
    assert controlled(AdamWN(groups)) == ["norm.weight", "norm.bias", "down.weight"]


def test_adamwn_never_decays_and_warns_once_that_the_value_is_not_used(monkeypatch):
    monkeypatch.setattr("normcontrol.warn.GIVEN", set())
    with pytest.warns(
        UserWarning,
        match=r"AdamWN does not decay: weight_decay=0\.1 only marks which weights are controlled",
    ):
        opt = AdamWN(split(SmallModel()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdamWN(split(SmallModel()))
    assert [g["weight_decay"] for g in opt.param_groups] == [0.0, 0.0]
    models = SmallModel(), SmallModel()
    for model, decay in zip(models, (0.1, 0.9), strict=True):
        train(model, AdamWN(split(model, decay), lr=0.1), range(5))
    assert all(
        torch.equal(a, b)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)
    )


def test_the_default_decay_of_adamw_gives_no_warning(monkeypatch):
    monkeypatch.setattr("normcontrol.warn.GIVEN", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdamWN(SmallModel().parameters())


@pytest.mark.parametrize("decays", [(0.01, 0.0), (0.01, 0.001), (0.02, 0.02)])
def test_any_other_decay_gives_a_warning(decays, monkeypatch):
    monkeypatch.setattr("normcontrol.warn.GIVEN", set())
    params = SmallModel().parameters()
    with pytest.warns(UserWarning, match=f"AdamWN does not decay: weight_decay={max(decays)}"):
        AdamWN([{"params": p, "weight_decay": d} for p, d in zip(params, decays, strict=False)])


def test_the_decay_of_a_group_that_is_added_gives_a_warning(monkeypatch):
    monkeypatch.setattr("normcontrol.warn.GIVEN", set())
    up, *others = SmallModel().parameters()
    opt = AdamWN([up])
    with pytest.warns(UserWarning, match=r"AdamWN does not decay: weight_decay=0\.3 only marks"):
        opt.add_param_group({"params": others, "weight_decay": 0.3})


NAMES = [name for name, _ in SmallModel().named_parameters()]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (True, NAMES),
        ("matrices", MATRICES),
        (lambda name, p: "bias" in name, [name for name in NAMES if "bias" in name]),
        (lambda name, p: p.dim() == 1, [name for name in NAMES if name not in MATRICES]),
    ],
    ids=["True", "matrices", "by name", "by tensor"],
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["AdamWN", "NormControl"])
def test_controlled_as_an_argument_holds_for_all_groups(rule, expected, wrapped):
    groups = split(SmallModel())
    if wrapped:
        sgd = torch.optim.SGD([{**group, "weight_decay": 0.0} for group in groups], lr=0.1)
        opt = NormControl(sgd, norm=1.0, controlled=rule)
    else:
        opt = AdamWN(groups, norm=1.0, controlled=rule)
    assert sorted(controlled(opt)) == sorted(expected)
    again = copy.deepcopy(opt)
    again.load_state_dict(opt.state_dict())
    assert controlled(again) == controlled(opt)


def test_controlled_false_controls_only_the_groups_that_say_so():
    named = list(SmallModel().named_parameters())
    opt = AdamWN(
        [{"params": named[:1], "controlled": True}, {"params": named[1:]}], controlled=False
    )
    assert controlled(opt) == NAMES[:1]


def test_a_function_of_names_needs_names():
    with pytest.raises(ValueError, match=r"they have no names.*model\.named_parameters\(\)"):
        AdamWN(SmallModel().parameters(), controlled=lambda name, p: "embed" in name)


def test_a_group_added_later_follows_the_marks_of_the_groups_before():
    named = list(SmallModel().named_parameters())
    groups = [{"params": named[:1], "weight_decay": 0.1}, {"params": named[1:2], "weight_decay": 0}]
    opt = AdamWN(groups)
    opt.add_param_group({"params": named[2:4], "weight_decay": 0.5})
    assert controlled(opt) == [NAMES[0], *NAMES[2:4]]


def test_a_group_added_later_is_marked_by_its_decay_too():
    model = SmallModel()
    named = list(model.named_parameters())
    opt = AdamWN(named[:2])
    opt.add_param_group({"params": named[2:4], "weight_decay": 0.5})
    opt.add_param_group({"params": named[4:6], "weight_decay": 0.0})
    opt.add_param_group({"params": named[6:]})
    assert controlled(opt) == ["embed.weight", "up.weight"]
    assert all(g["weight_decay"] == 0 for g in opt.param_groups)


# Patterns


@pytest.mark.parametrize("given", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), None, 3])
def test_what_is_no_list_of_tensors_is_refused(given):
    name = type(given).__name__
    with pytest.raises(TypeError, match=rf"AdamWN got a {name}.* AdamWN\(model.parameters\(\)\)"):
        AdamWN(given)


def test_a_group_that_is_no_dict_is_refused_as_torch_does():
    opt = AdamWN(SmallModel().parameters())
    with pytest.raises(TypeError, match="must be a dict"):
        opt.add_param_group([nn.Parameter(torch.ones(2, 2))])


def test_patterns_make_groups_and_the_first_match_wins():
    model = SmallModel()
    rules = {
        "embed.*": None,
        "up.*": {"scope": "tensor", "rate": 0.5},
        "*.weight": {"scope": "row"},
    }
    groups = param_groups(model, rules, lr=0.25)
    assert [[name for name, _ in g["params"]] for g in groups] == [
        ["embed.weight"],
        ["up.weight", "up.bias"],
        ["norm.weight", "down.weight"],
        ["norm.bias", "down.bias", "head.bias"],
    ]
    opt = AdamWN(groups, ratio=1.0)
    assert controlled(opt) == ["up.weight", "down.weight"]
    assert [g["control"]["scope"] for g in opt.param_groups] == [
        "global",
        "tensor",
        "row",
        "global",
    ]
    assert opt.param_groups[1]["control"]["rate"] == 0.5
    assert [g["lr"] for g in opt.param_groups] == [1e-3, 1e-3, 1e-3, 0.25]


def test_patterns_put_every_parameter_into_exactly_one_group():
    model = SmallModel()
    groups = param_groups(model, {"*.weight": {}, "down.*": {"controlled": True}})
    grouped = [p for g in groups for _, p in g["params"]]
    assert len(grouped) == len(list(model.parameters()))
    assert set(grouped) == set(model.parameters())


def test_patterns_work_with_any_optimizer():
    groups = param_groups(SmallModel(), {"embed.*": None})
    assert controlled(NormControl(torch.optim.RMSprop(groups, lr=0.1))) == [
        "up.weight",
        "down.weight",
    ]


def test_a_pattern_that_matches_nothing_raises():
    with pytest.raises(
        ValueError,
        match=r"The pattern 'lm_head\.\*' matches no parameter\. The names are such as embed\.weight, .*correct",
    ):
        param_groups(SmallModel(), {"lm_head.*": None})


def test_a_pattern_whose_matches_belong_to_an_earlier_one_raises():
    with pytest.raises(
        ValueError,
        match=r"'up\.weight' matches only parameters that an earlier pattern matches, such as up\.w",
    ):
        param_groups(SmallModel(), {"up.*": None, "up.weight": {}})


def test_a_pattern_that_matches_only_vectors_needs_controlled():
    with pytest.raises(
        ValueError, match=r"none of which has two or more dimensions.*Add controlled=True"
    ):
        param_groups(SmallModel(), {"norm.*": {"ratio": 1.0}})
    groups = param_groups(
        SmallModel(), {"norm.*": {"ratio": 1.0, "scope": "tensor", "controlled": True}}
    )
    assert controlled(AdamWN(groups, ratio=1.0)) == [*MATRICES, "norm.weight", "norm.bias"]


# Tied tensors


def test_a_tied_tensor_counts_once():
    """The weight of the head is that of the embedding. Its square is in the joint norm once."""
    model = SmallModel()
    opt = AdamWN(model.parameters())
    assert opt.norms()["global"].norm.item() == pytest.approx(
        total_norm(p for p in model.parameters() if p.dim() >= 2), rel=1e-7
    )


def test_parameters_that_share_their_memory_count_once_and_are_scaled_once():
    a = Parameter(torch.tensor([[3.0, 4.0]]))
    b = Parameter(a.data)
    opt = NormControl(torch.optim.SGD([a, b], lr=0.1), ratio=2.0, rate=1.0)
    assert opt.norms()["global"].norm.item() == 5.0
    opt.step()
    assert a.tolist() == b.tolist() == [[6.0, 8.0]]


@pytest.mark.parametrize("scope", ["global", "tensor", "row"])
def test_shared_memory_in_two_groups_is_scaled_once(scope):
    a = Parameter(torch.tensor([[3.0, 4.0]]))
    opt = NormControl(
        torch.optim.SGD([{"params": [a]}, {"params": [Parameter(a.data)]}], lr=0.1),
        ratio=2.0,
        rate=1.0,
        scope=scope,
    )
    opt.step()
    assert a.tolist() == [[6.0, 8.0]]


def test_views_of_different_parts_of_one_tensor_are_different_weights():
    whole = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    opt = NormControl(
        torch.optim.SGD([Parameter(whole[:1]), Parameter(whole[1:])], lr=0.1), norm=10.0, rate=1.0
    )
    opt.step()
    assert whole.tolist() == [[6.0, 0.0], [0.0, 8.0]]


# Frozen tensors, and tensors without a gradient


def test_a_frozen_tensor_is_neither_counted_nor_scaled():
    model = SmallModel()
    model.embed.weight.requires_grad_(False)
    before = model.embed.weight.clone()
    opt = AdamWN(model.parameters(), ratio=2.0, rate=1.0)
    opt.step()
    assert torch.equal(model.embed.weight, before)
    rest = [model.up.weight, model.down.weight]
    assert opt.norms()["global"].norm.item() == pytest.approx(total_norm(rest), rel=1e-6)
    assert opt.norms()["global"].target.item() == pytest.approx(total_norm(rest), rel=1e-6)


def test_a_tensor_unfrozen_later_is_counted_with_its_initial_norm_as_reference():
    a, b = Parameter(torch.tensor([[3.0]])), Parameter(torch.tensor([[4.0]]), requires_grad=False)
    opt = NormControl(torch.optim.SGD([a, b], lr=0.1), ratio=2.0, rate=1.0)
    opt.step()
    assert (a.item(), b.item()) == (6.0, 4.0)
    b.requires_grad_(True)
    opt.step()
    assert opt.norms()["global"].target.item() == 10.0
    assert total_norm([a, b]) == pytest.approx(10.0)
    a.requires_grad_(False)
    opt.step()
    assert opt.norms()["global"].target.item() == 8.0
    assert b.item() == pytest.approx(8.0)


def test_a_tensor_without_gradient_still_counts_and_is_scaled():
    a, b = Parameter(torch.tensor([[3.0]])), Parameter(torch.tensor([[4.0]]))
    opt = AdamWN([a, b], lr=0.0, ratio=2.0, rate=1.0)
    a.grad = torch.ones_like(a)
    opt.step()
    assert opt.norms()["global"].norm.item() == pytest.approx(10.0)
    assert (a.item(), b.item()) == pytest.approx((6.0, 8.0))


@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}, {"order": "before"}])
def test_a_step_without_any_gradient_is_counted_and_controlled(flags):
    model = SmallModel()
    opt = AdamWN(model.parameters(), norm=linear(0.0, 4.0, steps=4), rate=1.0, **flags)
    for step in (1, 2):
        opt.step()
        assert total_norm(matrices(model)) == pytest.approx(step)
    assert opt.param_groups[0]["control"]["step"] == 2
    assert not opt.state


def test_embeddings_are_controlled_unless_a_pattern_excludes_them():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    assert controlled(AdamWN(model.named_parameters())) == ["0.weight", "1.weight"]
    assert controlled(AdamWN(param_groups(model, {"0.*": None}))) == ["1.weight"]


# Overrides


def test_a_group_overrides_ratio_rate_scope_law_and_order():
    params = [Parameter(torch.tensor([[3.0, 4.0]])) for _ in range(4)]
    groups = [
        {"params": [params[0]]},
        {"params": [params[1]], "scope": "tensor", "ratio": 3.0},
        {
            "params": [params[2]],
            "scope": "tensor",
            "rate": linear(0.0, 1.0, steps=2),
            "order": "before",
        },
        {"params": [params[3]], "scope": "group", "norm": 2.5, "law": "upper"},
    ]
    NormControl(torch.optim.SGD(groups, lr=0.1), ratio=2.0, rate=1.0).step()
    assert [p.tolist() for p in params] == [[[6.0, 8.0]], [[9.0, 12.0]], [[4.5, 6.0]], [[1.5, 2.0]]]


def test_groups_that_share_the_global_norm_have_one_target():
    groups = [
        {"params": [Parameter(torch.ones(2, 2))]},
        {"params": [Parameter(torch.ones(2, 2))], "ratio": 3.0},
    ]
    with pytest.raises(
        ValueError,
        match=r"Groups 0 and 1 share the global norm, but have ratio=2\.0 and 3\.0\. Use scope='group' in "
        r"one of them, so that it has a norm of its own, or give both the same ratio\.",
    ):
        AdamWN(groups, ratio=2.0)


def test_a_rate_tied_to_learning_rates_that_differ_needs_a_norm_for_each_group():
    from normcontrol import lr_times

    groups = [
        {"params": [Parameter(torch.ones(2, 2))], "lr": 0.1},
        {"params": [Parameter(torch.ones(2, 2))], "lr": 0.2},
    ]
    opt = AdamWN(groups, ratio=0.0, rate=lr_times(0.1))
    with pytest.raises(
        ValueError,
        match=r"follows the learning rate, but the groups that share the global norm have different ones",
    ):
        opt.step()


def test_settings_changed_in_a_group_take_effect_at_the_next_step():
    """They are changed in ``param_groups``, like ``lr``."""
    p = Parameter(torch.tensor([[3.0, 4.0]]))
    opt = NormControl(torch.optim.SGD([p], lr=0.1), ratio=1.0, rate=1.0)
    opt.step()
    opt.param_groups[0]["ratio"] = 2.0
    opt.step()
    assert p.tolist() == [[6.0, 8.0]]
    opt.param_groups[0]["ratio"] = lambda step: 4.0
    opt.step()
    assert p.tolist() == [[12.0, 16.0]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([], {}), "param_groups takes a model and a dict of patterns, but got a list and a dict"),
        ((nn.Linear(2, 2), None), "but got a Linear and a NoneType"),
        ((nn.Linear(2, 2), {"weight": False}), "The pattern 'weight' has the settings False, whi"),
        ((nn.Linear(2, 2), {"weight": 0.5}), "or None to leave its tensors alone"),
    ],
)
def test_rules_by_name_that_cannot_be_are_refused(arguments, sentence):
    with pytest.raises(TypeError, match=sentence):
        param_groups(*arguments)
