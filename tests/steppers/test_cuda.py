"""Norm control with torch's own implementations on CUDA. The Triton kernels have separate tests.

No step may wait for the device, a captured step must follow its schedules, and the arithmetic is
that of torch's AdamW.
"""

import copy
import math

import pytest
import torch
from small import SmallModel, matrices, scaled_step, total_norm, with_eta

from normcontrol import AdamWN, NormControl, cosine, eta_times, linear, lr_times, trace

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make gpu-test"),
]

LR, DECAY = 3e-3, 0.1
FOR_LOOP, FOREACH = {"foreach": False, "fused": False}, {"foreach": True}


def model_on_gpu(dtype=torch.float32, seed=0):
    return SmallModel(dtype, seed).cuda()


def gradients(model, t):
    """Gradients that are a pure function of the step, computed on the host."""
    generator = torch.Generator().manual_seed(t)
    return [
        torch.randn(p.shape, generator=generator).to("cuda", p.dtype) for p in model.parameters()
    ]


def train(model, opt, steps, scheduler=None):
    for t in steps:
        for p, g in zip(model.parameters(), gradients(model, t), strict=True):
            p.grad = g
        opt.step()
        if scheduler is not None:
            scheduler.step()


def assert_same_bits(ours, theirs):
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), f"{name} differs by {(a - b).abs().max().item():g}"


# AdamW is a special case


@pytest.mark.parametrize("implementation", [FOR_LOOP, FOREACH], ids=["for-loop", "foreach"])
@pytest.mark.parametrize(
    "flags", [{}, {"amsgrad": True}, {"maximize": True}, {"capturable": True}], ids=str
)
def test_adamw_is_adamwn_at_ratio_0_bit_for_bit(implementation, flags):
    theirs, ours = model_on_gpu(), model_on_gpu()
    adamw = torch.optim.AdamW(
        theirs.parameters(), lr=LR, weight_decay=DECAY, **implementation, **flags
    )
    groups = [{"params": list(ours.parameters()), "controlled": True}]
    adamwn = AdamWN(
        groups, lr=LR, ratio=0.0, rate=lr_times(DECAY), order="before", **implementation, **flags
    )
    for model, opt in ((theirs, adamw), (ours, adamwn)):
        train(model, opt, range(100), with_eta(opt))
    assert_same_bits(ours, theirs)


def test_fused_adamw_is_adamwn_at_ratio_0_within_the_rounding_of_its_decay():
    """CUDA's fused kernel decays by a subtraction, p - lr * wd * p, and control multiplies: 100
    steps may differ by 100 roundings of 2^-24."""
    theirs, ours = model_on_gpu(), model_on_gpu()
    adamw = torch.optim.AdamW(theirs.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    groups = [{"params": list(ours.parameters()), "controlled": True}]
    adam = torch.optim.Adam(groups, lr=LR, fused=True)
    controlled = NormControl(adam, ratio=0.0, rate=lr_times(DECAY), order="before")
    for model, opt in ((theirs, adamw), (ours, controlled)):
        train(model, opt, range(100), with_eta(opt))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert ((a - b).norm() / b.norm()).item() < 100 * 2**-24


# The norm law


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("scope", ["global", "tensor", "row", "col"])
def test_one_step_follows_the_norm_law(dtype, scope):
    model = model_on_gpu(dtype)
    first = total_norm(matrices(model))
    opt = NormControl(torch.optim.SGD(model.parameters(), lr=0.1), ratio=1.5, rate=0.5, scope=scope)
    opt.step()
    precision = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 2e-3)
    assert total_norm(matrices(model)) == pytest.approx(1.25 * first, rel=precision)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_weights_reach_a_target_20_percent_away(dtype):
    w = torch.nn.Parameter(
        (0.02 * torch.randn(256, 256, generator=torch.Generator().manual_seed(0))).to("cuda", dtype)
    )
    first = total_norm([w])
    opt = NormControl(torch.optim.SGD([w], lr=0.1), ratio=1.2, rate=1e-2)
    for _ in range(800):
        opt.step()
    assert total_norm([w]) == pytest.approx(1.2 * first, rel=1e-3)


def test_low_precision_rounds_as_on_the_cpu():
    """The random bits are a hash of step and position: they do not depend on the device."""
    ends = []
    for device in ("cpu", "cuda"):
        w = torch.nn.Parameter(
            torch.linspace(-1, 1, 6000).reshape(60, 100).to(device, torch.bfloat16)
        )
        opt = NormControl(torch.optim.SGD([w], lr=0.1), norm=10.0, rate=2.0**-7)
        for _ in range(3):
            opt.step()
        ends.append(w.detach().cpu())
    assert (ends[0] != ends[1]).double().mean() < 1e-3  # the last bit of the norm may differ


def test_a_large_norm_is_right_to_six_digits():
    w = torch.nn.Parameter(0.02 * torch.randn(3000, 10_000, device="cuda"))
    exact = math.sqrt(sum(rows.double().square().sum().item() for rows in w.detach().split(100)))
    opt = NormControl(torch.optim.SGD([w], lr=0.1), ratio=1.0)
    assert opt.norms()["global"].norm.item() == pytest.approx(exact, rel=1e-6)


# No step waits for the device


MAKERS = {
    "for-loop": lambda params, **s: AdamWN(params, lr=LR, **FOR_LOOP, **s),
    "foreach": lambda params, **s: AdamWN(params, lr=LR, **FOREACH, **s),
    "default": lambda params, **s: AdamWN(params, lr=LR, **s),
    "around Adam": lambda params, **s: NormControl(
        torch.optim.Adam(params, lr=LR, fused=True), **s
    ),
    "around SGD": lambda params, **s: NormControl(
        torch.optim.SGD(params, lr=LR, momentum=0.9), **s
    ),
}
SETTINGS = {
    "numbers": {"ratio": 1.5, "rate": 0.1},
    "ramps": {"ratio": linear(1.0, 2.0, steps=5), "rate": cosine(0.1, 0.2, steps=5)},
    "traces": {
        "ratio": trace([1.0 + 0.1 * i for i in range(40)]),
        "rate": trace([0.1, 0.2], steps=[0, 40]),
    },
    "functions": {"ratio": lambda step: 1.0 + 0.01 * step, "rate": lambda step: 0.1},
    "tied": {"ratio": 0.0, "rate": lr_times(0.1)},
    "tied to eta": {"ratio": 0.0, "rate": eta_times(0.1)},
    "before": {"ratio": linear(1.0, 2.0, steps=5), "order": "before"},
    "rows": {"ratio": linear(1.0, 2.0, steps=5), "scope": "row"},
    "tensors at an rms": {"rms": linear(0.1, 0.2, steps=5), "scope": "tensor", "law": "upper"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_no_step_waits_for_the_device(make, settings, dtype):
    model = model_on_gpu(dtype)
    opt = make(list(model.parameters()), **settings)
    train(model, opt, range(3))
    grads = [gradients(model, t) for t in range(3)]
    try:
        torch.cuda.set_sync_debug_mode("error")
        for g in grads:
            for p, x in zip(model.parameters(), g, strict=True):
                p.grad = x
            opt.step()
            opt.norms()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# CUDA graphs


def captured(opt, model, warm_up=3):
    """torch's recipe: warm up on a side stream, then capture one step with static gradients."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for t in range(warm_up):
            _fill(model, t)
            opt.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()
    return graph


def _fill(model, t):
    for p, g in zip(model.parameters(), gradients(model, t), strict=True):
        p.grad.copy_(g)


@pytest.mark.parametrize("name", ["ramps", "traces", "before", "rows"])
@pytest.mark.parametrize("kind", ["AdamWN", "foreach", "NormControl"])
def test_a_captured_step_follows_its_schedules(kind, name):
    make = {
        "AdamWN": lambda params: AdamWN(params, lr=LR, capturable=True, **SETTINGS[name]),
        "foreach": lambda params: AdamWN(
            params, lr=LR, capturable=True, foreach=True, **SETTINGS[name]
        ),
        "NormControl": lambda params: NormControl(
            torch.optim.Adam(params, lr=LR, capturable=True), **SETTINGS[name]
        ),
    }[kind]
    model, eager = model_on_gpu(), model_on_gpu()
    opt, eager_opt = make(list(model.parameters())), make(list(eager.parameters()))
    graph = captured(opt, model)
    for t in range(3, 13):
        _fill(model, t)
        graph.replay()
    train(eager, eager_opt, range(13))
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert ((a - b).norm() / b.norm()).item() < 1e-5
    assert int(opt.param_groups[0]["control"]["step"]) == 13
    for a, b in zip(opt.norms().values(), eager_opt.norms().values(), strict=True):
        assert torch.allclose(a.target, b.target, rtol=1e-6)


# GradScaler


@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("scope", ["global", "row"])
@pytest.mark.parametrize("kind", ["AdamWN", "foreach", "NormControl"])
def test_an_overflow_step_leaves_weights_and_schedules_alone(kind, scope, order):
    settings = {
        "ratio": linear(1.0, 2.0, steps=8),
        "rate": cosine(0.5, 0.1, steps=8),
        "scope": scope,
        "order": order,
    }
    make = {
        "AdamWN": lambda params: AdamWN(params, lr=LR, fused=True, **settings),
        "foreach": lambda params: AdamWN(params, lr=LR, foreach=True, **settings),
        "NormControl": lambda params: NormControl(
            torch.optim.Adam(params, lr=LR, fused=True), **settings
        ),
    }[kind]
    model = model_on_gpu()
    opt = make(list(model.parameters()))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for t in range(6):
        if t in (0, 3, 4):
            before = copy.deepcopy(model)
            count = int(opt.param_groups[0]["control"]["step"])
            scaled_step(model, opt, scaler, 99, overflow=True)
            assert_same_bits(model, before)
            assert int(opt.param_groups[0]["control"]["step"]) == count
        scaled_step(model, opt, scaler, t)
    assert int(opt.param_groups[0]["control"]["step"]) == 6
    assert opt.norms()
