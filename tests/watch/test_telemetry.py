"""Telemetry: what the controller saw is at hand without another pass over the weights, and a run
can be recorded and replayed."""

import json
import traceback

import pytest
import torch
from small import MATRICES, SmallModel, total_norm, train
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from normcontrol import AdamWN, NormControl, NormTrace, linear, param_groups, reproject_, trace


def matrices(model):
    return [p for p in model.parameters() if p.dim() >= 2]


def trained(steps=5, **settings):
    model = SmallModel()
    opt = AdamWN(model.named_parameters(), lr=1e-2, **settings)
    train(model, opt, range(steps))
    return model, opt


def memory_of(model):
    return {p.untyped_storage().data_ptr() for p in model.parameters()}


def held(opt):
    """Every tensor that lives on the device of the weights."""
    return (
        [
            t
            for t in torch.utils._pytree.tree_leaves(
                (opt.param_groups, list(opt.state.values()), [s.last for s in opt.sets])
            )
            if isinstance(t, torch.Tensor)
        ]
        + [s.initial for s in opt.sets]
        + [s.unit for s in opt.sets]
    )


class Watch(TorchDispatchMode):
    """Notes the memory that operations touch, and every value read back that depends on ``device``:
    on a GPU the host would wait for these. Values that the host made itself may be read."""

    def __init__(self, device=()):
        super().__init__()
        self.touched, self.read = set(), []
        self.device = {id(t): t for t in device}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = (
            [t for t in torch.utils._pytree.tree_leaves(x) if isinstance(t, torch.Tensor)]
            for x in ((args, kwargs), out)
        )
        self.touched.update(t.untyped_storage().data_ptr() for t in given)
        if any(id(t) in self.device for t in given):
            self.device.update(
                (id(t), t) for t in (given if out is None else made)
            )  # in-place operations on lists return None
            if "_local_scalar_dense" in str(func):
                self.read.append("".join(traceback.format_stack(limit=8)))
        return out


# norms() and report()


@pytest.mark.parametrize("scope", ["global", "group", "tensor", "row", "col"])
def test_norms_are_those_of_the_weights_as_they_are(scope):
    model, opt = trained(scope=scope, ratio=linear(1.0, 2.0, steps=10), rate=0.3)
    readings = opt.norms()
    if scope in ("global", "group"):
        assert list(readings) == ["global" if scope == "global" else "group 0"]
        (reading,) = readings.values()
        assert reading.norm.item() == pytest.approx(total_norm(matrices(model)), rel=1e-6)
        assert reading.ratio.item() == pytest.approx(
            total_norm(matrices(model)) / total_norm(matrices(SmallModel())), rel=1e-6
        )
        assert reading.target.item() == pytest.approx(
            1.5 * total_norm(matrices(SmallModel())), rel=1e-6
        )
        return
    assert list(readings) == ["embed.weight", "up.weight", "down.weight"]
    for name, reading in readings.items():
        p, p0 = (
            model.get_parameter(name).detach().double(),
            SmallModel().get_parameter(name).detach().double(),
        )
        now, first = (
            (w.norm() if scope == "tensor" else w.norm(dim=1 if scope == "row" else 0))
            for w in (p, p0)
        )
        assert torch.allclose(reading.norm, now, rtol=1e-6)
        assert torch.allclose(reading.target, 1.5 * first, rtol=1e-6)
        assert torch.allclose(reading.ratio, now / first, rtol=1e-6)
        assert reading.scale.shape == now.shape


def test_before_the_first_step_norms_are_the_initial_ones():
    model = SmallModel()
    reading = AdamWN(model.parameters(), norm=7.0).norms()["global"]
    assert reading.norm.item() == pytest.approx(total_norm(matrices(model)), rel=1e-7)
    assert (reading.target.item(), reading.ratio.item(), reading.scale.item()) == (7.0, 1.0, 1.0)


@pytest.mark.parametrize("scope", ["global", "tensor", "row"])
def test_norms_make_no_pass_over_the_weights_and_wait_for_nothing(scope):
    model, opt = trained(scope=scope)
    with Watch(held(opt)) as watch:
        readings = opt.norms()
    assert watch.touched.isdisjoint(memory_of(model))
    assert not watch.read
    assert all(
        isinstance(value, torch.Tensor) for reading in readings.values() for value in reading
    )


def test_a_report_makes_no_pass_over_the_weights():
    model, opt = trained()
    with Watch() as watch:
        opt.report()
    assert watch.touched.isdisjoint(memory_of(model))
    with Watch() as watch:
        opt.step()
    assert watch.touched >= memory_of(model), "the watch sees it when someone does touch them"


@pytest.mark.parametrize("scope", ["global", "group", "tensor", "row"])
@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_reads_nothing_back(scope, order, dtype):
    """Nothing that depends on the weights is read by the host, so that a GPU is never waited for.
    (Fused on a CPU may read: what a CPU computes is there when it has been computed. The kernels on
    a GPU are watched by the tests that run there.)"""
    model = SmallModel(dtype)
    opt = AdamWN(
        model.parameters(),
        ratio=linear(1.0, 2.0, steps=3),
        rate=trace([0.1, 0.2] * 50),
        scope=scope,
        order=order,
        fused=True,
    )
    train(model, opt, range(2))
    with Watch(held(opt)) as watch:
        opt.step()
    waited = [stack for stack in watch.read if "normcontrol/folded.py" not in stack]
    assert not waited, "\n".join(waited)
    with Watch(held(opt)) as watch:
        opt.norms()[next(iter(opt.norms()))].norm.sum().item()
    assert len(watch.read) == 1, "the watch sees it when someone does read a value"


def test_the_report_is_a_table_of_who_is_controlled():
    model = SmallModel()
    groups = param_groups(model, {"embed.*": {"scope": "tensor", "ratio": 1.0}})
    opt = AdamWN(groups, ratio=linear(1.0, 2.0, steps=10), rate=0.5)
    train(model, opt, range(5))
    lines = opt.report().splitlines()
    assert lines[0] == "AdamWN: 3 of 8 tensors controlled, 344 weights, step 5"
    assert (
        "scope global, ratio linear(start=1.0, end=2.0, steps=10), rate 0.5, law proportional, "
        "after the step" in lines
    )
    assert "scope tensor, ratio 1.0, rate 0.5, law proportional, after the step" in lines
    (whole,) = (line.split() for line in lines if line.startswith("all of them"))
    two = [model.up.weight, model.down.weight]
    assert whole[3:] == [
        f"{total_norm([SmallModel().up.weight, SmallModel().down.weight]):.4g}",
        f"{total_norm(two):.4g}",
        f"{total_norm(two) / total_norm([SmallModel().up.weight, SmallModel().down.weight]):.4f}",
        f"{1.5 * total_norm([SmallModel().up.weight, SmallModel().down.weight]):.4g}",
    ]
    (embed,) = (line.split() for line in lines if line.startswith("embed.weight"))
    assert embed[1] == "11x8"
    assert embed[3] == f"{total_norm([model.embed.weight]):.4g}"


def test_the_report_of_a_wrapped_optimizer_names_it():
    opt = NormControl(torch.optim.SGD(SmallModel().parameters(), lr=0.1))
    assert opt.report().startswith("NormControl around SGD: 3 of 8 tensors")


# NormTrace


def recorded(steps=20, every=1, **kwargs):
    model = SmallModel()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **kwargs)
    norms = NormTrace(adamw, every=every)
    seen = [total_norm(matrices(model))]
    for t in range(steps):
        train(model, adamw, range(t, t + 1))
        seen.append(total_norm(matrices(model)))
    return norms, seen


@pytest.mark.parametrize("every", [1, 4])
def test_a_trace_holds_the_norms_of_the_regularised_weights(every):
    norms, seen = recorded(every=every)
    assert norms.steps == list(range(0, 21, every))
    assert norms.norms == pytest.approx(seen[::every], rel=1e-6)
    assert norms.ratios == pytest.approx([n / seen[0] for n in seen[::every]], rel=1e-6)


def test_a_trace_means_the_weights_that_adamwn_would_control():
    model = SmallModel()
    decayed, rest = [model.up.weight, model.up.bias], [model.down.weight, model.norm.weight]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    adamw, opt = torch.optim.AdamW(groups), AdamWN(groups)
    norms = NormTrace(adamw)
    adamw.step()
    assert norms.norms[0] == pytest.approx(opt.norms()["global"].norm.item(), rel=1e-12)
    assert norms.norms[0] == pytest.approx(total_norm(decayed), rel=1e-6)


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: AdamWN(p, ratio=1.5, rate=0.5)]
)
def test_any_optimizer_can_be_recorded(make):
    model = SmallModel()
    opt = make(list(model.parameters()))
    norms = NormTrace(opt)
    train(model, opt, range(3))
    assert norms.steps == [0, 1, 2, 3]
    assert norms.norms[-1] == pytest.approx(total_norm(matrices(model)), rel=1e-6)


def test_a_trace_holds_the_norms_of_each_class_and_what_decay_leaves():
    model = SmallModel()
    adamw = torch.optim.AdamW(model.named_parameters(), lr=0.1, weight_decay=0.5)
    norms = NormTrace(adamw, every=2)
    train(model, adamw, range(2))
    adamw.param_groups[0]["lr"] = 0.2
    train(model, adamw, range(2, 4))
    assert list(norms.classes) == MATRICES
    up = norms.classes["up.weight"]
    assert up.count == 128
    assert up.norms[-1] == pytest.approx(total_norm([model.up.weight]), rel=1e-6)
    assert up.kept == pytest.approx([1, 0.95**4, 0.95**4 * 0.9**4])
    one = 0.01 * 0.95**2 + 0.01
    assert up.noise == pytest.approx([0, one, (one * 0.9**2 + 0.04) * 0.9**2 + 0.04])
    assert [
        sum(c.norms[i] ** 2 for c in norms.classes.values()) ** 0.5 for i in range(3)
    ] == pytest.approx(norms.norms)


def test_a_trace_under_control_holds_no_classes():
    model = SmallModel()
    opt = AdamWN(model.parameters(), ratio=1.5)
    norms = NormTrace(opt)
    train(model, opt, range(2))
    assert norms.classes == {}


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: AdamWN(p, lr=0.01, ratio=1.5, rate=0.5)],
)
def test_a_trace_measures_by_how_much_steps_turn_the_weights(make):
    model = SmallModel()
    opt = make(list(model.parameters()))
    norms, seen = NormTrace(opt, every=2, angles=True), []
    for t in range(4):
        before = torch.cat([p.detach().double().flatten() for p in matrices(model)])
        train(model, opt, range(t, t + 1))
        after = torch.cat([p.detach().double().flatten() for p in matrices(model)])
        seen.append(torch.acos(before @ after / before.norm() / after.norm()).item())
    assert norms.angles == pytest.approx(seen[1::2], rel=1e-3)
    assert NormTrace(opt).angles == []


def test_an_optimizer_without_a_learning_rate_is_recorded_all_the_same():
    class Halving(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.mul_(0.5)

    opt = Halving([torch.nn.Parameter(torch.ones(2, 2))])
    norms = NormTrace(opt)
    opt.step()
    assert norms.norms == [2.0, 1.0]
    assert norms.classes["2x2"].noise == [0.0, 0.0]


def test_the_effective_decay_is_the_one_that_adamw_would_need():
    model = SmallModel()
    opt = AdamWN(model.parameters(), lr=0.01, ratio=0.5, rate=0.1)
    train(model, opt, range(3))
    reading = opt.norms()["global"]
    assert reading.decay(0.01).item() == pytest.approx((1 - reading.scale.item()) / 0.01)
    assert (1 - 0.01 * reading.decay(0.01)).item() == pytest.approx(reading.scale.item())
    assert opt.norms()["global"].decay(0.01) > 0


@pytest.mark.parametrize("suffix", ["json", "csv"])
def test_a_trace_survives_its_file(tmp_path, suffix):
    norms, _ = recorded(every=5)
    path = tmp_path / f"norms.{suffix}"
    norms.save(path)
    again = NormTrace.load(path)
    assert (again.steps, again.norms) == (norms.steps, norms.norms)
    assert again.curve() == norms.curve()
    if suffix == "json":
        content = json.loads(path.read_text())
        assert (content["steps"], content["norms"]) == (norms.steps, norms.norms)
        assert again.classes == norms.classes
    else:
        assert path.read_text().splitlines()[:2] == ["step,norm", f"0,{norms.norms[0]}"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.json", "[1, 2]", "is not a norm trace: it should hold steps and norms"),
        ("x.json", "{}", "is not a norm trace"),
        (
            "x.json",
            '{"steps": [0], "norms": []}',
            "holds 1 steps and 0 norms: a trace needs one norm for each step",
        ),
        ("x.csv", "a,b\n1,2\n", "is not a norm trace"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, name, content, sentence):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        NormTrace.load(tmp_path / name)


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(ValueError, match="every=0: a trace records every so many steps"):
        NormTrace(torch.optim.SGD(SmallModel().parameters(), lr=0.1), every=0)
    with pytest.raises(ValueError, match="regularises no weights that have a norm to record"):
        NormTrace(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1))


def test_the_whole_curve_smoothed_or_not():
    norms, _ = recorded(every=5)
    ratios = norms.ratios
    curve, smooth = norms.curve(), norms.curve(smooth=3)
    assert (curve.values, curve.steps) == (tuple(ratios), (0.0, 5.0, 10.0, 15.0, 20.0))
    assert smooth.values == pytest.approx(
        [
            sum(ratios[:2]) / 2,
            *(sum(ratios[i - 1 : i + 2]) / 3 for i in (1, 2, 3)),
            sum(ratios[3:]) / 2,
        ]
    )
    assert curve(7.5) == pytest.approx((ratios[1] + ratios[2]) / 2)


def test_the_final_value_with_a_ramp():
    norms, seen = recorded()
    final = norms.final(ramp=8)
    assert isinstance(final, linear)
    assert (final.start, final.steps) == (1.0, 8)
    assert final.end == pytest.approx(seen[-1] / seen[0], rel=1e-6)
    assert norms.final().steps == 2500


def test_challenge_adamw_at_its_own_norm_in_two_lines():
    model = SmallModel()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms = NormTrace(adamw)  #                                               line one
    train(model, adamw, range(200))

    challenger = SmallModel()
    opt = AdamWN(
        challenger.parameters(), lr=1e-2, ratio=norms.final(ramp=50), rate=0.1
    )  #   line two
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=200)
    train(challenger, opt, range(200), scheduler)
    assert abs(total_norm(matrices(model)) / total_norm(matrices(SmallModel())) - 1) > 0.2, (
        "AdamW's norm went somewhere"
    )
    assert total_norm(matrices(challenger)) == pytest.approx(total_norm(matrices(model)), rel=0.01)


def test_a_replayed_curve_is_followed_exactly_at_rate_1():
    norms, seen = recorded()
    model = SmallModel()
    opt = AdamWN(model.parameters(), lr=1e-2, ratio=norms.curve(), rate=1.0)
    for t in range(20):
        train(model, opt, range(t, t + 1))
        assert total_norm(matrices(model)) == pytest.approx(seen[t + 1], rel=1e-6)


# Averages


@pytest.mark.parametrize("scope", ["global", "tensor", "row"])
def test_an_average_is_shorter_and_reprojection_puts_it_on_target(scope):
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
