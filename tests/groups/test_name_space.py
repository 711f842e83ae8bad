"""Settings are in ``group["control"]``: keys of the wrapped optimizer keep their meaning."""

import pytest
import torch
from torch import nn

from normcontrol import AdamWN, NormControl
from normcontrol.groups.settings import setting_names


class Other(torch.optim.SGD):
    """An optimizer that has keys with all our names, and needs them."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for name in setting_names():
            self.defaults[name] = f"their {name}"
            for group in self.param_groups:
                group.setdefault(name, f"their {name}")

    def step(self, closure=None):
        for group in self.param_groups:
            assert all(group[name] == f"their {name}" for name in setting_names())
        return super().step(closure)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 2, 12).reshape(3, 4))


def test_an_optimizer_with_keys_of_our_names_keeps_them():
    p = weight()
    opt = NormControl(Other([p]), norm=3.0, rate=1.0)
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    opt.step()
    assert p.norm().item() == pytest.approx(3.0)
    assert not torch.equal(p, before)
    saved = opt.state_dict()
    assert all(saved["param_groups"][0][name] == f"their {name}" for name in setting_names())
    opt.load_state_dict(saved)
    opt.step()
    assert opt.param_groups[0]["control"]["norm"] == 3.0


def test_a_group_can_give_settings_under_control_beside_such_keys():
    p, q = weight(), weight()
    groups = [{"params": [p], "control": {"norm": 3.0, "scope": "group"}}, {"params": [q]}]
    opt = NormControl(Other(groups), norm=2.0, rate=1.0)
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    opt.step()
    assert p.norm().item() == pytest.approx(3.0)
    assert q.norm().item() == pytest.approx(2.0)


def test_unknown_settings_under_control_are_refused():
    groups = [{"params": [weight()], "control": {"ration": 3.0}}]
    with pytest.raises(
        ValueError, match="contains 'ration', which is no setting: the settings are"
    ):
        AdamWN(groups)


def test_a_refused_group_is_as_it_was_given():
    optimizer = torch.optim.SGD([{"params": [weight()], "ratio": 2.0}, {"params": [weight()]}], 0.1)
    keys = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match="outside \\[0, 1\\]"):
        NormControl(optimizer, rate=5.0, scope="group")
    assert optimizer.param_groups == keys
    opt = NormControl(optimizer, rate=0.5, scope="group", ratio=1.0)
    assert [group["control"]["ratio"] for group in opt.param_groups] == [2.0, 1.0]
    group = {"params": [weight()], "rate": 5.0}
    with pytest.raises(ValueError, match="outside \\[0, 1\\]"):
        opt.add_param_group(group)
    assert group["rate"] == 5.0
    assert len(opt.param_groups) == 2
