"""GradScaler, torch.compile and torch.distributed.checkpoint: skipped and dummy steps change
nothing, and compiled steps follow their schedules."""

import copy

import pytest
import torch
from small import SmallModel, scaled_step, total_norm, train, with_eta
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from normcontrol import AdamWN, NormControl, cosine, linear, trace


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# GradScaler


IMPLEMENTATIONS = {
    "for-loop": lambda params, **s: AdamWN(params, lr=1e-2, foreach=False, **s),
    "foreach": lambda params, **s: AdamWN(params, lr=1e-2, foreach=True, **s),
    "fused": lambda params, **s: AdamWN(params, lr=1e-2, fused=True, **s),
    "NormControl": lambda params, **s: NormControl(
        torch.optim.Adam(params, lr=1e-2, fused=True), **s
    ),
}


@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("scope", ["global", "row"])
@pytest.mark.parametrize("make", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_an_overflow_step_leaves_weights_norms_and_schedules_alone(make, scope, order):
    """A run with overflow steps ends in the same bits as a run without them."""
    settings = {
        "ratio": linear(1.0, 2.0, steps=8),
        "rate": cosine(0.5, 0.1, steps=8),
        "scope": scope,
        "order": order,
    }
    ends = []
    for overflows in ((), (0, 3, 4)):
        model = SmallModel()
        opt = make(list(model.parameters()), **settings)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for t in range(6):
            if t in overflows:
                before, norms, groups = (
                    weights(model),
                    [r.norm for r in opt.norms().values()],
                    str(opt.state_dict()["param_groups"]),
                )
                scaled_step(model, opt, scaler, 99, overflow=True)
                assert same(weights(model), before)
                assert str(opt.state_dict()["param_groups"]) == groups
                if order == "after":  # with "before", norms() are those before Adam's update
                    assert all(
                        torch.allclose(r.norm, n, rtol=1e-6)
                        for r, n in zip(opt.norms().values(), norms, strict=True)
                    )
            scaled_step(model, opt, scaler, t)
        ends.append(
            (
                weights(model),
                [r.norm for r in opt.norms().values()],
                int(opt.param_groups[0]["control"]["step"]),
            )
        )
    assert same(ends[0][0], ends[1][0])
    assert same(ends[0][1], ends[1][1])
    assert ends[0][2] == ends[1][2] == 6


@pytest.mark.parametrize("make", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_scales_that_are_powers_of_two_change_nothing(make):
    models = SmallModel(), SmallModel()
    opts = [make(list(m.parameters()), ratio=1.5, rate=0.1) for m in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for t in range(5):
        train(models[0], opts[0], range(t, t + 1))
        scaled_step(models[1], opts[1], scaler, t)
    assert same(weights(models[0]), weights(models[1]))


def test_only_fused_steps_support_the_scaling_of_gradscaler():
    assert AdamWN(SmallModel().parameters(), fused=True)._step_supports_amp_scaling
    assert not AdamWN(SmallModel().parameters(), foreach=True)._step_supports_amp_scaling


# torch.compile


def compiled_and_eager(dtype, steps, backend, lr, **settings):
    """The weights of a compiled run and of an eager one, and the number of graphs that were
    compiled after the first two steps."""
    models = SmallModel(dtype), SmallModel(dtype)
    opts = [AdamWN(m.parameters(), lr=copy.deepcopy(lr), **settings) for m in models]
    schedulers = [with_eta(opt) for opt in opts]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    step = torch.compile(opts[0].step, backend=counter)
    train(models[0], opts[0], range(2), schedulers[0], step)
    graphs = counter.frame_count
    assert graphs > 0
    train(models[0], opts[0], range(2, steps), schedulers[0], step)
    train(models[1], opts[1], range(steps), schedulers[1])
    return models, opts, counter.frame_count - graphs


def test_a_compiled_step_is_not_compiled_again_when_schedules_change_their_values():
    """Without code generation: ``test_reference.py`` has that."""
    settings = {"ratio": linear(1.0, 2.0, steps=40), "rate": cosine(0.2, 0.02, steps=50)}
    models, opts, again = compiled_and_eager(
        torch.float32, 50, "aot_eager", torch.tensor(1e-2), **settings
    )
    assert again == 0
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    ours, theirs = (opt.norms()["global"] for opt in opts)
    assert ours.target.item() == pytest.approx(theirs.target.item(), rel=1e-12)
    assert ours.norm.item() == pytest.approx(theirs.norm.item(), rel=1e-5)
    assert int(opts[0].param_groups[0]["control"]["step"]) == 50
    assert opts[0].report()


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (
            torch.float64,
            {
                "scope": "row",
                "ratio": trace([1.0, 1.5, 1.2], steps=[0, 20, 60]),
                "rate": lambda step: 0.1 / step,
                "order": "before",
            },
        ),
        (
            torch.float64,
            {
                "scope": "tensor",
                "rms": 0.3,
                "rate": linear(0.0, 0.1, steps=30),
                "law": "upper",
                "foreach": False,
            },
        ),
        (torch.bfloat16, {"scope": "global", "ratio": linear(1.0, 1.5, steps=30), "rate": 0.05}),
    ],
    ids=["row", "tensor", "bf16"],
)
def test_every_setting_compiles(dtype, settings):
    """Traced without a code generator, which is what decides about recompilation and is quick."""
    models, _, again = compiled_and_eager(dtype, 50, "eager", torch.tensor(1e-3), **settings)
    assert again == 0
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-6
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "settings",
    [
        {"start": 2, "ratio": 1.5},
        {"start": 2, "hold": 1.2, "scope": "group"},
        {"start": "every step", "ratio": 1.5},
        {"start": "inflection", "ratio": 0.5, "rate": 1.0},
        {"law": "integral", "norm": 10.0, "rate": 0.5},
    ],
    ids=["step", "group", "every step", "inflection", "integral"],
)
def test_what_a_joint_norm_remembers_is_kept_in_a_compiled_step(settings, monkeypatch):
    """The compiler loses what is written in place into a 0-d float64 tensor."""
    monkeypatch.setattr("normcontrol.mechanisms.start.SAMPLED_EVERY", 2)
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8))
        opt = NormControl(torch.optim.SGD([weight], lr=1e-2), **settings)
        step = torch.compile(opt.step, backend="aot_eager") if compiled else opt.step
        for i in range(12):
            weight.grad = -weight.detach() * (1 if i < 3 else -1)
            step()
        (reading,) = opt.norms().values()
        found.append((reading.target.item(), reading.norm.item()))
    assert found[1] == pytest.approx(found[0], rel=1e-12)


def test_a_compiled_step_that_fails_is_not_counted():
    model = SmallModel()
    opt = AdamWN(model.parameters(), lr=torch.tensor(1e-2))
    train(model, opt, range(2))
    before = weights(model)

    def closure():
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        torch.compile(opt.step, backend="eager")(closure)
    assert int(opt.param_groups[0]["control"]["step"]) == 2
    assert torch.is_grad_enabled()
    assert same(weights(model), before)


def add_hook(model, opt):
    """A hook of the wrapped optimizer that changes weights."""

    def hook(*_):
        with torch.no_grad():
            model.up.weight.add_(1e-2)

    opt.optimizer.register_step_post_hook(hook)


def freeze(model, _):
    model.up.weight.requires_grad_(False)
    model.up.weight.grad = None


@pytest.mark.parametrize("change", [add_hook, freeze])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: AdamWN(params, lr=torch.tensor(1e-2)),
        lambda params: NormControl(torch.optim.SGD(params, lr=0.1, momentum=0.9), scope="tensor"),
    ],
    ids=["AdamWN", "NormControl"],
)
def test_a_compiled_step_notices_what_changed_since_it_was_compiled(make, change):
    """A graph that does not check hooks or gradients of the wrapped optimizer would miss it."""
    trained = {}
    for compiled in (False, True):
        torch._dynamo.reset()
        model = SmallModel()
        opt = make(list(model.parameters()))
        step = torch.compile(opt.step, backend="eager") if compiled else None
        train(model, opt, range(3), step=step)
        change(model, opt)
        train(model, opt, range(3, 6), step=step)
        trained[compiled] = weights(model)
    for a, b in zip(trained[False], trained[True], strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [AdamWN, lambda params: NormControl(torch.optim.SGD(params, lr=0.1))],
    ids=["AdamWN", "NormControl"],
)
def test_an_optimizer_can_be_constructed_in_a_compiled_function(make):
    model, twin = SmallModel(), SmallModel()

    def one_step(model):
        opt = make(list(model.parameters()))
        model.up.weight.grad = torch.ones_like(model.up.weight)
        opt.step()
        return opt

    compiled = torch.compile(one_step, backend="eager")(model)
    eager = one_step(twin)
    assert torch.allclose(model.up.weight, twin.up.weight)
    assert compiled.norms()["global"].norm.item() == pytest.approx(
        eager.norms()["global"].norm.item()
    )
    compiled.step()


def test_a_compiled_step_can_be_followed_by_an_eager_one():
    models = SmallModel(torch.float64), SmallModel(torch.float64)
    opts = [
        AdamWN(m.parameters(), lr=1e-2, ratio=linear(1.0, 2.0, steps=10), rate=0.1) for m in models
    ]
    torch._dynamo.reset()
    train(models[0], opts[0], range(3), step=torch.compile(opts[0].step, backend="eager"))
    train(models[0], opts[0], range(3, 6))
    train(models[1], opts[1], range(6))
    assert opts[0].norms()["global"].target.item() == opts[1].norms()["global"].target.item()
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        # The compiled Adam computes 1 - 0.999 in float32, with a relative error of 6e-5.
        assert torch.allclose(a, b, rtol=0, atol=6 * 1e-2 * 6e-5)


# torch.distributed.checkpoint


@pytest.mark.parametrize("make", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("order", ["after", "before"])
def test_the_dummy_step_of_distributed_checkpoint_does_not_move_weights(make, order):
    """With an empty state it calls step() with lr 0 and zero gradients, to have one that it can
    load into."""
    model = SmallModel()
    opt = make(list(model.parameters()), ratio=3.0, rate=1.0, order=order)
    before = weights(model)
    state = get_optimizer_state_dict(model, opt)
    assert same(weights(model), before)
    assert int(opt.param_groups[0]["control"]["step"]) == 0
    assert "up.weight" in state["state"]
    train(model, opt, range(1))
    assert opt.norms()["global"].target.item() == pytest.approx(
        3 * total_norm(w for w in before if w.dim() >= 2), rel=1e-6
    )


def test_distributed_checkpoint_restores_the_reference_norms_and_the_step():
    settings = {"lr": 1e-2, "ratio": linear(1.0, 2.0, steps=10), "rate": 0.1}
    model, other = SmallModel(), SmallModel(seed=1)
    opt, opt_2 = AdamWN(model.parameters(), **settings), AdamWN(other.parameters(), **settings)
    train(model, opt, range(4))
    other.load_state_dict(model.state_dict())
    # Without the copy, both optimizers would share the moments.
    set_optimizer_state_dict(other, opt_2, copy.deepcopy(get_optimizer_state_dict(model, opt)))
    assert torch.equal(
        opt_2.param_groups[0]["control"]["reference"], opt.param_groups[0]["control"]["reference"]
    )
    for m, o in ((model, opt), (other, opt_2)):
        train(m, o, range(4, 8))
    assert same(weights(model), weights(other))
