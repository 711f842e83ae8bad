"""Tests of ``NormTrace``: which norms it records, its files, and its use as a schedule."""

from __future__ import annotations

import copy
import gc
import json
import warnings

import pytest
import torch
from small import MATRICES, SmallModel, matrices, scaled_step, total_norm, train
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from normcontrol import AdamWN, NormControl, NormTrace, linear


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
def test_a_trace_records_the_norms_of_the_regularised_weights(every):
    norms, seen = recorded(every=every)
    assert norms.steps == list(range(0, 21, every))
    assert norms.norms == pytest.approx(seen[::every], rel=1e-6)
    assert norms.ratios == pytest.approx([n / seen[0] for n in seen[::every]], rel=1e-6)


def test_a_trace_gives_gains_as_the_report_does():
    model = SmallModel()
    opt = AdamWN(model.parameters(), lr=1e-2, gain=0.8, rate=1.0)
    norms = NormTrace(opt)
    train(model, opt, range(2))
    start = total_norm(matrices(SmallModel())) / sum(len(w) for w in matrices(model)) ** 0.5
    assert norms.gains == pytest.approx([start, 0.8, 0.8])


def test_a_recorded_gain_is_the_target_of_another_width(tmp_path):
    torch.manual_seed(0)
    stack, transposed = torch.nn.Parameter(torch.randn(2, 3, 4)), torch.nn.Linear(6, 5).weight
    groups = [{"params": [stack], "outputs": (0, 1)}, {"params": [transposed], "outputs": 1}]
    adamw = torch.optim.AdamW(groups)
    norms = NormTrace(adamw)
    adamw.step()
    assert norms.gains[-1] == pytest.approx(total_norm([stack, transposed]) / (6 + 6) ** 0.5)
    norms.save(tmp_path / "norms.json")
    assert NormTrace.load(tmp_path / "norms.json").gains == norms.gains
    wide = torch.nn.Linear(64, 48, bias=False)
    opt = AdamWN(wide.parameters(), gain=norms.gains[-1])
    assert opt.norms()["global"].target.item() == pytest.approx(norms.gains[-1] * 48**0.5)


def test_gains_that_cannot_be_known_are_refused(tmp_path):
    norms = NormTrace(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 3, 4))]))
    with pytest.raises(ValueError, match=r"gains of this trace are not known: .* Give outputs="):
        _ = norms.gains
    norms, _ = recorded(steps=1)
    norms.save(tmp_path / "norms.csv")
    with pytest.raises(ValueError, match="the file does not contain them"):
        _ = NormTrace.load(tmp_path / "norms.csv").gains


def test_a_trace_printed_says_how_far_it_is():
    norms, _ = recorded(steps=3)
    assert repr(norms) == f"NormTrace(4 records, step 3, ratio {norms.ratios[-1]:.4g})"
    fresh = NormTrace(torch.optim.AdamW(SmallModel().parameters()))
    assert repr(fresh) == "NormTrace(no records: the optimizer has made no step)"


def test_a_trace_records_the_weights_that_adamwn_would_control():
    model = SmallModel()
    decayed, rest = [model.up.weight, model.up.bias], [model.down.weight, model.norm.weight]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    adamw, opt = torch.optim.AdamW(groups), AdamWN(groups)
    norms = NormTrace(adamw)
    adamw.step()
    assert norms.norms[0] == pytest.approx(opt.norms()["global"].norm.item(), rel=1e-12)
    assert norms.norms[0] == pytest.approx(total_norm(decayed), rel=1e-6)


def test_a_trace_leaves_frozen_tensors_out_as_adamwn_does():
    """Their norm does not change, so the recorded ratios were too close to 1 for the others."""
    model = SmallModel()
    model.embed.weight.requires_grad_(False)
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1)
    opt = AdamWN(copy.deepcopy(model).parameters())
    norms = NormTrace(adamw)
    train(model, adamw, range(3))
    assert norms.norms[0] == pytest.approx(opt.norms()["global"].norm.item(), rel=1e-12)
    assert norms.norms[-1] == pytest.approx(total_norm(matrices(model)[1:]), rel=1e-6)
    assert list(norms.classes) == MATRICES[1:]


def test_a_trace_says_once_that_tensors_were_frozen_or_unfrozen():
    first, second = (torch.nn.Parameter(torch.eye(2)) for _ in range(2))
    second.requires_grad_(False)
    opt = torch.optim.AdamW([first, second, torch.nn.Parameter(torch.ones(2))], lr=0.0)
    norms = NormTrace(opt)
    opt.step()
    second.requires_grad_(True)
    with pytest.warns(UserWarning, match="1 tensors that were frozen when this trace was made are"):
        opt.step()
    first.requires_grad_(False)
    with pytest.warns(UserWarning, match="1 of the 1 tensors that this trace .* a new NormTrace"):
        opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    assert norms.norms == [2**0.5] * 5


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


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=True),
        lambda p: AdamWN(p, lr=1e-2, ratio=1.5, fused=True),
        lambda p: NormControl(torch.optim.Adam(p, lr=1e-2, fused=True), ratio=1.5),
    ],
    ids=["AdamW fused", "AdamW foreach", "AdamWN", "NormControl"],
)
def test_steps_that_gradscaler_skips_are_not_steps_of_a_trace(make):
    """A run with overflow steps has the trace of a run without them."""
    traces = []
    for overflows in ((), (0, 1, 3)):
        model = SmallModel()
        opt = make(list(model.parameters()))
        norms = NormTrace(opt, every=2, angles=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for t in range(4):
            if t in overflows:
                scaled_step(model, opt, scaler, 99, overflow=True)
            scaled_step(model, opt, scaler, t)
        assert norms.steps == [0, 2, 4]
        traces.append((norms.norms, norms.angles, norms.classes))
    assert traces[0] == traces[1]


@pytest.mark.parametrize("make", [torch.optim.AdamW, AdamWN])
def test_the_dummy_step_of_a_checkpoint_is_no_step_of_a_trace(make):
    """An optimizer without a state gets a step with zero gradients and a learning rate of zero
    where its state is asked for, such as before a checkpoint is loaded."""
    model = SmallModel()
    opt = make(model.parameters(), lr=1e-2)
    norms = NormTrace(opt)
    get_optimizer_state_dict(model, opt)
    assert norms.steps == []
    with torch.no_grad():
        model.up.weight.mul_(3.0)  # the weights of the checkpoint
    start = total_norm(matrices(model))
    train(model, opt, range(2))
    assert norms.steps == [0, 1, 2]
    assert norms.norms[0] == pytest.approx(start, rel=1e-6)


def test_a_warm_up_that_begins_at_a_learning_rate_of_zero_is_recorded_from_its_first_step():
    model = SmallModel()
    opt = torch.optim.AdamW(model.parameters(), lr=0.0)
    norms = NormTrace(opt)
    train(model, opt, range(2))
    assert norms.steps == [0, 1, 2]


def test_a_trace_records_the_norms_of_each_class_and_what_decay_leaves():
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


def test_a_trace_follows_the_groups_of_a_loaded_state():
    w = torch.nn.Parameter(torch.eye(2))
    adamw = torch.optim.AdamW([w], lr=0.1, weight_decay=0.0)
    norms = NormTrace(adamw)
    adamw.load_state_dict(adamw.state_dict())
    adamw.param_groups[0]["lr"] = 0.5
    adamw.step()
    assert norms.classes["2x2"].noise == [0.0, 0.25]


@pytest.mark.parametrize("make", [torch.optim.AdamW, AdamWN])
def test_a_trace_says_once_that_groups_added_later_are_not_recorded(make):
    opt = make([torch.nn.Parameter(torch.eye(2))], lr=0.0)
    norms = NormTrace(opt)
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 3))], "lr": 0.1})
    with pytest.warns(
        UserWarning,
        match="has 2 groups, and this trace was made when it had 1: .* are not recorded.*make a",
    ):
        opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    assert norms.norms == [2**0.5] * 3


def test_a_trace_says_once_that_tensors_were_replaced():
    group = {"params": [torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.eye(3))]}
    opt = torch.optim.AdamW([group], lr=0.0)
    NormTrace(opt, every=2)
    opt.step()
    opt.param_groups[0]["params"][1] = torch.nn.Parameter(torch.ones(4, 4))
    with pytest.warns(UserWarning, match="1 of the 2 tensors that this trace .* a new NormTrace"):
        opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
        opt.step()


def test_a_learning_rate_in_a_tensor_is_summed_in_double_precision():
    w = torch.nn.Parameter(torch.eye(2))
    lr = torch.tensor(2.0**-13, dtype=torch.float32)
    adamw = torch.optim.AdamW([w], lr=lr, weight_decay=1.0, fused=True)
    norms = NormTrace(adamw)
    for _ in range(2):
        adamw.step()
    once = 2.0**-26
    assert norms.classes["2x2"].noise == [0.0, once, once * (1 - 2.0**-13) ** 2 + once]


def test_a_trace_of_weights_that_start_at_zero_has_norms_and_no_ratios():
    w = torch.nn.Parameter(torch.zeros(2, 2))
    sgd = torch.optim.SGD([w], lr=1.0)
    norms = NormTrace(sgd)
    w.grad = torch.ones(2, 2)
    sgd.step()
    assert (norms.norms, repr(norms)) == ([0.0, 2.0], "NormTrace(2 records, step 1, norm 2)")
    for read in (lambda: norms.ratios, norms.curve, norms.final):
        with pytest.raises(ValueError, match=r"all zero at step 0, .*norm=trace\(recorded.norms"):
            read()


def test_a_trace_without_records_is_no_schedule():
    norms = NormTrace(torch.optim.SGD(SmallModel().parameters(), lr=0.1))
    for read in (norms.curve, norms.final):
        with pytest.raises(ValueError, match=r"no records yet.*Train with that one first"):
            read()
    assert norms.ratios == []


def test_a_trace_under_norm_control_records_no_classes():
    model = SmallModel()
    opt = AdamWN(model.parameters(), ratio=1.5)
    norms = NormTrace(opt)
    train(model, opt, range(2))
    assert norms.classes == {}


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: AdamWN(p, lr=0.01, ratio=1.5, rate=0.5)],
)
def test_a_trace_records_the_angles_of_steps(make):
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


def test_an_optimizer_without_a_learning_rate_is_recorded():
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


@pytest.mark.parametrize("suffix", ["json", "csv"])
def test_no_file_stays_open_after_a_trace_was_saved_and_loaded(tmp_path, suffix):
    norms, _ = recorded(steps=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        norms.save(tmp_path / f"norms.{suffix}")
        NormTrace.load(tmp_path / f"norms.{suffix}")
        gc.collect()
    assert not said


@pytest.mark.parametrize("suffix", ["json", "csv"])
def test_a_saved_trace_is_loaded(tmp_path, suffix):
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
        ("x.json", "[1, 2]", "is not a norm trace: it should contain steps and norms"),
        ("x.json", "{}", "is not a norm trace"),
        (
            "x.json",
            '{"steps": [0], "norms": []}',
            "contains 1 steps and 0 norms: a trace needs one norm for each step",
        ),
        ("x.csv", "a,b\n1,2\n", "is not a norm trace"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused(tmp_path, name, content, sentence):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        NormTrace.load(tmp_path / name)


def test_what_cannot_be_recorded_is_refused():
    for every in (0, 1.5, "2"):
        with pytest.raises(ValueError, match=f"every={every!r}: it is the number of steps between"):
            NormTrace(torch.optim.SGD(SmallModel().parameters(), lr=0.1), every=every)
    with pytest.raises(TypeError, match="records the norms of an optimizer's weights, but got a L"):
        NormTrace(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="regularises no weights, so there is no norm to record"):
        NormTrace(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1))


def test_the_curve_of_ratios_is_a_schedule_smoothed_or_not():
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
    assert norms.curve(smooth=2).values == pytest.approx(
        [ratios[0], *(sum(ratios[i - 1 : i + 1]) / 2 for i in range(1, 5))]
    )
    with pytest.raises(
        ValueError, match=r"smooth=0: it is the number of records in a mean. Give a"
    ):
        norms.curve(smooth=0)
    assert curve(7.5) == pytest.approx((ratios[1] + ratios[2]) / 2)


def test_the_final_ratio_is_a_schedule_with_a_ramp():
    norms, seen = recorded()
    final = norms.final(ramp=8)
    assert isinstance(final, linear)
    assert (final.start, final.steps) == (1.0, 8)
    assert final.end == pytest.approx(seen[-1] / seen[0], rel=1e-6)
    assert norms.final().steps == 2500


def test_adamwn_reaches_the_recorded_norm_of_adamw():
    model = SmallModel()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms = NormTrace(adamw)
    train(model, adamw, range(200))

    challenger = SmallModel()
    opt = AdamWN(challenger.parameters(), lr=1e-2, ratio=norms.final(ramp=50), rate=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=200)
    train(challenger, opt, range(200), scheduler)
    assert abs(total_norm(matrices(model)) / total_norm(matrices(SmallModel())) - 1) > 0.2, (
        "AdamW changes the norm, so that reaching it means something"
    )
    assert total_norm(matrices(challenger)) == pytest.approx(total_norm(matrices(model)), rel=0.01)


def test_a_replayed_curve_is_followed_exactly_at_rate_1():
    norms, seen = recorded()
    model = SmallModel()
    opt = AdamWN(model.parameters(), lr=1e-2, ratio=norms.curve(), rate=1.0)
    for t in range(20):
        train(model, opt, range(t, t + 1))
        assert total_norm(matrices(model)) == pytest.approx(seen[t + 1], rel=1e-6)
