"""What ``torch.optim.AdamW`` does, AdamWN does: training, state, hooks, closures and groups."""

import contextlib
import copy
import inspect
import io
import pickle
import warnings

import pytest
import torch
from contract_cases import ADAMW, Run, assert_same, both, every_input
from torch.nn import Parameter
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing._internal.common_optimizers import OptimizerErrorEnum

from normcontrol import AdamWN, NormControl


@both
@every_input
def test_training_reduces_the_loss(cls, kwargs):
    run = Run(cls, kwargs)
    before = run.error().item()
    run.step(20)
    assert run.error().item() < before
    assert len(run.opt.state) == 2


@both
@every_input
def test_gradients_are_left_as_they_are(cls, kwargs):
    run = Run(cls, kwargs)
    run.closure()
    before = [p.grad.clone() for p in (run.weight, run.bias)]
    run.opt.step()
    assert_same(before, [run.weight.grad, run.bias.grad])


@both
@every_input
def test_a_state_saved_and_loaded_continues_bit_for_bit(cls, kwargs):
    run = Run(cls, kwargs)
    run.step(3)
    file = io.BytesIO()
    torch.save({"opt": run.opt.state_dict(), "weights": run.weights()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    weight, bias = (Parameter(w) for w in saved["weights"])
    opt = cls([weight, bias], **copy.deepcopy(kwargs))
    opt.load_state_dict(state_dict=saved["opt"])
    other = run.continued_by(opt, weight, bias)
    for r in (run, other):
        r.step(5)
    assert_same(run.weights(), other.weights())


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@both
@every_input
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_copy_continues_bit_for_bit(cls, kwargs, copied):
    run = Run(cls, kwargs)
    run.step(3)
    opt, weight, bias = copied((run.opt, run.weight, run.bias))
    other = run.continued_by(opt, weight, bias)
    run.step(5)
    assert not torch.equal(run.weight, weight)
    other.step(5)
    assert_same(run.weights(), other.weights())


@both
@every_input
@pytest.mark.parametrize("schedulers", ADAMW.scheduler_inputs)
def test_learning_rate_schedulers_change_its_learning_rate(cls, kwargs, schedulers):
    run = Run(cls, kwargs)
    made = [make(run.opt) for make in schedulers]
    before = run.error().item()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as "lr_scheduler.step() before optimizer.step()"
        for _ in range(25):
            run.step()
            for scheduler in made:
                if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    scheduler.step(run.error().item())
                else:
                    scheduler.step()
    assert run.error().item() < before
    assert float(run.opt.param_groups[0]["lr"]) < float(kwargs.get("lr", 1e-3))


@both
@pytest.mark.parametrize(
    "given",
    ADAMW.optim_error_inputs_func(device="cpu", dtype=torch.float32),
    ids=lambda e: e.optimizer_error_input.desc,
)
def test_what_adamw_refuses_is_refused_in_the_same_words(cls, given):
    params = given.optimizer_error_input.params
    if params is None:
        params = [Parameter(torch.randn(2, 3))]
    assert given.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
    expect = pytest.warns if issubclass(given.error_type, Warning) else pytest.raises
    # Cases that expect a warning may have vectors only: AdamWN then raises a ValueError after it,
    # because nothing would be controlled.
    then = contextlib.suppress(ValueError) if expect is pytest.warns else contextlib.nullcontext()
    with expect(given.error_type, match=given.error_regex), then:
        cls(params, **given.optimizer_error_input.kwargs)


@both
def test_capturable_on_the_cpu_is_refused_at_the_step(cls):
    run = Run(cls, {"capturable": True})
    with pytest.raises(
        AssertionError, match="capturable=True, params and state_steps must be on supported devices"
    ):
        run.step()


@both
@pytest.mark.parametrize("flag", ADAMW.not_og_supported_flags)
def test_states_without_the_newest_flags_load(cls, flag):
    run = Run(cls, {})
    run.step(2)
    old = copy.deepcopy(run.opt.state_dict())
    for group in old["param_groups"]:
        del group[flag]
    run.opt.load_state_dict(old)
    run.step()
    assert not run.opt.param_groups[0][flag]


@both
def test_step_hooks_run_once_each_in_order(cls):
    run, seen = Run(cls, {}), []

    def note(name):
        return lambda opt, args, kwargs: seen.append((name, opt))

    handles = [
        register_optimizer_step_pre_hook(note("global before")),
        register_optimizer_step_post_hook(note("global after")),
        run.opt.register_step_pre_hook(note("before")),
        run.opt.register_step_post_hook(note("after")),
    ]
    try:
        run.step(2)
    finally:
        for handle in handles:
            handle.remove()
    run.step()
    assert [name for name, _ in seen] == ["global before", "before", "after", "global after"] * 2
    assert all(opt is run.opt for _, opt in seen)


@both
def test_hooks_of_state_dict_and_load_state_dict_run(cls):
    run, seen = Run(cls, {}), []
    run.opt.register_state_dict_pre_hook(lambda opt: seen.append("before saving"))
    run.opt.register_state_dict_post_hook(lambda opt, state: {**state, "extra": 1})
    run.opt.register_load_state_dict_pre_hook(
        lambda opt, state: seen.append(f"before loading {sorted(state)}")
    )
    run.opt.register_load_state_dict_post_hook(lambda opt: seen.append("after loading"))
    state = run.opt.state_dict()
    assert state["extra"] == 1
    run.opt.load_state_dict(state)
    assert seen == [
        "before saving",
        "before loading ['extra', 'param_groups', 'state']",
        "after loading",
    ]


@both
@every_input
def test_a_closure_is_called_once_and_its_loss_returned(cls, kwargs):
    run, losses = Run(cls, kwargs), []

    def closure():
        assert torch.is_grad_enabled()
        losses.append(run.closure())
        return losses[-1]

    returned = run.opt.step(closure)
    assert len(losses) == 1
    assert returned is losses[0]
    assert run.opt.step() is None


@both
@pytest.mark.parametrize("names", [False, True])
def test_a_group_added_later_trains_with_its_own_settings(cls, names):
    first, second = Parameter(torch.ones(3, 3)), Parameter(torch.ones(3, 3))
    opt = cls([("first", first)] if names else [first], lr=0.1)
    opt.add_param_group({"params": [("second", second)] if names else [second], "lr": 0.0})
    assert [g["lr"] for g in opt.param_groups] == [0.1, 0.0]
    before = second.detach().clone()
    (first.sum() + second.sum()).backward()
    opt.step()
    assert not torch.equal(first, torch.ones(3, 3))
    # Its learning rate is zero, but it may have been scaled.
    assert torch.allclose(second / second.norm(), before / before.norm())
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        opt.add_param_group({"params": [("first", first)] if names else [first]})
    assert len(opt.param_groups) == 2
    opt.step()


@both
def test_zero_grad_sets_gradients_to_none_or_zero(cls):
    run = Run(cls, {})
    run.loss().backward()
    run.opt.zero_grad(set_to_none=False)
    assert run.weight.grad.abs().sum() == 0
    run.opt.zero_grad()
    assert run.weight.grad is None


@both
def test_it_is_an_optimizer_that_prints_its_settings(cls):
    opt = Run(cls, {"lr": 0.125}).opt
    assert isinstance(opt, torch.optim.Optimizer)
    assert repr(opt).startswith(cls.__name__)
    assert "lr: 0.125" in repr(opt)
    assert opt.defaults["lr"] == 0.125


def test_its_arguments_begin_with_those_of_adamw():
    theirs = list(inspect.signature(torch.optim.AdamW.__init__).parameters.values())
    ours = list(inspect.signature(AdamWN.__init__).parameters.values())
    shape = [(p.name, p.kind, p.default) for p in theirs]
    assert [(p.name, p.kind, p.default) for p in ours][: len(shape)] == shape
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(shape) :])


@pytest.mark.parametrize("cls", [NormControl, AdamWN])
def test_overridden_methods_keep_the_arguments_of_the_base(cls):
    """torch.distributed.checkpoint and others pass them by name."""
    overridden = [
        name
        for name, value in vars(torch.optim.Optimizer).items()
        if callable(value) and name in vars(cls) and name != "__init__"
    ]
    assert overridden
    for name in overridden:
        base, ours = (
            inspect.signature(getattr(c, name)).parameters for c in (torch.optim.Optimizer, cls)
        )
        # step(**arguments) takes more, for optimizers whose own step does.
        named = [name for name, p in ours.items() if p.kind is not p.VAR_KEYWORD]
        assert named == list(base), name
