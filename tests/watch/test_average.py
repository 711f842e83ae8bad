"""Tests of ``reproject_``: an average of weights has a smaller norm, and is scaled back to the
target."""

from __future__ import annotations

import pytest
import torch
from small import SmallModel, matrices, total_norm, train
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from normcontrol import AdamWN, NormControl, reproject_


@pytest.mark.parametrize("scope", ["global", "tensor", "row"])
def test_the_norm_of_an_average_is_smaller_and_reprojection_sets_it_to_the_target(scope):
    model = SmallModel()
    opt = AdamWN(model.parameters(), lr=5e-2, ratio=1.5, rate=1.0, scope=scope)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for t in range(60):
        train(model, opt, range(t, t + 1))
        average.update_parameters(model)
    target = 1.5 * total_norm(matrices(SmallModel()))
    assert total_norm(matrices(average)) < 0.999 * target
    rest = [p.detach().clone() for p in average.parameters() if p.dim() < 2]
    directions = [p.detach() / p.detach().norm(dim=1, keepdim=True) for p in matrices(average)]
    reproject_(average, model, opt)
    assert total_norm(matrices(average)) == pytest.approx(target, rel=1e-6)
    for p, p0, direction in zip(matrices(average), matrices(SmallModel()), directions, strict=True):
        assert torch.allclose(p / p.norm(dim=1, keepdim=True), direction, atol=1e-5)
        if scope == "row":
            assert torch.allclose(p.norm(dim=1), 1.5 * p0.norm(dim=1))
    assert all(
        torch.equal(a, b)
        for a, b in zip(rest, [p for p in average.parameters() if p.dim() < 2], strict=True)
    )


def test_an_average_of_another_model_is_refused():
    model = SmallModel()
    opt = AdamWN(model.named_parameters())
    with pytest.raises(ValueError, match="it must be an average of this very model"):
        reproject_(torch.nn.Linear(2, 2), model, opt)
    with pytest.raises(
        ValueError, match=r"controls embed\.weight, which is not a parameter of the given model"
    ):
        reproject_(SmallModel(), SmallModel(), opt)


@pytest.mark.parametrize("settings", [{"rate": 0.0}, {"cautious": True}, {"relative_step": 0.01}])
def test_reprojection_reaches_the_target_whatever_the_settings_of_a_step_are(settings):
    model = SmallModel()
    opt = NormControl(torch.optim.SGD(model.parameters(), lr=0.1), ratio=1.5, **settings)
    train(model, opt, range(2))
    average = AveragedModel(model)
    reproject_(average, model, opt)
    target = 1.5 * total_norm(matrices(SmallModel()))
    assert total_norm(matrices(average)) == pytest.approx(target, rel=1e-6)


@pytest.mark.parametrize(
    ("law", "ends"),
    [
        ("proportional", (2.0, 2.0)),
        ("projection", (2.0, 2.0)),
        ("upper", (1.6, 2.0)),
        ("integral", (1.6, 2.0)),
        ("lower", (2.0, 8.0)),
        ("band(0.9)", (1.8, 2.0)),
    ],
)
def test_the_law_of_the_weights_decides_which_averages_are_scaled(law, ends):
    model = torch.nn.Linear(4, 4, bias=False)
    opt = NormControl(torch.optim.SGD(model.parameters(), lr=0.1), norm=2.0, rate=0.01, law=law)
    model.weight.grad = torch.ones(4, 4)
    opt.step()
    for start, end in zip((1.6, 8.0), ends, strict=True):
        average = AveragedModel(model)
        average.module.weight.data.fill_(start / 4)
        reproject_(average, model, opt)
        assert average.module.weight.norm().item() == pytest.approx(end, rel=1e-6)


@pytest.mark.parametrize("start", [3, "inflection", "every step"])
def test_an_average_is_left_alone_before_the_start_of_its_weights(start):
    model = torch.nn.Linear(4, 4, bias=False)
    opt = NormControl(torch.optim.SGD(model.parameters(), lr=0.1), ratio=1.0, start=start)
    for _ in range(2):
        model.weight.grad = torch.ones(4, 4)
        opt.step()
    average = AveragedModel(model)
    average.module.weight.data.fill_(5.0)
    reproject_(average, model, opt)
    found = average.module.weight.norm().item()
    now = model.weight.norm().item()
    assert found == pytest.approx(now if start == "every step" else 20.0, rel=1e-6)


def test_an_average_is_scaled_to_the_norm_at_the_start_of_its_weights():
    model = torch.nn.Linear(4, 4, bias=False)
    opt = NormControl(torch.optim.SGD(model.parameters(), lr=0.1), start=2, ratio=1.0)
    for _ in range(2):
        model.weight.grad = torch.ones(4, 4)
        opt.step()
    norm = model.weight.norm().item()
    model.weight.grad = torch.ones(4, 4)
    opt.step()
    average = AveragedModel(model)
    average.module.weight.data.fill_(5.0)
    reproject_(average, model, opt)
    assert average.module.weight.norm().item() == pytest.approx(norm, rel=1e-6)


def test_an_average_follows_weights_that_were_changed_since_the_last_step():
    """Frozen ones were scaled, and those in the place of others were called unknown."""
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))
    opt = AdamWN(model.parameters(), norm=2.0, rate=1.0, scope="tensor")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    model[0].weight.requires_grad_(False)
    model[1].weight = torch.nn.Parameter(torch.ones(4, 4))
    opt.param_groups[0]["params"][1] = model[1].weight
    average = AveragedModel(model)
    for p in average.parameters():
        p.data.fill_(5.0)
    reproject_(average, model, opt)
    assert [p.norm().item() for p in average.parameters()] == pytest.approx([20.0, 2.0], rel=1e-6)


class Prepared:
    """A wrapper as those of Accelerate: the optimizer is an attribute of it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_the_controller_is_found_in_a_wrapper_and_other_objects_are_refused():
    model = torch.nn.Linear(4, 4, bias=False)
    opt = AdamWN(model.parameters(), ratio=1.0)
    average = AveragedModel(model)
    average.module.weight.data.mul_(0.5)
    reproject_(average, model, Prepared(opt))
    torch.testing.assert_close(average.module.weight, model.weight)
    with pytest.raises(TypeError, match=r"AdamW controls no norms, .* Give an AdamWN or a NormCon"):
        reproject_(average, model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(TypeError, match="got a OrderedDict as the average, which is no module"):
        reproject_(model.state_dict(), model, opt)


@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_an_average_may_be_on_another_device(scope):
    """As one that is kept on the host. "meta" stands for the device; its tensors have no values."""
    model = torch.nn.Linear(4, 3)
    opt = AdamWN(model.parameters(), ratio=1.5, scope=scope)
    average = AveragedModel(model).to("meta")
    reproject_(average, model, opt)
    assert all(p.is_meta for p in average.parameters())
