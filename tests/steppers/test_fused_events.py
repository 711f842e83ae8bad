"""The Triton kernels in a training run: overflow, clipping, resuming, weights that are changed
between steps, tensors that the kernels cannot handle, and shards."""

import copy
import math
import weakref

import pytest
import torch
from kernel_cases import (
    BETAS,
    CUDA,
    DEVICE,
    INTERPRETED,
    LR,
    STEPS,
    everything,
    gradients,
    here,
    kernels,
    run,
    slow_if_interpreted,
    tensors,
    worst,
)
from processes import run as run_processes
from torch import nn

from normcontrol import AdamWN, NormControl, linear
from normcontrol.law import proportional
from normcontrol.mechanisms import start
from normcontrol.steppers.tables import KEPT, Launch

pytest.importorskip("triton")
pytestmark = [pytest.mark.cuda] if CUDA else []


@here
@pytest.mark.parametrize("order", ["after", "before"])
def test_an_overflow_step_changes_nothing(order):
    params = tensors([100, 700])
    opt = kernels(params, order=order, ratio=1.5, rate=0.5)
    run(opt, params, range(1, 3))
    before = [p.detach().clone() for p in params], copy.deepcopy(opt.state_dict())
    opt.grad_scale, opt.found_inf = torch.ones(1, device=DEVICE), torch.ones(1, device=DEVICE)
    for p in params:
        p.grad = torch.full_like(p, math.inf)
    opt.step()
    del opt.grad_scale, opt.found_inf
    assert all(torch.equal(p, q) for p, q in zip(params, before[0], strict=True))
    if order == "after":  # with "before", norms() are those before Adam's update
        norm = torch.cat(params).detach().norm().item()
        assert opt.norms()["global"].norm.item() == pytest.approx(norm, rel=1e-6)
    for i, state in opt.state_dict()["state"].items():
        assert all(torch.equal(value, before[1]["state"][i][key]) for key, value in state.items())
    assert opt.param_groups[0]["control"]["step"].item() == 2
    twins = tensors([100, 700])
    other = kernels(twins, order=order, ratio=1.5, rate=0.5)
    run(other, twins, range(1, 5))
    run(opt, params, range(3, 5))
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


def bad_at_step_3(step):
    return torch.where(step == 3, -1.0, 1.0)


@here
@pytest.mark.parametrize("order", ["after", "before"])
def test_a_step_that_is_refused_or_whose_closure_raises_changes_nothing(order):
    params = tensors([100, 700])
    opt = kernels(params, order=order, ratio=1.5, rate=0.5)
    run(opt, params, range(1, 3))
    before = [p.detach().clone() for p in params]
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda: 1 / 0)
    opt.param_groups[0]["control"]["ratio"] = bad_at_step_3
    with pytest.raises(ValueError, match=r"is -1 at step 3: .* this step was not made"):
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert opt.clock.step.item() == opt.clock.calls == 2


@here
def test_gradients_are_free_as_soon_as_nobody_else_keeps_them():
    """Else the gradients of two steps would be in memory at the end of the next backward pass."""
    params = tensors()
    opt = kernels(params)
    run(opt, params, range(1, 4))
    last = [weakref.ref(p.grad) for p in params]
    opt.zero_grad()
    assert [ref() for ref in last] == [None] * len(params)


@here
def test_gradients_may_be_at_other_addresses_at_every_step():
    """More sets of gradients than tables of addresses are kept, in turn and then again."""
    ours, theirs = tensors([3, 70]), tensors([3, 70])
    kept = [gradients(ours, t) for t in range(KEPT + 2)]
    opt, twin = kernels(ours), kernels(theirs)
    for t in [*range(KEPT + 2), 0, KEPT + 1, 5, 5]:
        for p, q, g in zip(ours, theirs, kept[t], strict=True):
            p.grad = g
            q.grad = g.clone() if q.grad is None else q.grad.copy_(g)
        opt.step()
        twin.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def new_state(p):
    squares = p.detach().square()
    return {"step": squares.new_tensor(5.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": squares}


CHANGES_OF_STATE = {
    "cleared": lambda opt, p: opt.state.clear(),
    "removed": lambda opt, p: opt.state.pop(p),
    "emptied": lambda opt, p: opt.state.update({p: {}}),
    "replaced": lambda opt, p: opt.state.update({p: new_state(p)}),
    "moments": lambda opt, p: opt.state[p].update(exp_avg_sq=p.detach().square()),
    "step": lambda opt, p: opt.state[p].update(step=p.new_zeros(())),
    "amsgrad": lambda opt, p: (
        opt.param_groups[0].update(amsgrad=True),
        [state.update(max_exp_avg_sq=torch.ones_like(q)) for q, state in opt.state.items()],
    ),
}


@here
@pytest.mark.parametrize("change", CHANGES_OF_STATE)
def test_a_state_that_is_changed_between_steps_is_used(change):
    """The kernels went on with the moments that they had, and the saved state was without them."""
    ours, theirs = tensors([3, 70]), tensors([3, 70])
    opts = kernels(ours), AdamWN(everything(theirs), LR, BETAS, fused=False)
    for params, opt in zip((ours, theirs), opts, strict=True):
        run(opt, params, range(1, 3))
        CHANGES_OF_STATE[change](opt, params[0])
        run(opt, params, range(3, 5))
    assert worst(ours, theirs) < 1e-6
    states = [opt.state_dict()["state"] for opt in opts]
    assert [*states[0]] == [*states[1]]
    for mine, other in zip(*(state.values() for state in states), strict=True):
        for name, value in mine.items():  # torch's other implementations keep "step" on the CPU
            torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-9, check_device=False)


@here
def test_moments_on_another_device_are_refused_by_torch():
    """The kernels read them by their addresses, as if they were on the device of the weights."""
    params = tensors([3, 70])
    opt = kernels(params)
    run(opt, params, range(1, 3))
    state = opt.state[params[0]]
    state["exp_avg"] = state["exp_avg"].to("meta")
    with pytest.raises(RuntimeError), pytest.warns(UserWarning, match="are on different devices"):
        run(opt, params, range(3, 4))


@here
def test_weights_that_were_moved_are_stepped_by_torch_if_the_kernels_cannot(monkeypatch):
    ours, theirs = tensors([3, 70]), tensors([3, 70])
    opts = kernels(ours), AdamWN(everything(theirs), LR, BETAS, fused=False)
    for params, opt in zip((ours, theirs), opts, strict=True):
        run(opt, params, range(1, 3))
    monkeypatch.setattr("normcontrol.steppers.fused.why_not", lambda params: "a parameter is on X")
    ours[0].data = ours[0].data.clone()
    with pytest.warns(UserWarning, match="continues with torch's .* since a parameter is on X"):
        run(opts[0], ours, range(3, 5))
    run(opts[1], theirs, range(3, 5))
    assert opts[0].implementation.endswith("since a parameter is on X")
    assert worst(ours, theirs) < 1e-6


@here
@pytest.mark.parametrize("adam", [True, False], ids=["Adam", "around Adam"])
@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_every_part_starts_at_its_own_inflection(monkeypatch, scope, order, adam):
    """The rate of the first part was that of all: its start was theirs."""
    monkeypatch.setattr(start, "SAMPLED_EVERY", 2)
    runs = []
    for fused in (True, False):
        params = [nn.Parameter(torch.ones(3, 4, device=DEVICE)) for _ in range(2)]
        settings = {"scope": scope, "order": order, "start": "inflection", "ratio": 0.5}
        if adam:
            opt = AdamWN(params, LR, (0.0, 0.0), fused=fused, **settings)
        else:
            opt = NormControl(torch.optim.Adam(params, LR, (0.0, 0.0)), **settings)
            opt.stepper.on_gpu = opt.stepper.on_gpu if fused else frozenset()
        for t in range(12):
            for i, p in enumerate(params):
                p.grad = torch.full_like(p, -1.0)  # a step makes the weights larger by LR
                if t > 3 and (scope == "row" or i == 0):  # but for the first part
                    p.grad[: 1 if scope == "row" else 3] = 0.0
            opt.step()
        runs.append(params)
        started = opt.state_dict()["param_groups"][0]["control"]["memory"][-1]
        assert 0 < started.sum() < len(started)
    assert worst(*runs) < 1e-6


@here
@pytest.mark.parametrize("order", ["after", "before"])
def test_the_default_device_may_be_another_one(order):
    """Pinned memory is the host's: with the GPU as the default device its allocation failed."""
    ours, theirs = tensors([3, 70]), tensors([3, 70])
    for params, device in ((ours, "cpu" if CUDA else "meta"), (theirs, DEVICE)):
        opt = kernels(params, order=order, ratio=1.5)
        run(opt, params, range(1, 2))  # Adam's own state is made on the default device
        grads = [gradients(params, t) for t in range(2, 4)]
        opt.stepper.plan = None
        with torch.device(device):
            for given in grads:
                for p, g in zip(params, given, strict=True):
                    p.grad = g
                opt.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@here
def test_the_scale_of_gradscaler_is_divided_out():
    ours, theirs = tensors(), tensors()
    plain, scaled = kernels(theirs), kernels(ours)
    run(plain, theirs, range(1, 3))
    for t in range(1, 3):
        for p, g in zip(ours, gradients(ours, t), strict=True):
            p.grad = 1024 * g
        scaled.grad_scale, scaled.found_inf = (
            torch.full((1,), 1024.0, device=DEVICE),
            torch.zeros(1, device=DEVICE),
        )
        scaled.step()
    assert worst(ours, theirs) < 1e-6


@here
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_max_grad_norm_clips_as_clip_grad_norm_does(limit, fused):
    ours, theirs = tensors(), tensors()
    clipping = AdamWN(everything(ours), LR, BETAS, eps=1e-2, fused=fused, max_grad_norm=limit)
    plain = AdamWN(everything(theirs), LR, BETAS, eps=1e-2, fused=fused)
    for t in range(1, 4):
        for params in (ours, theirs):
            for p, g in zip(params, gradients(params, t), strict=True):
                p.grad = g
        norm = nn.utils.clip_grad_norm_(theirs, limit)
        plain.step()
        clipping.step()
        assert clipping.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    assert worst(ours, theirs) < 1e-6


@here
def test_gradients_are_clipped_without_the_scale_of_gradscaler():
    ours, theirs = tensors(), tensors()
    scaled, plain = (kernels(p, eps=1e-2, max_grad_norm=0.5) for p in (ours, theirs))
    for t in range(1, 3):
        for p, q, g in zip(ours, theirs, gradients(ours, t), strict=True):
            p.grad, q.grad = 1024 * g, g
        scaled.grad_scale = torch.full((1,), 1024.0, device=DEVICE)
        scaled.found_inf = torch.zeros(1, device=DEVICE)
        scaled.step()
        plain.step()
        assert scaled.grad_norm.item() == pytest.approx(plain.grad_norm.item(), rel=1e-6)
    assert worst(ours, theirs) < 1e-6


def through_data(p, factor):
    p.data.mul_(factor)  # leaves the version as it is


def in_place(p, factor):
    with torch.no_grad():
        p.mul_(factor)


def in_other_memory(p, factor):
    p.data = p.data * factor


@here
@pytest.mark.parametrize(
    "change",
    [
        through_data,
        pytest.param(in_place, marks=slow_if_interpreted),
        pytest.param(in_other_memory, marks=slow_if_interpreted),
    ],
)
@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("order", ["after", "before"])
def test_weights_that_were_changed_between_steps_are_measured_again(order, scope, change):
    ours, theirs = tensors(), tensors()
    settings = {"order": order, "scope": scope, "rate": 0.5}
    fast = kernels(ours, **settings)
    plain = AdamWN(everything(theirs), LR, BETAS, fused=False, **settings)
    for opt, params in ((fast, ours), (plain, theirs)):
        run(opt, params, range(1, 3))
        change(params[1], 7.0)
        run(opt, params, range(3, 5))
        for p in params:
            change(p, 1.1)
        run(opt, params, range(5, 6))
    assert fast.implementation == "Triton kernels"
    assert worst(ours, theirs) < 1e-6
    for name, reading in fast.norms().items():
        assert reading.norm.item() == pytest.approx(plain.norms()[name].norm.item(), rel=1e-6)


@here
def test_order_after_corrects_the_weights_only_if_its_guess_missed():
    """While the norm changes smoothly, the guess is right within a rounding error and no second
    pass is needed. After a jump of the target it is needed."""
    params = tensors()
    opt = kernels(params, ratio=1.0, rate=0.01)
    opt.param_groups[0]["lr"] = 1e-6
    needed = []
    for t in range(1, 9):
        if t == 7:
            opt.param_groups[0]["control"]["ratio"] = 1.5
        for p, g in zip(params, gradients(params, 1), strict=True):
            p.grad = g
        before = [p.detach().double() for p in params]
        opt.step()
        needed.append(opt.stepper.plan.parts.needed.item())
        if t == 7:
            moved = [
                p.detach().double().norm() / q.norm() for p, q in zip(params, before, strict=True)
            ]
            assert all(m.item() == pytest.approx(1.005, abs=2e-4) for m in moved)
    assert needed[3:] == [0, 0, 0, 1, 1]


@here
@pytest.mark.parametrize("law", ["proportional", lambda norm, *goal: proportional(norm, *goal)])
def test_no_second_pass_is_needed_while_a_norm_settles(law):
    params = tensors([100, 700])
    opt = kernels(params, ratio=1.0005, rate=0.3, law=law)
    opt.param_groups[0]["lr"] = 1e-8
    needed = []
    for _ in range(6):
        run(opt, params, range(1, 2))
        needed.append(opt.stepper.plan.parts.needed.item())
    assert needed == [1, 1, 0, 0, 0, 0]  # the guess needs two scales
    opt.param_groups[0]["control"]["ratio"] = 1.0006  # the scale differs by 3e-5
    run(opt, params, range(1, 2))
    assert opt.stepper.plan.parts.needed.item() == 1


@here
@pytest.mark.parametrize(("order", "passes"), [("after", []), ("before", ["sum_squares"])])
def test_order_before_reads_the_weights_once_more_and_order_after_does_not(
    order, passes, monkeypatch
):
    params = tensors([100, 700])
    groups = [{"params": [p], "controlled": True} for p in params]
    opt = kernels(params, groups, order=order, scope="group")
    run(opt, params, range(1, 3))
    launched = []
    launch = Launch.__call__
    monkeypatch.setattr(
        Launch,
        "__call__",
        lambda self, *given: (launched.append(self.kernel.fn.__name__), launch(self, *given)),
    )
    run(opt, params, range(3, 4))
    assert [name for name in launched if name == "sum_squares"] == 2 * passes
    assert launched.count("adam") == 2


@here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ["after", "before"])
def test_resuming_gives_the_same_bits(order, dtype, tmp_path):
    whole, halves = tensors(dtype=dtype), tensors(dtype=dtype)
    settings = {"order": order, "ratio": linear(1.0, 2.0, steps=4), "rate": 0.1}
    run(kernels(whole, **settings), whole, range(1, 5))
    first = kernels(halves, **settings)
    run(first, halves, range(1, 3))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    halves = [nn.Parameter(p.detach().clone()) for p in halves]
    second = kernels(halves, **settings)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    run(second, halves, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))


@here
def test_states_of_the_kernels_load_in_torchs_implementation_and_the_reverse():
    start = tensors()
    ends = []
    for first, second in ((True, False), (False, True)):
        params = copy.deepcopy(start)
        a = AdamWN(everything(params), LR, BETAS, fused=first)
        run(a, params, range(1, 3))
        b = AdamWN(everything(params), LR, BETAS, fused=second)
        b.load_state_dict(a.state_dict())
        run(b, params, range(3, 5))
        ends.append(params)
    assert worst(*ends) < 1e-6


@here
def test_a_tensor_without_a_gradient_still_counts():
    ours, theirs = tensors(), tensors()
    fast = kernels(ours, rate=0.5)
    plain = AdamWN(everything(theirs), LR, BETAS, fused=False, rate=0.5)
    for opt, params in ((fast, ours), (plain, theirs)):
        run(opt, params, range(1, 3))
        for t in (3, 4):
            for i, (p, g) in enumerate(zip(params, gradients(params, t), strict=True)):
                p.grad = None if i == 1 else g
            opt.step()
        run(opt, params, range(5, 7))
    assert worst(ours, theirs) < 1e-6


@here
def test_tensors_that_the_kernels_cannot_handle_go_to_torch_and_the_report_says_why():
    double = AdamWN(
        [nn.Parameter(torch.ones(4, 4, dtype=torch.float64, device=DEVICE))], fused=True
    )
    assert "torch's fused implementation, since a parameter is torch.float64" in double.report()
    unfused = AdamWN([nn.Parameter(torch.ones(4, 4, device=DEVICE))], fused=False)
    assert "fused=False" in unfused.report()
    if CUDA:
        return  # on CUDA, torch's fused implementation refuses the layout below too
    p = nn.Parameter(torch.ones(4, 6, device=DEVICE))
    opt = AdamWN([p], fused=True)
    p.grad = torch.ones(6, 4, device=DEVICE).t()
    with pytest.warns(UserWarning, match="have different memory layouts"):
        opt.step()
    assert "have different memory layouts" in opt.report()
    p.grad = torch.ones(4, 6, device=DEVICE)
    opt.step()
    assert opt.implementation == "Triton kernels"


@here
def test_moments_of_another_shape_do_not_reach_the_kernels():
    """They would read past the end: rows have the same strides in both."""
    p = nn.Parameter(torch.ones(6, 4, device=DEVICE))
    opt = AdamWN([p], fused=True)
    p.grad = torch.ones_like(p)
    opt.step()
    opt.state[p]["exp_avg"] = torch.zeros(3, 4, device=DEVICE)
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"shape \(6, 4\), but its moments \(exp_avg\) .*\(3, 4\)"):
        opt.step()
    assert torch.equal(p, before)


@here
def test_parameters_that_share_memory_go_to_torch():
    """One kernel steps all tensors at once: two that are the same would be stepped once."""
    p = tensors([100])[0]
    opt = kernels([p, nn.Parameter(p.detach())])
    for q in opt.param_groups[0]["params"]:
        q.grad = torch.ones_like(q)
    with pytest.warns(UserWarning, match="since two parameters share memory"):
        opt.step()
    assert "two parameters share memory" in opt.report()


@here
@pytest.mark.parametrize("order", ["after", "before"])
def test_norms_are_those_of_torchs_own_implementation(order):
    settings = {"order": order, "ratio": 1.5, "rate": 0.1}
    one, other = tensors(), tensors()
    ours = kernels(one, **settings)
    torchs = AdamWN(everything(other), LR, BETAS, fused=False, **settings)
    for opt, params in ((ours, one), (torchs, other)):
        run(opt, params, range(1, 4))
    for a, b in zip(ours.norms()["global"], torchs.norms()["global"], strict=True):
        assert a.item() == pytest.approx(b.item(), rel=1e-5)


@here
@pytest.mark.parametrize("order", ["after", "before"])
def test_the_shards_of_dtensors_go_through_the_kernels(order, tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group(
        "nccl" if CUDA else "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        whole = tensors()
        mesh = init_device_mesh(DEVICE, (1,))
        spread = [
            nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in whole
        ]
        settings = {"order": order, "ratio": 1.5, "rate": 0.1, "max_grad_norm": 0.5}
        one, other = kernels(whole, **settings), kernels(spread, **settings)
        for t in range(1, STEPS + 1):
            for p, q, g in zip(whole, spread, gradients(whole, t), strict=True):
                p.grad, q.grad = g, distribute_tensor(g, mesh, [Shard(0)])
            one.step()
            other.step()
        assert other.implementation == "Triton kernels"
        assert worst([q.to_local() for q in spread], whole) < 1e-6
        assert other.norms()["global"].norm.item() == pytest.approx(
            one.norms()["global"].norm.item(), rel=1e-7
        )
    finally:
        dist.destroy_process_group()


def shards_over_two_processes() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    for scope, order in (("global", "after"), ("tensor", "before"), ("row", "after")):
        shapes = [(7, 5), (64, 33)]
        whole = [
            nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(1))) for s in shapes
        ]
        sharded = [
            nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in whole
        ]
        settings = {"lr": LR, "ratio": 1.5, "rate": 0.1, "scope": scope, "order": order}
        one = AdamWN(whole, fused=False, max_grad_norm=0.5, **settings)
        other = AdamWN(sharded, max_grad_norm=0.5, **settings)
        for t in range(1, 5):
            for p, q, g in zip(whole, sharded, gradients(whole, t), strict=True):
                p.grad, q.grad = g, distribute_tensor(g, mesh, [Shard(0)])
            one.step()
            other.step()
        assert other.implementation == "Triton kernels"
        assert worst([q.full_tensor() for q in sharded], whole) < 1e-6


@here
@pytest.mark.slow
@pytest.mark.skipif(CUDA, reason="tests/distributed/test_sharded_cuda.py does this on a GPU")
def test_shards_over_two_processes_match_whole_tensors():
    run_processes(shards_over_two_processes, 2)


@here
@pytest.mark.parametrize("is_loaded", [False, True])
def test_the_kernels_are_chosen_for_a_model_that_is_moved_after_construction(
    is_loaded, monkeypatch
):
    """Accelerate moves the model when it prepares it, and loads states after that."""
    first, others = tensors(), tensors()
    reference = kernels(others, max_grad_norm=1.0)
    if is_loaded:
        run(reference, others, range(1, 2))
        for p, q in zip(first, others, strict=True):
            p.data.copy_(q)
    monkeypatch.setattr("normcontrol.adamwn.why_not", lambda tensors: "a parameter is on cpu")
    opt = AdamWN(everything(first), LR, BETAS, max_grad_norm=1.0)
    assert "since a parameter is on cpu" in opt.implementation
    monkeypatch.undo()
    if is_loaded:
        opt.load_state_dict(copy.deepcopy(reference.state_dict()))
    run(opt, first, range(2, 4))
    run(reference, others, range(2, 4))
    assert opt.implementation == "Triton kernels"
    assert all(torch.equal(p, q) for p, q in zip(first, others, strict=True))


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the tensors are on a CPU without kernels")
def test_torchs_implementation_is_chosen_for_a_model_that_is_moved_to_a_cpu(monkeypatch):
    params = tensors()
    monkeypatch.setattr("normcontrol.adamwn.why_not", lambda tensors: None)
    opt = AdamWN(everything(params), LR, BETAS, norm=1.0, rate=1.0)
    assert opt.implementation == "Triton kernels"
    monkeypatch.undo()
    run(opt, params, range(1, 2))
    assert "since a parameter is on cpu" in opt.implementation
    joint = torch.cat([p.detach().flatten() for p in params]).norm()
    assert torch.allclose(joint, torch.ones(()))
