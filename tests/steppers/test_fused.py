"""The Triton kernels do what Algorithm 1 says: on a GPU, and on a CPU through Triton's interpreter.

The interpreter must be asked for before Triton is imported, so without a GPU this file runs itself
in a process of its own.
"""

import copy
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from reference import algorithm_1
from torch import nn

import normcontrol
from normcontrol import AdamWN, linear

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"
STEPS = 100 if CUDA else 6
RAGGED = [1, 2, 3, 31, 127, 128, 511, 512, 513, 1000, 2047, 2048, 2049, 4095, 4097, 5000]
SOME = [3, 513, 2100]
LR, BETAS = 3e-3, (0.9, 0.95)

pytestmark = [pytest.mark.cuda] if CUDA else []
here = pytest.mark.skipif(
    not CUDA and not INTERPRETED, reason="runs in a process of its own, under Triton's interpreter"
)
on_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU: make gpu-test")


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the tests below run here")
def test_the_kernels_under_the_interpreter():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        __file__,
    ]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def tensors(sizes=SOME, dtype=torch.float32, shift=0) -> list[nn.Parameter]:
    """One parameter of each size; ``shift`` moves them off the 16-byte boundary that allocations
    start at."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for n in sizes:
        memory = torch.zeros(n + shift, dtype=dtype, device=DEVICE)
        memory[shift:] = 0.1 * torch.randn(n, generator=generator, dtype=torch.float64).to(
            DEVICE, dtype
        )
        made.append(nn.Parameter(memory[shift:]))
    return made


def gradients(params: list[nn.Parameter], t: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(t)
    return [
        torch.randn(p.shape, generator=generator, dtype=torch.float64).to(DEVICE, p.dtype)
        for p in params
    ]


def run(opt: AdamWN, params: list[nn.Parameter], steps=range(1, STEPS + 1)) -> None:
    for t in steps:
        for p, g in zip(params, gradients(params, t), strict=True):
            p.grad = g
        opt.step()


def everything(params: list[nn.Parameter]) -> list[dict]:
    return [{"params": params, "controlled": True}]


def kernels(params: list[nn.Parameter], groups=None, **settings) -> AdamWN:
    opt = AdamWN(groups or everything(params), LR, BETAS, fused=True, **settings)
    assert opt.implementation == "Triton kernels"
    return opt


def worst(a, b) -> float:
    """The largest relative difference of two lists of tensors."""
    return max(
        ((x.detach().double() - y.detach().double()).norm() / y.detach().double().norm()).item()
        for x, y in zip(a, b, strict=True)
    )


@here
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_ragged_tensors_follow_algorithm_1(scope, order, shift):
    params = tensors(RAGGED, shift=shift)
    theta = {str(i): p.detach().double().cpu().numpy().copy() for i, p in enumerate(params)}
    sharing = [list(theta.values())] if scope == "global" else [[w] for w in theta.values()]
    algorithm_1(
        theta,
        lambda _, t: {str(i): g.double().cpu().numpy() for i, g in enumerate(gradients(params, t))},
        STEPS,
        line="13.c", sharing=sharing, alpha=LR, beta1=BETAS[0], beta2=BETAS[1], order=order,
        r=lambda t: 1 + min(t / 5, 1), k=lambda t: 0.05,
    )  # fmt: skip
    opt = kernels(params, scope=scope, order=order, ratio=linear(1.0, 2.0, steps=5), rate=0.05)
    run(opt, params)
    assert opt.implementation == "Triton kernels"
    assert worst(params, [torch.from_numpy(w).to(DEVICE) for w in theta.values()]) < 1e-6
    if order == "after":
        true = math.sqrt(sum(np.sum(w**2) for w in theta.values()))
        got = (
            opt.norms()["global"].norm.item()
            if scope == "global"
            else math.sqrt(sum(r.norm.item() ** 2 for r in opt.norms().values()))
        )
        assert got == pytest.approx(true, rel=1e-6)


@here
@pytest.mark.parametrize("scope", ["group", "row", "col", (0,)])
def test_every_other_scope_matches_the_plain_path(scope):
    ours = [
        nn.Parameter(p.detach().reshape(-1, 8)) for p in tensors([8 * n for n in (1, 5, 64, 130)])
    ]
    theirs = copy.deepcopy(ours)
    settings = {"scope": scope, "ratio": 1.5, "rate": 0.1}
    run(kernels(ours, **settings), ours)
    run(AdamWN(everything(theirs), LR, BETAS, fused=False, **settings), theirs)
    assert worst(ours, theirs) < 1e-6


@here
@pytest.mark.parametrize(
    "options",
    [{"amsgrad": True}, {"maximize": True}, {"eps": 1e-3}, {"lr": torch.tensor(1e-3)}],
    ids=str,
)
def test_the_options_of_adam(options):
    ours = tensors()
    theirs = copy.deepcopy(ours)
    settings = {"lr": LR, "betas": BETAS, "ratio": 1.2, "rate": 0.1, **options}
    opt = AdamWN(everything(ours), fused=True, **settings)
    run(opt, ours)
    run(AdamWN(everything(theirs), fused=False, **settings), theirs)
    assert opt.implementation == "Triton kernels"
    assert worst(ours, theirs) < 1e-6


@here
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_right_on_average(dtype):
    """Weights of one value, multiplied by a factor whose change is a fraction of their last
    place."""
    params = [nn.Parameter(torch.full((8_000,), 1.5, dtype=dtype, device=DEVICE))]
    opt = kernels(params, ratio=0.0, rate=2e-4)
    opt.param_groups[0]["lr"] = 0.0
    run(opt, params, range(1, 5))
    mean, spread = params[0].double().mean().item(), params[0].double().std().item()
    assert torch.finfo(dtype).eps > 4e-4  # or plain multiplication would have done
    assert mean == pytest.approx(1.5 * (1 - 2e-4) ** 4, abs=5 * spread / 89)
    assert spread > 0


@here
@pytest.mark.parametrize("order", ["after", "before"])
def test_adams_own_update_of_bf16_is_right_on_average(order):
    """A hundredth of the last place a step: rounded to nearest, the weights would never move."""
    params = [nn.Parameter(torch.ones(8_000, dtype=torch.bfloat16, device=DEVICE))]
    opt = kernels(params, ratio=1.0, rate=0.0, order=order)
    opt.param_groups[0]["lr"] = 1e-4
    for _ in range(5):
        params[0].grad = torch.ones_like(params[0])
        opt.step()
    spread = params[0].double().std().item()
    assert params[0].double().mean().item() == pytest.approx(1 - 5e-4, abs=5 * spread / 89)


@here
@pytest.mark.parametrize("order", ["after", "before"])
def test_an_overflow_step_changes_nothing(order):
    params = tensors([100, 3000])
    opt = kernels(params, order=order, ratio=1.5, rate=0.5)
    run(opt, params, range(1, 3))
    before = [p.detach().clone() for p in params], copy.deepcopy(opt.state_dict())
    opt.grad_scale, opt.found_inf = torch.ones(1, device=DEVICE), torch.ones(1, device=DEVICE)
    for p in params:
        p.grad = torch.full_like(p, math.inf)
    opt.step()
    del opt.grad_scale, opt.found_inf
    assert all(torch.equal(p, q) for p, q in zip(params, before[0], strict=True))
    for i, state in opt.state_dict()["state"].items():
        assert all(torch.equal(value, before[1]["state"][i][key]) for key, value in state.items())
    assert opt.param_groups[0]["control"]["step"].item() == 2
    run(opt, params, range(3, 5))
    assert all(torch.isfinite(p).all() for p in params)


@here
def test_gradscaler_scales_are_undone():
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
def test_max_grad_norm_is_clip_grad_norm(limit, fused):
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
def test_weights_that_others_change_are_measured_again():
    """Order "before" knows the norm from the last step's sums, unless someone wrote to the weights
    since."""
    ours, theirs = tensors(), tensors()
    fast = kernels(ours, order="before", rate=0.5)
    plain = AdamWN(everything(theirs), LR, BETAS, fused=False, order="before", rate=0.5)
    for opt, params in ((fast, ours), (plain, theirs)):
        run(opt, params, range(1, 3))
        with torch.no_grad():
            params[1].mul_(7.0)
        run(opt, params, range(3, 5))
        kept = copy.deepcopy([p.detach() for p in params])
        with torch.no_grad():
            for p, q in zip(params, kept, strict=True):
                p.copy_(1.1 * q)
        run(opt, params, range(5, 7))
    assert worst(ours, theirs) < 1e-6


@here
def test_after_corrects_only_what_its_guess_misses():
    """Smooth norms: the guess is right to within a rounding error, and the second pass is not
    needed. A jump of the target: it is."""
    params = tensors()
    opt = kernels(params, ratio=1.0, rate=0.01)
    opt.param_groups[0]["lr"] = 1e-6
    needed = []
    for t in range(1, 9):
        if t == 7:
            opt.param_groups[0]["ratio"] = 1.5
        for p, g in zip(params, gradients(params, 1), strict=True):
            p.grad = g
        before = [p.detach().double() for p in params]
        opt.step()
        needed.append(opt.stepper.plan.needed.item())
        if t == 7:
            moved = [
                p.detach().double().norm() / q.norm() for p, q in zip(params, before, strict=True)
            ]
            assert all(m.item() == pytest.approx(1.005, abs=2e-4) for m in moved)
    assert needed[3:] == [0, 0, 0, 1, 1]


@here
def test_before_makes_no_pass_of_its_own(monkeypatch):
    params = tensors([100, 3000])
    opt = kernels(params, order="before")
    run(opt, params, range(1, 3))
    monkeypatch.setattr(
        "normcontrol.steppers.fused.Plan.measure",
        lambda *_: pytest.fail("the weights were measured again"),
    )
    monkeypatch.setattr(
        "normcontrol.weights.passes.measure",
        lambda *_: pytest.fail("the weights were measured again"),
    )
    run(opt, params, range(3, 5))


@here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ["after", "before"])
def test_resuming_gives_the_same_bits(order, dtype, tmp_path):
    whole, halves = tensors(dtype=dtype), tensors(dtype=dtype)
    settings = {"order": order, "ratio": linear(1.0, 2.0, steps=6), "rate": 0.1}
    run(kernels(whole, **settings), whole, range(1, 7))
    first = kernels(halves, **settings)
    run(first, halves, range(1, 4))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    halves = [nn.Parameter(p.detach().clone()) for p in halves]
    second = kernels(halves, **settings)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    run(second, halves, range(4, 7))
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))


@here
def test_states_go_both_ways_between_the_kernels_and_torch():
    start = tensors()
    ends = []
    for first, second in ((True, False), (False, True)):
        params = copy.deepcopy(start)
        a = AdamWN(everything(params), LR, BETAS, fused=first)
        run(a, params, range(1, 4))
        b = AdamWN(everything(params), LR, BETAS, fused=second)
        b.load_state_dict(a.state_dict())
        run(b, params, range(4, 7))
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
def test_what_the_kernels_cannot_do_goes_to_torch_and_is_said():
    double = AdamWN(
        [nn.Parameter(torch.ones(4, 4, dtype=torch.float64, device=DEVICE))], fused=True
    )
    assert "torch's fused implementation, since a parameter is torch.float64" in double.report()
    asked = AdamWN([nn.Parameter(torch.ones(4, 4, device=DEVICE))], fused=False)
    assert "fused=False" in asked.report()
    if CUDA:
        return  # where torch's fused implementation refuses the layout below as well
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
@pytest.mark.parametrize("order", ["after", "before"])
def test_norms_tell_what_torchs_own_implementation_tells(order):
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
def test_the_pieces_of_dtensors_go_through_the_kernels(order, tmp_path):
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


@on_gpu
def test_a_step_never_waits_for_the_device():
    params = tensors()
    opt = kernels(
        params, ratio=linear(1.0, 2.0, steps=50), rate=linear(0.1, 0.2, steps=50), max_grad_norm=1.0
    )
    run(opt, params, range(1, 4))
    fresh = [gradients(params, t) for t in range(4, 8)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for grads in fresh:
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
@pytest.mark.parametrize("order", ["after", "before"])
def test_a_replayed_graph_follows_the_schedules(order):
    torch.manual_seed(0)
    model = nn.Linear(64, 64, device=DEVICE)
    twin = copy.deepcopy(model)
    data = torch.randn(8, 64, device=DEVICE)
    settings = {
        "lr": 1e-3,
        "order": order,
        "ratio": linear(1.0, 2.0, steps=20),
        "rate": linear(0.1, 0.5, steps=20),
        "capturable": True,
    }
    opt, eager = AdamWN(model.parameters(), **settings), AdamWN(twin.parameters(), **settings)

    def step(model, opt):
        opt.zero_grad(set_to_none=True)
        (model(data) - 1).square().mean().backward()
        opt.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(model, opt)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model, opt)
    for _ in range(10):
        graph.replay()
    for _ in range(13):
        step(twin, eager)
    assert opt.implementation == "Triton kernels"
    assert opt.param_groups[0]["control"]["step"].item() == 13
    assert worst(model.parameters(), twin.parameters()) < 1e-5


@on_gpu
def test_little_memory_beyond_the_moments():
    params = [nn.Parameter(torch.randn(4096, 4096, device=DEVICE)) for _ in range(8)]
    for p in params:
        p.grad = torch.ones_like(p)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    opt = AdamWN(params)
    for _ in range(3):
        opt.step()
    moments = sum(2 * p.nbytes for p in params)
    assert torch.cuda.memory_allocated() - before - moments < 1 << 20


@here
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 1000, 1024, 5000])
def test_multiplying_in_one_launch_rounds_as_the_plain_operations_do(n, dtype):
    from normcontrol.steppers import kernels
    from normcontrol.weights.rounding import DROPPED_BITS, multiply_rounding_, seeds_of

    weight = tensors([n], dtype)[0].data
    factor, seed = (
        torch.tensor(1 - 3e-4, device=DEVICE),
        seeds_of(torch.tensor(5, device=DEVICE), 3)[2],
    )
    plain = weight.cpu()
    multiply_rounding_(plain, factor.cpu(), seed.cpu())
    kernels.multiply_rounding[(-(-n // 1024),)](
        weight, factor, seed, n, DROPPED=DROPPED_BITS[dtype], BLOCK=1024
    )
    assert torch.equal(weight.cpu(), plain)


@on_gpu
@pytest.mark.parametrize("scope", ["global", "tensor", "row"])
def test_a_wrapped_optimizer_rounds_on_the_gpu_as_it_does_on_the_cpu(scope):
    weights = []
    for device in ("cpu", "cuda"):
        p = nn.Parameter(torch.linspace(-1, 1, 6000).view(60, 100).to(device, torch.bfloat16))
        version = p._version
        opt = normcontrol.NormControl(
            torch.optim.SGD([p], lr=0.0), ratio=0.5, rate=3e-4, scope=scope
        )
        p.grad = torch.ones_like(p)
        opt.step()
        assert p._version > version
        weights.append(p.detach().cpu())
    torch.testing.assert_close(
        *weights, rtol=0, atol=2**-9
    )  # their norms, and so their factors, may differ in the last bit
    assert (weights[0] == weights[1]).float().mean() > 0.99
