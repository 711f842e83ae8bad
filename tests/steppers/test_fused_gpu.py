"""The fused stepper on a GPU: it does not wait for the device, works in CUDA graphs, needs little
memory, and rounds in one launch."""

import copy

import pytest
import torch
from kernel_cases import (
    CUDA,
    DEVICE,
    gradients,
    here,
    kernels,
    on_gpu,
    run,
    tensors,
    worst,
)
from torch import nn

import normcontrol
from normcontrol import AdamWN, linear

pytest.importorskip("triton")
pytestmark = [pytest.mark.cuda] if CUDA else []


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
def test_a_step_needs_little_memory_beyond_the_moments():
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
@pytest.mark.parametrize(("n", "size"), [(1, 1), (1000, 1), (1024, 1), (5000, 1), (5000, 2**-12)])
def test_multiplying_in_one_launch_rounds_to_the_same_bits_as_tensor_operations(n, size, dtype):
    from normcontrol.weights.rounding import DROPPED_BITS, multiply_rounding_, seeds_of
    from normcontrol.weights.rounding_kernels import multiply_rounding

    weight = tensors([n], dtype)[0].data * size  # the small ones are below fp16's normal numbers
    factor, seed = (
        torch.tensor(1 - 3e-4, device=DEVICE),
        seeds_of(torch.tensor(5, device=DEVICE), 3)[2],
    )
    expected = weight.cpu()
    multiply_rounding_(expected, factor.cpu(), seed.cpu())
    multiply_rounding[(-(-n // 1024),)](
        weight, factor, seed, n, DROPPED=DROPPED_BITS[dtype], BLOCK=1024
    )
    assert torch.equal(weight.cpu(), expected)


@here
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_nan_with_all_bits_set_stays_one(dtype):
    from normcontrol.weights.rounding import DROPPED_BITS
    from normcontrol.weights.rounding_kernels import multiply_rounding

    weight, seed = torch.ones(1000, dtype=dtype, device=DEVICE), torch.tensor(7, device=DEVICE)
    factor = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device=DEVICE).view(torch.float32)
    multiply_rounding[(1,)](weight, factor, seed, 1000, DROPPED=DROPPED_BITS[dtype], BLOCK=1024)
    assert weight.isnan().all()


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
    # The norms, and therefore the factors, may differ in the last bit.
    torch.testing.assert_close(*weights, rtol=0, atol=2**-9)
    assert (weights[0] == weights[1]).float().mean() > 0.99
