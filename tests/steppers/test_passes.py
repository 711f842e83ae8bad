"""The passes in Triton kernels that control the weights of any optimizer: torch's operations are
the reference, and the weights follow Algorithm 1."""

import copy
import math

import pytest
import torch
from kernel_cases import CUDA, DEVICE, gradients, here, on_gpu, worst
from torch import nn

from normcontrol import NormControl, linear
from normcontrol.law import projection
from normcontrol.scope import parse_scope
from normcontrol.steppers.stepper import PlainStepper
from normcontrol.weights.passes import measure, multiply_

pytest.importorskip("triton")
pytestmark = [pytest.mark.cuda] if CUDA else []

SHAPES = [(3, 5), (70, 33), (1, 2100), (40, 64), (2, 3, 4, 5)]
LOW = [torch.bfloat16, torch.float16]


def weights(dtype=torch.float32, shapes=SHAPES, shift=0):
    """Parameters of these shapes. ``shift`` moves them away from the 16-byte boundary."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in shapes:
        memory = torch.randn(math.prod(shape) + shift, generator=generator).to(DEVICE, dtype)
        made.append(nn.Parameter(memory[shift:].view(shape)))
    return made


def around_sgd(params, stepper=None, **settings):
    optimizer = torch.optim.SGD([{"params": params, "controlled": True}], lr=0.1)
    settings = {"ratio": linear(1.0, 2.0, steps=5), "rate": 0.1, **settings}
    return NormControl(optimizer, stepper=stepper, **settings)


def train(opt, params, steps=range(1, 4 if CUDA else 3)):
    for t in steps:
        for p, g in zip(params, gradients(params, t), strict=True):
            p.grad = g
        opt.step()


class WithoutKernels(PlainStepper):
    """Measures and multiplies by torch's operations."""

    def prepare(self, sets, sharing):
        super().prepare(sets, sharing)
        self.on_gpu = frozenset()


def in_kernels(opt):
    """Return how many sets the kernels measured at the last step."""
    return sum(passes is not None for passes in opt.stepper.passes.values())


@here
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("scope", ["global", "tensor", "row", (0, 1)])
def test_both_passes_are_those_of_torchs_operations(scope, dtype, shift):
    from normcontrol.steppers.passes import SetPasses

    shapes = [s for s in SHAPES if len(s) > 2] if scope == (0, 1) else SHAPES
    ours, scope = [p.detach() for p in weights(dtype, shapes, shift)], parse_scope(scope)
    theirs, step = copy.deepcopy(ours), torch.tensor(5, device=DEVICE)
    passes = SetPasses.made(ours, scope)
    passes.begin(step, may_be_one_pass=False)
    norms = measure(theirs, scope)
    torch.testing.assert_close(passes.measure(), norms, rtol=1e-6, atol=0)
    scale = scope.join(norms) / scope.join(norms).max() * (1 - 3e-4)
    passes.multiply_(scale)
    multiply_(theirs, scope, scale, step)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@here
@pytest.mark.parametrize("law", ["proportional", "upper", projection])
@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("scope", ["global", "group", "tensor", "row"])
def test_steps_of_any_optimizer_are_those_with_torchs_operations(scope, order, law):
    ours, theirs = weights(), weights()
    settings = {"scope": scope, "order": order, "law": law}
    opt, reference = around_sgd(ours, **settings), around_sgd(theirs, WithoutKernels, **settings)
    train(reference, theirs)
    train(opt, ours)
    assert (in_kernels(opt), in_kernels(reference)) == (1, 0)
    assert worst(ours, theirs) < 1e-6
    for name, reading in opt.norms().items():
        for a, b in zip(reading, reference.norms()[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@here
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_rows_in_one_pass_are_rounded_as_in_two(dtype):
    one, two = weights(dtype), weights(dtype)
    for params, law in ((one, "proportional"), (two, projection)):
        train(around_sgd(params, scope="row", rate=1.0, law=law), params)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@here
@pytest.mark.parametrize("size", ["spectral-exact", torch.linalg.matrix_norm])
def test_another_size_than_the_norm_is_measured_by_torch_and_scaled_in_kernels(size):
    ours, theirs = weights(shapes=SHAPES[:4]), weights(shapes=SHAPES[:4])
    settings = {"size": size, "scope": "tensor", "ratio": None, "norm": 2.0}
    opt, reference = around_sgd(ours, **settings), around_sgd(theirs, WithoutKernels, **settings)
    train(opt, ours)
    train(reference, theirs)
    assert in_kernels(opt) == 1
    assert worst(ours, theirs) < 1e-6


@here
@pytest.mark.parametrize("scope", ["global", "row"])
def test_an_overflow_step_leaves_the_weights_alone(scope):
    params = weights()
    sgd = torch.optim.SGD([{"params": params, "controlled": True}], lr=0.1, fused=True)
    opt = NormControl(sgd, ratio=2.0, rate=0.1, scope=scope)
    train(opt, params)
    before = [p.detach().clone() for p in params]
    opt.found_inf = torch.ones(1, device=DEVICE)
    opt.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert in_kernels(opt) == 1
    norms = opt.sets[0].last_norms
    torch.testing.assert_close(norms, measure(before, opt.sets[0].scope), rtol=1e-6, atol=0)


@here
def test_a_reading_stays_as_it_is_at_the_next_step():
    params = weights()
    opt = around_sgd(params)
    train(opt, params, range(1, 3))
    before = opt.norms()["global"]
    numbers = [x.item() for x in before]
    train(opt, params, range(3, 4))
    assert [x.item() for x in before] == numbers
    assert opt.norms()["global"].scale.item() != numbers[-1]


@here
@pytest.mark.parametrize("scope", ["global", "row"])
def test_weights_that_were_moved_or_laid_out_in_another_way_are_still_those_that_are_scaled(scope):
    ours, theirs = weights(shapes=[(6, 6)]), weights(shapes=[(6, 6)])
    opt, reference = around_sgd(ours, scope=scope), around_sgd(theirs, WithoutKernels, scope=scope)
    for controller, (p,) in ((opt, ours), (reference, theirs)):
        train(controller, [p], range(1, 3))
        p.data = p.data * 1.1
        train(controller, [p], range(3, 4))
        p.data = p.data.t()  # the same memory, and other rows
        train(controller, [p], range(4, 5))
    assert ((ours[0] - theirs[0]).norm() / theirs[0].norm()).item() < 1e-6


@here
def test_a_shard_that_was_replaced_is_the_one_that_is_scaled(tmp_path):
    """FSDP gives its parameters other local tensors, for example when a model is moved."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    backend = "nccl" if CUDA else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        whole = torch.linspace(1, 2, 24, device=DEVICE).view(4, 6)
        p = nn.Parameter(distribute_tensor(whole, init_device_mesh(DEVICE, (1,)), [Shard(0)]))
        opt = around_sgd([p], ratio=1.0, rate=1.0)
        p.grad = torch.zeros_like(p)
        opt.step()
        assert in_kernels(opt) == 1
        old = p._local_tensor
        p._local_tensor = 3 * old
        kept = old.clone()
        opt.step()
        assert torch.equal(old, kept)
        assert p._local_tensor.norm().item() == pytest.approx(whole.norm().item(), rel=1e-6)
    finally:
        dist.destroy_process_group()


@here
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_or_zero_do_not_spread(bad):
    params = weights(shapes=[(4, 4), (4, 4), (4, 4)])
    opt = around_sgd(params, scope="tensor", norm=1.0, ratio=None, rate=1.0)
    params[0].data[1, 1] = bad
    params[1].data.zero_()
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step()
    assert in_kernels(opt) == 1
    assert not math.isfinite(params[0].detach().norm().item())
    assert params[1].detach().norm().item() == 0
    assert params[2].detach().norm().item() == pytest.approx(1.0)
    assert [r.scale.item() for r in opt.norms().values()][:2] == [1.0, 1.0]


@here
def test_tensors_that_the_kernels_cannot_handle_are_scaled_all_the_same():
    wide = torch.randn(6, 8, dtype=torch.float64, device=DEVICE)
    params = [nn.Parameter(wide), nn.Parameter(torch.randn(8, 6, device=DEVICE).t())]
    for scope in ("global", "col"):
        first = [p.detach().double().norm().item() for p in params]
        opt = around_sgd(params, scope=scope, ratio=0.5, rate=1.0)
        opt.step()
        assert in_kernels(opt) == 0
        now = [p.detach().double().norm().item() for p in params]
        assert now == pytest.approx([0.5 * norm for norm in first], rel=1e-6)


@on_gpu
@pytest.mark.parametrize("scope", ["global", "tensor", "row"])
def test_no_pass_waits_for_the_device(scope):
    params = weights()
    opt = around_sgd(params, scope=scope, rate=linear(0.1, 0.2, steps=50))
    train(opt, params)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            opt.step()
            opt.norms()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert in_kernels(opt) == 1
