"""The hook for Emerging-Optimizers, on a stub of its optimizers, and on the package if it has hooks.

The stub calls a hook as the package does: around ``p.add_(update, alpha=-lr)``.
"""

from __future__ import annotations

import copy
import importlib.util
import sys

import pytest
import torch
from torch import nn

from normcontrol import NormControl, linear
from normcontrol.integrations.emerging_optimizers import NormControlHook

INSTALLED = (
    sys.version_info >= (3, 12)  # its source is written for that
    and importlib.util.find_spec("emerging_optimizers") is not None
)


class WithHook(torch.optim.Optimizer):
    """Gradient descent that calls a weight-update hook."""

    def __init__(self, params, lr: float, weight_update_hook) -> None:
        super().__init__(params, {"lr": lr})
        self.hook = weight_update_hook

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad.clone()
                state = self.hook.pre_weight_update_inplace(p, update)
                p.add_(update, alpha=-group["lr"])
                self.hook.post_weight_update_inplace(p, state)


def real(params, lr: float, weight_update_hook):
    """The package's own optimizer, without orthogonalisation: gradient descent too."""
    hooks = pytest.importorskip("emerging_optimizers.weight_update_hooks", exc_type=ImportError)
    assert hooks.RadialBrakeHook
    from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer

    return OrthogonalizedOptimizer(
        params,
        lr=lr,
        momentum=0.0,
        weight_decay=0.0,
        nesterov=False,
        weight_decay_method="decoupled",
        fp32_matmul_prec="highest",
        scaled_orthogonalize_fn=nn.Identity(),
        weight_update_hook=weight_update_hook,
    )


MAKERS = [
    WithHook,
    pytest.param(real, marks=pytest.mark.skipif(not INSTALLED, reason="no package")),
]


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 5))]


def train(opt, params, steps: int = 10, first: int = 0) -> None:
    for step in range(first, first + steps):
        for i, p in enumerate(params):
            generator = torch.Generator().manual_seed(10 * step + i)
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": linear(1.0, 1.5, steps=5), "rate": 0.5},
        {"gain": 0.5, "law": "projection", "scope": "row"},
        {"ratio": 1.0, "rate": 0.3, "law": "integral"},
        {"ratio": 0.9, "rate": 0.3, "order": "before"},
        {"ratio": 1.0, "start": "every step", "law": "upper", "rate": 0.5},
        {"ratio": 1.0, "law": "projection", "relative_step": 0.05},
        {"ratio": 0.0, "rate": 0.1, "cautious": True},
    ],
)
def test_the_hook_gives_the_weights_of_the_wrapped_optimizer(make, settings):
    ours, theirs = weights(), weights()
    train(make(ours, 0.1, NormControlHook(ours, **settings)), ours)
    train(NormControl(torch.optim.SGD(theirs, 0.1), **{"scope": "tensor", **settings}), theirs)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not INSTALLED, reason="no package")
def test_the_radial_brake_is_that_of_the_package():
    hooks = pytest.importorskip("emerging_optimizers.weight_update_hooks", exc_type=ImportError)
    ours, theirs = weights(), weights()
    brake = NormControlHook(ours, ratio=1.0, start="every step", law="upper", rate=0.5)
    train(real(ours, 0.1, brake), ours)
    train(real(theirs, 0.1, hooks.RadialBrakeHook(outward_scale=0.5)), theirs)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, rtol=1e-5)


@pytest.mark.parametrize("make", MAKERS)
def test_a_run_that_is_resumed_ends_in_the_same_bits(make, tmp_path):
    settings = {"ratio": linear(1.0, 2.0, steps=10), "rate": 0.3}
    params = weights()
    hook = NormControlHook(params, **settings)
    train(make(params, 0.1, hook), params)
    torch.save([hook.state_dict(), [p.detach() for p in params]], tmp_path / "half.pt")
    train(make(params, 0.1, hook), params, first=10)

    state, values = torch.load(tmp_path / "half.pt", weights_only=True)
    resumed = [nn.Parameter(value) for value in values]
    hook = NormControlHook(resumed, **settings)
    hook.load_state_dict(state)
    train(make(resumed, 0.1, hook), resumed, first=10)
    assert all(torch.equal(p, q) for p, q in zip(params, resumed, strict=True))


def test_groups_keep_their_own_settings_and_vectors_are_left_alone():
    matrix, vector, free = (nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (3,), (2, 2)))
    groups = [{"params": [matrix, vector], "norm": 1.0}, {"params": [free], "controlled": False}]
    hook = NormControlHook(groups, rate=1.0)
    opt = WithHook([matrix, vector, free], 0.0, hook)
    for p in (matrix, vector, free):
        p.grad = torch.ones_like(p)
    opt.step()
    assert matrix.norm().item() == pytest.approx(1.0)
    assert torch.equal(vector, torch.ones(3))
    assert torch.equal(free, torch.ones(2, 2))
    assert [r.target.item() for r in hook.norms().values()] == [1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scope": "global"}, "a hook is called for one at a time"),
        ({"scope": "group"}, "scope='group' is a norm of several tensors"),
    ],
)
def test_what_a_hook_cannot_do_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        NormControlHook(weights(), **settings)


def test_tensors_and_states_that_do_not_fit_are_refused():
    params = weights()
    hook = NormControlHook(params, ratio=1.0)
    with pytest.raises(ValueError, match=r"a tensor of shape .* that it was not given"):
        hook.pre_weight_update_inplace(copy.deepcopy(params[0]), torch.zeros(4, 3))
    with pytest.raises(ValueError, match="The state is of 1 tensors, but 2 are controlled"):
        hook.load_state_dict({"controls": hook.state_dict()["controls"][:1]})
    for state in ({"model": {}, "hook": hook.state_dict()}, [hook.state_dict()]):
        with pytest.raises(
            ValueError, match=r"that state_dict of a hook did not return. Give what"
        ):
            hook.load_state_dict(state)
    with pytest.raises(TypeError, match=r"NormControlHook got a Linear, .* Give the parameters of"):
        NormControlHook(torch.nn.Linear(2, 2))
