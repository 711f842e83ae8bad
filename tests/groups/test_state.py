"""Saving and loading: a run that is saved half-way, and loaded and continued in a new process, ends
in the same bits as one that is not interrupted."""

import copy
import io
import itertools
import sys
from pathlib import Path

import pytest
import torch
from fork_server import python
from schedule_examples import SCHEDULES
from small import SmallModel, train, with_eta

from normcontrol import AdamWN, NormControl, cosine, linear, trace
from normcontrol.steppers import folded

HALF, STEPS = 10, 20
MAKERS = {
    "for-loop": lambda groups, **s: AdamWN(groups, lr=1e-2, foreach=False, **s),
    "foreach": lambda groups, **s: AdamWN(groups, lr=1e-2, foreach=True, **s),
    "fused": lambda groups, **s: AdamWN(groups, lr=1e-2, fused=True, **s),
    "NormControl": lambda groups, **s: NormControl(torch.optim.Adam(groups, lr=1e-2), **s),
}
SCOPES = ["global", "group", "tensor", "row", "col", (-1,)]
PAIRS = [
    *itertools.product(["for-loop", "foreach", "fused"], SCOPES),
    ("NormControl", "global"),
    ("NormControl", "row"),
]
ORDERS = itertools.cycle(["after", "before", "after"])
CONFIGURATIONS = {
    str(dtype): [
        {"maker": maker, "scope": scope, "dtype": dtype, "order": next(ORDERS)}
        for maker, scope in PAIRS
    ]
    for dtype in (torch.float32, torch.bfloat16)
}


def build(maker, scope, dtype, order, seed=0, **control):
    model = SmallModel(dtype, seed)
    params = list(model.parameters())
    opt = MAKERS[maker](
        [{"params": params[:4]}, {"params": params[4:]}], scope=scope, order=order, **control
    )
    return model, opt, with_eta(opt)


def fresh(configuration):
    """A run before its first step. Its ratio and rate change in both halves."""
    ratio = (
        linear(1.0, 2.0, steps=16)
        if configuration["order"] == "after"
        else trace([1.0, 1.5, 1.2], steps=[0, 8, STEPS])
    )
    return build(**configuration, ratio=ratio, rate=cosine(0.1, 0.01, steps=18))


def parts(model, opt, scheduler) -> dict:
    return {
        "model": model.state_dict(),
        "opt": opt.state_dict(),
        "scheduler": scheduler.state_dict(),
    }


def second_halves(name: str, folder: Path) -> None:
    """Resume in the new process, whose models and schedules are different until it loads."""
    ends = []
    for configuration, saved in zip(
        CONFIGURATIONS[name], torch.load(folder / "saved.pt", weights_only=True), strict=True
    ):
        model, opt, scheduler = build(**configuration, seed=1)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        scheduler.load_state_dict(saved["scheduler"])
        train(model, opt, range(HALF, STEPS), scheduler)
        ends.append(parts(model, opt, scheduler))
    torch.save(ends, folder / "ends.pt")


@pytest.mark.parametrize(
    "name", ["torch.float32", pytest.param("torch.bfloat16", marks=pytest.mark.slow)]
)
def test_a_resumed_run_ends_in_the_same_bits_for_each_implementation_and_scope(name, tmp_path):
    runs = [fresh(configuration) for configuration in CONFIGURATIONS[name]]
    for model, opt, scheduler in runs:
        train(model, opt, range(HALF), scheduler)
    torch.save([parts(*run) for run in runs], tmp_path / "saved.pt")
    assert python(__file__, name, tmp_path).status == 0
    resumed = torch.load(tmp_path / "ends.pt", weights_only=True)

    for configuration, (model, opt, scheduler), end in zip(
        CONFIGURATIONS[name], runs, resumed, strict=True
    ):
        half = copy.deepcopy(model.state_dict())
        train(model, opt, range(HALF, STEPS), scheduler)  # the uninterrupted run
        for key, p in model.named_parameters():
            assert torch.equal(p, end["model"][key]), f"{key} with {configuration}"
            assert not torch.equal(p, half[key])
        assert str(opt.state_dict()) == str(end["opt"]), configuration


def test_the_target_on_resume_is_of_the_stored_reference_and_not_of_the_loaded_weights():
    model = SmallModel()
    opt = AdamWN(model.parameters(), lr=0.0, ratio=2.0, rate=1.0)
    opt.step()
    reference = opt.norms()["global"].target.item()
    model_2 = SmallModel(seed=1)
    model_2.load_state_dict(model.state_dict())
    opt_2 = AdamWN(model_2.parameters(), lr=0.0, ratio=2.0, rate=1.0)
    opt_2.load_state_dict(opt.state_dict())
    opt_2.step()
    assert opt_2.norms()["global"].target.item() == reference


@pytest.mark.parametrize("state_loaded", [False, True])
def test_weights_loaded_between_construction_and_the_first_step_are_the_reference(state_loaded):
    """The usual order in fine-tuning: the optimizer is built, then the pretrained weights are
    loaded."""
    model, pretrained = SmallModel(), SmallModel(seed=1)
    opt = AdamWN(model.parameters(), lr=0.0, ratio=1.0, rate=1.0)
    if state_loaded:  # one from before the first step
        opt.load_state_dict(opt.state_dict())
    model.load_state_dict(pretrained.state_dict())
    opt.step()
    for p, q in zip(model.parameters(), pretrained.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-6)


if __name__ == "__main__":
    folded.FEWEST = 0  # as in conftest.py
    second_halves(sys.argv[1], Path(sys.argv[2]))


def test_norms_after_loading_a_state_or_adding_a_group_are_those_of_the_current_weights():
    p, q = (torch.nn.Parameter(torch.eye(3)) for _ in range(2))
    opt = AdamWN([p], lr=0.0, ratio=2.0, rate=0.5)
    p.grad = torch.ones_like(p)
    opt.step()
    stepped = opt.norms()["global"]
    assert stepped.ratio.item() == pytest.approx(1.5)
    opt.load_state_dict(opt.state_dict())
    loaded = opt.norms()["global"]
    assert loaded.norm.item() == pytest.approx(stepped.norm.item())
    assert loaded.ratio.item() == pytest.approx(1.5)
    assert "1.5000" in opt.report()
    opt.add_param_group({"params": [q]})
    added = opt.norms()["global"]
    assert added.norm.item() == pytest.approx((1.5**2 * 3 + 3) ** 0.5)


@pytest.mark.parametrize("scope", ["global", "row"])
def test_before_the_first_step_the_readings_refer_to_the_weights_as_they_are(scope):
    """The report is printed before training, and pretrained weights may be loaded before that."""
    p = torch.nn.Parameter(torch.eye(3))
    opt = AdamWN([("p", p)], lr=0.0, ratio=2.0, rate=1.0, scope=scope)
    with torch.no_grad():
        p.mul_(3.0)
    (reading,) = opt.norms().values()
    assert torch.allclose(reading.ratio, torch.ones_like(reading.ratio))
    assert torch.allclose(reading.target, 2 * reading.norm)
    assert "1.0000" in opt.report()
    saved = opt.state_dict()["param_groups"][0]["control"]["reference"]
    assert torch.allclose(saved.norm(), p.detach().double().norm())
    p.grad = torch.ones_like(p)
    opt.step()
    (after,) = opt.norms().values()
    assert torch.equal(after.target, reading.target)


def test_a_state_is_loaded_to_the_device_of_the_weights():
    """They may have been moved since construction. "meta" stands for the device before."""
    p = torch.nn.Parameter(torch.eye(3))
    opt = AdamWN([p], lr=0.0, ratio=2.0, rate=0.5)
    p.grad = torch.ones_like(p)
    opt.step()
    state = copy.deepcopy(opt.state_dict())
    control = opt.param_groups[0]["control"]
    control["reference"] = control["reference"].to("meta")
    opt.clock.step = opt.clock.step.to("meta")
    opt.load_state_dict(state)
    control = opt.param_groups[0]["control"]
    assert opt.clock.step is control["step"]
    assert (control["step"].device.type, control["reference"].device.type) == ("cpu", "cpu")
    opt.step()
    assert p.detach().norm().item() == pytest.approx(1.75 * 3**0.5)


def test_a_loaded_state_knows_its_step_again_after_an_overflow():
    """The host cannot know how many steps were skipped. A loaded state says how many were made."""
    p = torch.nn.Parameter(torch.eye(3))
    opt = AdamWN([p], fused=True, ratio=1.0)
    p.grad = torch.ones_like(p)
    opt.step()
    opt.grad_scale, opt.found_inf = torch.ones(()), torch.ones(())
    opt.step()
    del opt.grad_scale, opt.found_inf
    opt.load_state_dict(opt.state_dict())
    opt.param_groups[0]["control"]["ratio"] = lambda step: torch.where(step == 2, -1.0, 1.0)
    with pytest.raises(ValueError, match="is -1 at step 2: it must stay within"):
        opt.step()


def test_a_norm_is_never_negative():
    p = torch.nn.Parameter(10 * torch.eye(3))
    opt = NormControl(torch.optim.SGD([p], lr=0.0), norm=1.0, rate=1.0, law="integral")
    opt.step()
    reading = opt.norms()["global"]
    assert reading.scale.item() < 0  # CPR's multiplier may exceed one half
    assert reading.norm.item() == pytest.approx(p.detach().norm().item())
    assert "-" not in opt.report().splitlines()[-1].split()[-2]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("order", "befor", "order='befor' is not known"),
        ("rate", 5.0, "a rate outside"),
        ("law", None, "The state has None as the law"),
        ("ratio", "linear(1, 2, st", "which cannot be read: it was changed or cut off"),
        ("ratio", None, "has no target, which every saved state"),
        ("reference", ..., "has no reference, which every saved state"),
        ("step", ..., "has no step"),
        ("scope", ..., "has no scope"),
        ("step", 2, "has step=2, where a saved state has a tensor"),
        ("reference", [3.0], "has reference=.3.0., where a saved state has a tensor"),
    ],
)
def test_a_state_that_was_changed_is_refused_and_nothing_is_loaded(name, value, message):
    model = SmallModel()
    opt = AdamWN(model.parameters(), lr=1e-2, ratio=3.0)
    train(model, opt, range(2))
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"][0]["lr"] = 5.0
    if value is ...:
        del state["param_groups"][0]["control"][name]
    else:
        state["param_groups"][0]["control"][name] = value
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(state)
    assert opt.param_groups[0]["lr"] == 1e-2
    assert int(opt.param_groups[0]["control"]["step"]) == 2


@pytest.mark.parametrize("saved_by", ["the controller", "the wrapped optimizer"])
def test_a_state_that_the_wrapped_optimizer_loads_is_taken_over(saved_by):
    """Either state goes on as it was saved: the reference, the step and the settings."""
    p = torch.nn.Parameter(torch.eye(3))
    opt = NormControl(torch.optim.SGD([p], lr=1e-9), ratio=linear(1.0, 3.0, steps=10), rate=1.0)
    p.grad = torch.ones_like(p)
    for _ in range(5):
        opt.step()
    saver = opt if saved_by == "the controller" else opt.optimizer
    state = copy.deepcopy(saver.state_dict())
    q = torch.nn.Parameter(p.detach().clone())
    q.grad = p.grad
    again = NormControl(torch.optim.SGD([q], lr=1e-9), ratio=1.0)
    again.optimizer.load_state_dict(state)
    again.step()
    opt.step()
    assert torch.equal(p, q)
    assert q.norm().item() == pytest.approx(2.2 * 3**0.5)
    assert int(again.clock.step) == 6


def test_a_state_is_loaded_over_one_that_the_wrapped_optimizer_loaded():
    p = torch.nn.Parameter(torch.eye(3))
    opt = NormControl(torch.optim.SGD([p], lr=0.1), ratio=2.0, rate=1.0)
    p.grad = torch.ones_like(p)
    opt.step()
    state = copy.deepcopy(opt.state_dict())
    opt.optimizer.load_state_dict(copy.deepcopy(state))
    opt.load_state_dict(state)
    opt.step()
    assert int(opt.clock.step) == 2
    assert p.norm().item() == pytest.approx(2 * 3**0.5)


@pytest.mark.parametrize("ratio", SCHEDULES, ids=repr)
def test_groups_that_another_checkpoint_contains_are_loaded_as_plain_data(ratio):
    """Lightning's callbacks for fine-tuning store the groups themselves."""
    model = SmallModel()
    opt = AdamWN(model.parameters(), lr=1e-2, ratio=ratio)
    train(model, opt, range(3))
    (group,) = opt.param_groups
    file = io.BytesIO()
    torch.save({name: value for name, value in group.items() if name != "params"}, file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    assert type(stored["control"]) is type(group["control"])
    assert repr(stored["control"]) == repr(group["control"])
    assert stored["control"]["ratio"] == ratio
    again = AdamWN(model.parameters(), lr=1e-2, ratio=1.0)
    again.param_groups = [{**stored, "params": again.param_groups[0]["params"]}]
    before, after = opt.norms()["global"], again.norms()["global"]
    assert (after.target, int(again.clock.step)) == (before.target, 3)
    assert after.ratio.item() == pytest.approx(before.ratio.item(), rel=1e-6)


@pytest.mark.parametrize("settings", [{"law": "integral", "rate": 1.0}, {"start": "inflection"}])
def test_a_state_without_norm_control_is_loaded_as_by_a_new_optimizer(settings):
    """What a law or a start remembered of the steps before belongs to other weights."""
    first = SmallModel()
    adamw = torch.optim.AdamW(first.parameters(), lr=1e-2)
    train(first, adamw, range(2))
    models, runs = [copy.deepcopy(first) for _ in range(2)], []
    for model in models:
        runs.append(AdamWN(model.parameters(), lr=1e-2, ratio=0.5, scope="tensor", **settings))
    train(models[0], runs[0], range(2, 5))
    runs[0].param_groups[0]["control"]["memory"][4:] = 1.0  # as after an inflection
    models[0].load_state_dict(first.state_dict())
    for model, opt in zip(models, runs, strict=True):
        with pytest.warns(UserWarning, match="no reference norms"):
            opt.load_state_dict(copy.deepcopy(adamw.state_dict()))
        train(model, opt, range(5, 8))
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("foreign", [False, True])
def test_a_state_is_loaded_in_inference_mode_as_by_adamw(foreign):
    """The controller's step counter was made there, and could not be counted up later."""
    model = SmallModel()
    opt = AdamWN(model.parameters(), lr=1e-2, ratio=1.0)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2) if foreign else opt
    train(model, theirs, range(2))
    state = copy.deepcopy(theirs.state_dict())
    with torch.inference_mode():
        opt.load_state_dict(state)
    train(model, opt, range(2, 4))
    assert int(opt.clock.step) == 2 + 2 * (not foreign)


@pytest.mark.parametrize("settings", [{}, {"start": 1}, {"law": "integral"}], ids=str)
def test_an_optimizer_is_constructed_and_added_to_in_inference_mode_as_adamw(settings):
    (model, late), (twin, later) = ((SmallModel(), torch.nn.Linear(3, 3)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    later.load_state_dict(late.state_dict())
    opts = []
    for inferring, m, added in ((True, model, late), (False, twin, later)):
        with torch.inference_mode(inferring):
            opt = AdamWN(m.parameters(), lr=1e-2, ratio=1.0, scope="tensor", **settings)
            opt.add_param_group({"params": list(added.parameters())})
        opts.append(opt)
    for m, opt in zip((model, twin), opts, strict=True):
        train(m, opt, range(3))
        p = torch.nn.Parameter(torch.eye(3))
        with torch.inference_mode(opt is opts[0]):
            opt.add_param_group({"params": [p]})
        train(m, opt, range(3, 5))
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )
