"""Optimizers that control nothing now: they warn, say so, and make their own steps."""

import pytest
import torch
from torch.nn import Parameter

from normcontrol import AdamWN, NormControl


def sgd(param):
    return NormControl(torch.optim.SGD([param], lr=0.1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdamWN([Parameter(torch.ones(3))]),
        lambda: AdamWN([{"params": [Parameter(torch.ones(3, 3))], "controlled": False}]),
        lambda: sgd(Parameter(torch.ones(3))),
        lambda: sgd(Parameter(torch.ones(0, 3))),
    ],
)
def test_an_optimizer_that_controls_nothing_warns_and_makes_its_own_steps(make):
    with pytest.warns(UserWarning, match="Nothing is controlled now"):
        opt = make()
    assert opt.norms() == {}
    assert "Nothing is controlled now" in opt.report()
    (p,) = opt.param_groups[0]["params"]
    other = Parameter(p.detach().clone())
    kind = torch.optim.SGD if isinstance(opt.optimizer, torch.optim.SGD) else torch.optim.Adam
    theirs = kind([other], lr=opt.param_groups[0]["lr"])
    for _ in range(3):
        p.grad, other.grad = torch.ones_like(p), torch.ones_like(p)
        opt.step()
        theirs.step()
    assert torch.equal(p, other)


def test_the_advice_can_be_followed_after_steps_too():
    """``controlled`` is fixed then, because the references were measured with it."""
    advice = "unfreeze them, or construct the optimizer with controlled=True in their group"
    with pytest.warns(UserWarning, match=advice):
        opt = AdamWN([Parameter(torch.ones(3))])
    opt.step()
    assert advice in opt.report()
    opt = AdamWN([{"params": opt.param_groups[0]["params"], "controlled": True}])
    assert opt.report().startswith("AdamWN: 1 of 1 tensors controlled")


@pytest.mark.parametrize("fused", [False, True])
def test_frozen_tensors_are_controlled_from_the_step_at_which_they_are_unfrozen(fused):
    p = Parameter(torch.eye(3), requires_grad=False)
    with pytest.warns(UserWarning, match="Nothing is controlled now"):
        opt = AdamWN([p], lr=0.0, ratio=2.0, rate=1.0, fused=fused)
    opt.step()
    assert torch.equal(p, torch.eye(3))
    p.requires_grad_(True)
    p.grad = torch.ones_like(p)
    opt.step()
    assert torch.allclose(p, 2 * torch.eye(3))


def test_plain_tensors_with_a_gradient_set_by_hand_are_stepped():
    p = torch.ones(3, 3)
    p.grad = torch.ones(3, 3)
    with pytest.warns(UserWarning, match="Nothing is controlled now"):
        opt = AdamWN([p], lr=0.1)
    opt.step()
    assert torch.allclose(p, torch.full((3, 3), 0.9))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("scope", ["global", "tensor", "row"])
def test_frozen_tensors_of_a_quantised_model_are_left_alone(scope, dtype):
    """They have no norm that could be set, as the packed weights that adapters are trained on."""
    packed = Parameter(torch.ones(6, 1).to(dtype), requires_grad=False)
    adapter = Parameter(torch.ones(4, 4))
    opt = AdamWN([packed, adapter], lr=1e-9, ratio=1.5, rate=1.0, scope=scope)
    adapter.grad = torch.ones(4, 4)
    opt.step()
    assert adapter.norm().item() == pytest.approx(6.0)
    assert "1 of 2 tensors controlled" in opt.report()
    with pytest.warns(UserWarning, match="Nothing is controlled now"):
        AdamWN([packed], controlled=True)


def test_groups_that_are_empty_at_first_take_tensors_on_any_device():
    """No tensor tells at construction on which device the steps will run."""
    with pytest.warns(UserWarning, match="Nothing is controlled now"):
        opt = AdamWN([{"params": []}], ratio=2.0, rate=1.0)
    p = Parameter(torch.eye(3))
    opt.add_param_group({"params": [p]})
    p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.allclose(p, 2 * torch.eye(3))
