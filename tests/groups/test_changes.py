"""Tensors and groups that are changed by hand after the first step, as code does that grows or
prunes a model: control follows them, by the rule on the page about other optimizers."""

import copy
import io

import pytest
import torch
from small import total_norm
from torch import nn

from normcontrol import AdamWN, NormControl, linear, lr_times


def weights(*shape, seed=0):
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


def step(opt, times=1):
    for _ in range(times):
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        opt.step()


def controlled(*params, times=1, **settings):
    """A controller of weights whose optimizer never moves them, after its first step."""
    given = {"ratio": 1.5, "rate": 1.0, "scope": "tensor", **settings}
    opt = NormControl(torch.optim.SGD(list(params), lr=0.1), **given)
    step(opt, times)
    return opt


def grown(p):
    """A tensor with more rows, as densification makes it."""
    return nn.Parameter(torch.cat([p.detach(), p.detach()[:2] * 3]))


def norms(opt):
    return [total_norm([p]) for group in opt.param_groups for p in group["params"]]


@pytest.mark.parametrize("scope", ["tensor", "row", "global"])
@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_a_tensor_in_the_place_of_another_takes_over_its_ratio(scope, rate):
    """The ratio of norm and target stays what it was: a tensor on target stays on target."""
    opt = controlled(weights(6, 4), rate=rate, scope=scope)
    before = total_norm(opt.param_groups[0]["params"])
    target = 1.5 * total_norm([weights(6, 4)])
    new = grown(opt.param_groups[0]["params"][0])
    opt.param_groups[0]["params"][0] = new
    start = total_norm([new])
    step(opt)
    goal = start * target / before
    after = (1 - rate) * start + rate * goal
    assert total_norm([new]) == pytest.approx(after, rel=1e-6)
    with torch.no_grad():
        new.mul_(1.25)
    step(opt)
    assert total_norm([new]) == pytest.approx((1 - rate) * 1.25 * after + rate * goal, rel=1e-6)


def test_the_dead_tensor_is_left_alone():
    old = weights(6, 4)
    opt = controlled(old, rate=0.1)
    opt.param_groups[0]["params"][0] = grown(old)
    before = old.detach().clone()
    step(opt)
    assert torch.equal(old, before)


def test_a_tensor_that_was_resized_in_place_keeps_its_ratio():
    p = weights(6, 4)
    opt = controlled(p)
    p.data = torch.cat([p.data, p.data[:2]])
    start = total_norm([p])
    step(opt, 2)
    assert total_norm([p]) == pytest.approx(start, rel=1e-6)


@pytest.mark.parametrize("shape", [(4, 6), (1, 24), (3, 2, 4)])
def test_a_tensor_that_was_reshaped_in_place_has_the_parts_of_its_new_shape(shape):
    p = weights(6, 4)
    opt = controlled(p, scope="row")
    p.data = p.data.reshape(shape)
    before = p.detach().flatten(1).norm(dim=1)
    step(opt)
    torch.testing.assert_close(p.detach().flatten(1).norm(dim=1), before)


def test_a_tensor_that_was_reshaped_in_place_has_the_gain_of_its_new_shape():
    p = weights(6, 4)
    opt = controlled(p, ratio=None, gain=0.5)
    p.data = p.data.reshape(4, 6)
    step(opt)
    assert norms(opt) == pytest.approx([0.5 * 4**0.5], rel=1e-6)


def test_a_resized_tensor_has_the_rms_of_its_new_size():
    p = weights(6, 4)
    opt = NormControl(torch.optim.SGD([p], lr=0.1), rms=0.5, rate=1.0)
    step(opt)
    p.data = torch.cat([p.data, torch.ones(6, 4)])
    step(opt)
    assert p.detach().square().mean().sqrt().item() == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_moments_of_the_old_shape_are_refused_with_advice_that_works(fused):
    """torch's fused kernels would read and write past the end of the moments."""
    p = weights(6, 4)
    opt = AdamWN([p], ratio=1.0, rate=1.0, fused=fused)
    step(opt)
    p.data = torch.cat([p.data, p.data[:2]])
    before = p.detach().clone()
    with pytest.raises(
        ValueError, match=r"shape \(8, 4\), but its gradient .*\(6, 4\). Call zero_g"
    ):
        opt.step()
    with pytest.raises(
        ValueError,
        match=r"shape \(8, 4\), but its moments \(exp_avg\) .*\(6, 4\). Drop them, opt.state",
    ):
        step(opt)
    assert torch.equal(p, before)
    opt.state.pop(p)
    step(opt)
    assert total_norm([p]) == pytest.approx(total_norm([before]), rel=1e-6)
    assert opt.state[p]["exp_avg"].shape == (8, 4)


def test_the_other_tensors_keep_their_references():
    a, b, c = weights(3, 3), weights(4, 4, seed=1), weights(5, 5, seed=2)
    opt = controlled(a, b, c)
    first = norms(opt)
    opt.param_groups[0]["params"][1] = grown(b)
    step(opt)
    now = norms(opt)
    assert (now[0], now[2]) == pytest.approx((first[0], first[2]), rel=1e-6)


def test_a_tensor_that_is_added_to_a_group_starts_from_its_own_norm():
    opt = controlled(weights(3, 3))
    new = weights(4, 4, seed=1)
    opt.param_groups[0]["params"].append(new)
    step(opt)
    assert norms(opt) == pytest.approx(
        [1.5 * total_norm([weights(3, 3)]), 1.5 * total_norm([weights(4, 4, seed=1)])], rel=1e-6
    )


def test_a_tensor_that_is_removed_takes_its_reference_along():
    a, b, c = weights(3, 3), weights(4, 4, seed=1), weights(5, 5, seed=2)
    opt = controlled(a, b, c)
    first = norms(opt)
    del opt.param_groups[0]["params"][1]
    step(opt, 2)
    assert norms(opt) == pytest.approx([first[0], first[2]], rel=1e-6)
    assert len(opt.norms()) == 2


def test_a_tensor_has_no_name_after_another_one_was_removed():
    """The list of names is as long as before, so they would be those of other tensors."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    opt = AdamWN(model.named_parameters(), scope="tensor")
    assert [*opt.norms()] == ["0.weight", "1.weight"]
    del opt.param_groups[0]["params"][0]
    assert [*opt.norms()] == ["group0.tensor1"]


def test_a_group_that_is_appended_by_hand_is_controlled():
    opt = controlled(weights(3, 3))
    group = {**opt.param_groups[0], "params": [weights(4, 4, seed=1)]}
    del group["control"]
    opt.param_groups.append(group)
    step(opt)
    assert norms(opt)[1] == pytest.approx(1.5 * total_norm([weights(4, 4, seed=1)]), rel=1e-6)


def test_a_group_that_is_appended_before_the_first_step_is_controlled():
    opt = NormControl(torch.optim.SGD([weights(3, 3)], lr=0.1), ratio=2.0, rate=1.0)
    group = {**opt.param_groups[0], "params": [weights(4, 4, seed=1)]}
    del group["control"]
    opt.param_groups.append(group)
    step(opt)
    both = total_norm([weights(3, 3), weights(4, 4, seed=1)])
    assert total_norm(p for g in opt.param_groups for p in g["params"]) == pytest.approx(
        2 * both, rel=1e-6
    )


def test_a_group_cannot_be_removed():
    groups = [{"params": [weights(3, 3)]}, {"params": [weights(4, 4, seed=1)]}]
    opt = NormControl(torch.optim.SGD(groups, lr=0.1), ratio=1.5, rate=1.0)
    step(opt)
    opt.param_groups.pop()
    with pytest.raises(ValueError, match=r"If a group was removed, construct the optimizer again"):
        step(opt)


def test_the_last_controlled_tensor_of_a_group_cannot_be_removed():
    opt = controlled(weights(6, 4), weights(3), times=2)
    opt.param_groups[0]["params"].pop(0)
    sentence = (
        r"A group had 1 norms to control, and now it has 0: its tensors or its settings were "
        r"changed\. .* If the tensors are whole, construct the optimizer again\."
    )
    with pytest.raises(ValueError, match=sentence):
        step(opt)


def test_a_group_whose_dict_was_replaced_keeps_its_reference():
    p = weights(3, 3)
    opt = controlled(p)
    opt.param_groups[0] = dict(opt.param_groups[0])
    step(opt)
    assert norms(opt) == pytest.approx([1.5 * total_norm([weights(3, 3)])], rel=1e-6)


def test_a_group_whose_dict_was_replaced_is_read_at_the_next_step():
    p = weights(3, 3)
    opt = controlled(p, ratio=0.0, rate=lr_times(1.0))
    opt.param_groups[0] = {**opt.param_groups[0], "lr": 0.5}
    before = total_norm([p])
    step(opt)
    assert norms(opt) == pytest.approx([0.5 * before], rel=1e-6)
    opt.param_groups[0]["params"][0] = grown(p)  # the former dict is not waited for
    step(opt)
    assert norms(opt) == pytest.approx([0.5 * total_norm([grown(p)])], rel=1e-6)


def the_settings(entry):
    return {}


def all_of_it(entry):
    return entry


@pytest.mark.parametrize("times", [0, 1])
@pytest.mark.parametrize("copied", [the_settings, all_of_it])
@pytest.mark.parametrize(("edit", "norm"), [({"ratio": 2.0}, None), ({"norm": 7.0}, 7.0)])
def test_a_plain_dict_in_place_of_the_entry_is_an_edit(times, copied, edit, norm):
    """The reference norms stay, and settings that the dict does not have."""
    opt = NormControl(torch.optim.SGD([weights(4, 4)], lr=0.1), ratio=3.0, rate=1.0)
    step(opt, times)
    entry = opt.param_groups[0]["control"]
    opt.param_groups[0]["control"] = {**copied(entry), **edit}
    step(opt)
    assert norms(opt) == pytest.approx([norm or 2 * total_norm([weights(4, 4)])], rel=1e-6)
    assert opt.param_groups[0]["control"] is entry
    assert int(opt.clock.step) == times + 1


@pytest.mark.parametrize(
    ("edit", "error"), [({"scope": "tensor"}, "scope"), ({"rate": 5.0}, "rate"), ({"r": 1}, "'r'")]
)
@pytest.mark.parametrize("copied", [the_settings, all_of_it])
def test_a_plain_dict_in_place_of_the_entry_is_checked(copied, edit, error):
    opt = controlled(weights(4, 4), scope="global")
    before = norms(opt)
    opt.param_groups[0]["control"] = {**copied(opt.param_groups[0]["control"]), **edit}
    for _ in range(2):
        with pytest.raises((ValueError, KeyError), match=error):
            step(opt)
    assert norms(opt) == before


@pytest.mark.parametrize("times", [0, 1])
def test_an_entry_that_is_no_dict_is_refused(times):
    with pytest.raises(TypeError, match=r"The group's 'control' is False, but it is a dict of"):
        AdamWN([{"params": [weights(3, 3)], "control": False}])
    opt = AdamWN([weights(3, 3)])
    step(opt, times)
    opt.param_groups[0]["control"] = False
    with pytest.raises(TypeError, match=r"give it controlled=False"):
        step(opt)


def test_a_checkpoint_between_the_change_and_the_step_has_the_new_references():
    def change(opt):
        opt.param_groups[0]["params"][0] = grown(opt.param_groups[0]["params"][0])

    opt = controlled(weights(6, 4), ratio=linear(1.0, 2.0, steps=5), rate=0.5, scope="row")
    change(opt)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    again = NormControl(
        torch.optim.SGD([copy.deepcopy(opt.param_groups[0]["params"][0])], lr=0.1), scope="row"
    )
    again.load_state_dict(torch.load(file))
    step(opt, 3)
    step(again, 3)
    assert torch.equal(*(o.param_groups[0]["params"][0] for o in (opt, again)))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "folded"])
def test_adamwn_follows_a_replaced_tensor(fused):
    old = weights(6, 4)
    opt = AdamWN([old], lr=1e-3, ratio=1.5, rate=1.0, fused=fused)
    step(opt, 3)
    state = opt.state.pop(old)
    new = grown(old)
    opt.param_groups[0]["params"][0] = new
    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(new), torch.zeros_like(new)
    opt.state[new] = state
    start = total_norm([new])
    step(opt, 2)
    assert total_norm([new]) == pytest.approx(start, rel=1e-6)
    assert opt.norms()["global"].norm.item() == pytest.approx(start, rel=1e-6)


def test_a_bias_may_be_replaced():
    a, bias = weights(3, 3), weights(3, seed=1)
    opt = controlled(a, bias)
    opt.param_groups[0]["params"][1] = weights(5, seed=1)
    step(opt)
    assert norms(opt) == pytest.approx(
        [1.5 * total_norm([weights(3, 3)]), total_norm([weights(5, seed=1)])], rel=1e-6
    )


def test_a_law_that_remembers_every_norm_refuses_another_tensor():
    opt = controlled(weights(3, 3), weights(4, 4), law="integral")
    opt.param_groups[0]["params"][0] = weights(5, 5)
    with pytest.raises(ValueError, match=r"replaced, resized, added or removed .*remembers every"):
        step(opt)


def test_a_law_that_was_edited_away_remembers_nothing():
    opt = controlled(weights(3, 3), weights(4, 4), law="integral")
    opt.param_groups[0]["control"]["law"] = "projection"
    opt.param_groups[0]["params"][0] = weights(5, 5)
    start = total_norm(opt.param_groups[0]["params"][:1])
    step(opt, 2)
    assert norms(opt)[0] == pytest.approx(1.5 * start, rel=1e-6)


def test_a_replaced_tensor_of_norm_zero_has_no_ratio():
    opt = controlled(weights(3, 3))
    opt.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"tensor0 has an initial norm of zero"):
        step(opt)


def test_a_compiled_step_notices_a_replaced_tensor():
    old = weights(6, 4)
    opt = controlled(old)
    compiled = torch.compile(opt.step, backend="eager")
    old.grad = torch.zeros_like(old)
    compiled()
    new = nn.Parameter(old.detach() * 2)  # the same shape: nothing else would show it
    opt.param_groups[0]["params"][0] = new
    new.grad = torch.zeros_like(new)
    start = total_norm([new])
    compiled()
    with torch.no_grad():
        new.mul_(1.25)
    compiled()
    assert total_norm([new]) == pytest.approx(start, rel=1e-6)


@pytest.mark.parametrize("times", [0, 1])
@pytest.mark.parametrize(
    ("settings", "dtype", "message"),
    [
        ({"scope": "row"}, None, "needs a tensor with axes"),
        ({"scope": "col"}, None, "needs a tensor with axes"),
        ({"scope": "global", "ratio": None, "gain": 1.0}, None, "it has no inputs"),
        ({"scope": "tensor", "size": "spectral"}, None, r"group0.tensor1 has shape \(4,\)"),
        ({"cautious": True}, torch.complex64, "group0.tensor1 is complex"),
        ({"cautious": True}, torch.bfloat16, "but group0.tensor1 is torch.bfloat16. Keep"),
        ({"relative_step": 0.1}, torch.bfloat16, "but group0.tensor1 is torch.bfloat16. Keep"),
    ],
)
def test_a_tensor_that_is_added_must_suit_the_settings(settings, dtype, message, times):
    opt = controlled(weights(4, 3), **{"controlled": True, **settings}, times=times)
    opt.param_groups[0]["params"].append(nn.Parameter(weights(4).detach().to(dtype)))
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            step(opt)


@pytest.mark.parametrize("times", [0, 1])
def test_weights_of_another_dtype_must_suit_the_settings(times):
    model = nn.Linear(4, 4, bias=False)
    opt = controlled(*model.parameters(), relative_step=0.1, times=times)
    model.bfloat16()
    with pytest.raises(ValueError, match=r"but group0.tensor0 is torch.bfloat16. Keep the weights"):
        step(opt)


def test_weights_of_another_dtype_are_controlled_as_before():
    """A large set on a CPU is folded into AdamW's fused step in fp32, and in bf16 it is not."""
    torch.manual_seed(0)
    model = nn.Linear(400, 400, bias=False)
    opt = AdamWN(model.parameters(), lr=1e-6, fused=True, ratio=1.2, rate=0.01)
    step(opt)
    model.bfloat16()
    model.weight.grad = None
    opt.state.clear()
    step(opt, 60)
    assert opt.norms()["global"].ratio.item() == pytest.approx(1.2 - 0.2 * 0.99**61, rel=1e-3)
    assert model.weight.dtype == torch.bfloat16


def test_norms_may_be_read_in_inference_mode_after_a_change():
    opt = controlled(weights(3, 3), scope="group", start=5)
    opt.param_groups[0]["params"].append(weights(4, 4, seed=1))
    with torch.inference_mode():
        opt.norms()
    step(opt, 5)
    assert int(opt.clock.step) == 6


def refused_group(opt):
    opt.add_param_group({"params": [weights(4, 4, seed=1)], "start": 3, "scope": "group"})


def refused_edit(opt):
    opt.param_groups[0]["control"]["start"] = 3
    opt.step()


@pytest.mark.parametrize("refused", [refused_group, refused_edit])
def test_what_the_stepper_refuses_changes_nothing(refused):
    p = weights(3, 3)
    opt = AdamWN([p], ratio=1.5, rate=1.0, differentiable=True)
    p.grad = torch.zeros(3, 3)
    with pytest.raises(ValueError, match="differentiable"):
        refused(opt)
    (s,) = opt.sets
    assert s.params == [p]
    assert s.start is None


@pytest.mark.parametrize("scope", ["tensor", "global"])
@pytest.mark.parametrize("how", ["copy", "add a group"])
def test_a_replaced_tensor_takes_over_its_ratio_whatever_happens_before_the_step(how, scope):
    """The copy and the new group were made with the reference of the tensor that had gone."""
    old, new = weights(6, 4), weights(6, 4, seed=1)
    opt = controlled(old, scope=scope)
    opt.param_groups[0]["params"][0] = nn.Parameter(3 * new.detach())
    start = total_norm(opt.param_groups[0]["params"])
    if how == "copy":
        opt = copy.deepcopy(opt)
    else:
        added = {"params": [weights(2, 2)], "controlled": False, "ratio": 1.5}
        opt.add_param_group(added)
    step(opt)
    assert total_norm(opt.param_groups[0]["params"]) == pytest.approx(start, rel=1e-6)


def test_a_state_is_loaded_into_tensors_that_were_added():
    def grow(opt):
        opt.param_groups[0]["params"].append(weights(2, 4, seed=2))
        return opt

    saved = grow(controlled(weights(6, 4)))
    step(saved, 2)
    state = copy.deepcopy(saved.state_dict())
    again = grow(controlled(weights(6, 4)))
    again.load_state_dict(state)
    step(again)
    assert [r.target.item() for r in again.norms().values()] == [
        r.target.item() for r in saved.norms().values()
    ]
    other = controlled(weights(6, 4), weights(2, 4))
    other.param_groups[0]["params"][0] = nn.Parameter(torch.ones(5))  # no matrix any more
    with pytest.raises(ValueError, match="contains 2 reference norms, but 1 are needed: other"):
        other.load_state_dict(state)


def test_a_report_after_a_tensor_was_removed_is_about_the_others():
    opt = controlled(weights(3, 3), weights(4, 4), weights(5, 5))
    opt.param_groups[0]["params"].pop(1)
    shapes = [line.split()[1] for line in opt.report().splitlines() if "group0" in line]
    assert shapes == ["3x3", "5x5"]
