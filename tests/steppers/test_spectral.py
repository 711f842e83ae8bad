"""The rounds of power iteration in Triton kernels: torch's operations are the reference."""

import copy
import math
from functools import partial

import pytest
import torch
from kernel_cases import CUDA, DEVICE, gradients, here, on_gpu, worst
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from normcontrol import AdamWN, NormControl, linear
from normcontrol.mechanisms.power_iteration import PowerIteration
from normcontrol.scope import parse_scope
from normcontrol.steppers.stepper import PlainStepper
from normcontrol.steppers.tables import Launch

pytest.importorskip("triton")
pytestmark = [pytest.mark.cuda] if CUDA else []

TENSOR = parse_scope("tensor")
SHAPES = [(3, 5), (20, 264), (140, 24), (1, 70), (4, 3, 2, 5)]
"""Wide and tall, no multiples of the blocks, more than one block, and a convolution."""
FEW = [(3, 5), (20, 24)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrices(dtype=torch.float32, shapes=SHAPES, shift=0):
    """Matrices of these shapes. ``shift`` moves them away from the 16-byte boundary."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in shapes:
        memory = torch.randn(math.prod(shape) + shift, generator=generator).to(DEVICE, dtype)
        made.append(memory[shift:].view(shape))
    return made


def in_kernels(params):
    """The two ways to make rounds for the same matrices: in kernels, and by torch's operations."""
    from normcontrol.steppers.spectral import SpectralPasses, passes_over

    ours, theirs = PowerIteration(params), PowerIteration(params)
    passes = passes_over(params, TENSOR, ours)
    assert type(passes) is SpectralPasses
    return passes, ours, theirs


def assert_same_rounds(params, rounds=2, error=2e-6):
    """Change the matrices as steps do, and compare what both ways find, from the same vectors."""
    passes, ours, theirs = in_kernels(params)
    for t in range(rounds):
        for p, g in zip(params, gradients(params, t), strict=True):
            p.add_(g, alpha=0.1)
        expected = theirs(params)
        torch.testing.assert_close(passes.measure(), expected, rtol=error, atol=0)
        torch.testing.assert_close(ours.vectors, theirs.vectors, rtol=0, atol=error)
        assert bool(expected.isfinite().all())


@here
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_round_is_that_of_torchs_operations(dtype):
    assert_same_rounds(matrices(dtype))


@here
def test_matrices_of_several_dtypes_and_alignments_are_one_set():
    """Some of them begin beside the 16-byte boundary at which allocations start."""
    mixed = [m for i, dtype in enumerate(DTYPES) for m in matrices(dtype, FEW, shift=i)]
    assert_same_rounds(mixed[::-1])


@here
def test_long_sums_are_complete(monkeypatch):
    """With small blocks, every loop of the kernels has several rounds and an end that is cut."""
    from normcontrol.steppers import spectral

    for name, small in (("TALL", 16), ("TILES", 2), ("COLUMNS", 8), ("AT_ONCE", 2), ("BLOCK", 16)):
        monkeypatch.setattr(spectral, name, small)
    assert_same_rounds(matrices(shapes=[(90, 19), (17, 40)]), rounds=1)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_round_of_large_matrices_is_that_of_torchs_operations(dtype):
    shapes = [(50_257, 768), (768, 3072), (3072, 768), (5, 70_001), (140_000, 24)]
    assert_same_rounds(matrices(dtype, shapes), error=1e-5)  # torch sums long columns in float32


@here
def test_the_same_round_gives_the_same_bits():
    found = []
    for _ in range(2):
        params = matrices(shapes=FEW)
        passes, ours, _ = in_kernels(params)
        found.append((passes.measure().clone(), ours.vectors.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Operations(TorchDispatchMode):
    """Counts torch's operations, without those that only make views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


@here
def test_a_round_is_four_launches_for_any_number_of_matrices(monkeypatch):
    launched: list[str] = []
    monkeypatch.setattr(Launch, "__call__", lambda s: launched.append(s.kernel.fn.__name__))
    for count in (1, 5):
        passes, _, theirs = in_kernels(matrices(shapes=[(4, 8)] * count))
        del launched[:]
        with Operations() as ours:
            passes.measure()
        assert launched == ["left_products", "right_partials", "add_partials", "finish_round"]
        assert ours.count == 0
        with Operations() as torchs:
            theirs(passes.tensors)
        assert torchs.count > 2 * count


@here
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_matrix_of_zeros_or_not_finite_is_left_alone_and_its_vector_is_sound_again(bad):
    params = matrices(shapes=[(6, 5), (7, 9)])
    passes, ours, theirs = in_kernels(params)
    good = params[0].clone()
    params[0].fill_(bad)
    values = passes.measure().tolist()
    expected = theirs(params).tolist()
    assert math.isnan(values[0])
    assert math.isnan(expected[0])
    assert values[1] == pytest.approx(expected[1], rel=1e-6)
    assert torch.equal(ours.vectors[:5], ours.others[:5])
    torch.testing.assert_close(ours.vectors, theirs.vectors, rtol=0, atol=1e-6)
    params[0].copy_(good)
    for _ in range(3):
        found, expected = passes.measure(), theirs(params)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


class WithoutKernels(PlainStepper):
    """Measures and multiplies by torch's operations."""

    def prepare(self, sets, sharing):
        super().prepare(sets, sharing)
        self.on_gpu = frozenset()


def made(dtype=torch.float32, stepper=None, shapes=FEW, around=torch.optim.SGD, **settings):
    params = [nn.Parameter(p) for p in matrices(dtype, shapes)]
    optimizer = around(params, lr=0.01)
    settings = {"size": "spectral", "scope": "tensor", "rate": 0.3, **settings}
    return params, NormControl(
        optimizer, stepper=stepper, ratio=linear(1.0, 2.0, steps=5), **settings
    )


def train(params, opt, steps):
    for t in steps:
        for p, g in zip(params, gradients(params, t), strict=True):
            p.grad = g
        opt.step()


def follows_in_kernels(opt):
    return [passes is not None and passes.measures_size for passes in opt.stepper.passes.values()]


@here
@pytest.mark.parametrize("law", ["proportional", "upper"])
def test_steps_are_those_with_torchs_operations(law):
    (ours, opt), (theirs, reference) = made(law=law), made(stepper=WithoutKernels, law=law)
    train(ours, opt, range(3))
    train(theirs, reference, range(3))
    assert follows_in_kernels(opt) == [True]
    assert follows_in_kernels(reference) == []
    assert worst(ours, theirs) < 1e-6
    for name, reading in opt.norms().items():
        for a, b in zip(reading, reference.norms()[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@here
def test_adamwn_follows_singular_values_in_kernels_too():
    params = [nn.Parameter(p) for p in matrices(shapes=FEW)]
    group = {"params": params, "size": "spectral", "scope": "tensor", "rate": 1.0}
    opt = AdamWN([group], lr=1e-3, fused=True)
    assert opt.implementation == "Triton kernels"
    train(params, opt, range(2))
    assert follows_in_kernels(opt) == [True]
    for p, reading in zip(params, opt.norms().values(), strict=True):
        exact = torch.linalg.matrix_norm(p.detach().double(), 2).item()
        assert reading.target.item() == pytest.approx(exact, rel=1e-3)


@here
def test_matrices_whose_rows_are_not_in_order_are_measured_by_torch_and_scaled_in_kernels():
    ends = []
    for stepper in (None, WithoutKernels):
        params, opt = made(stepper=stepper, shapes=SHAPES[-1:])
        params[0].data = params[0].data.contiguous(memory_format=torch.channels_last)
        train(params, opt, range(2))
        ends.append(params[0].detach())
        assert follows_in_kernels(opt) == ([False] if stepper is None else [])
    assert ((ends[0] - ends[1]).norm() / ends[1].norm()).item() < 1e-6


@here
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_resumed_run_ends_in_the_same_bits(dtype):
    whole, once = made(dtype)
    train(whole, once, range(4))
    params, opt = made(dtype)
    train(params, opt, range(2))
    weights, saved = [p.detach().clone() for p in params], copy.deepcopy(opt.state_dict())
    params, opt = made(dtype)
    with torch.no_grad():
        for p, w in zip(params, weights, strict=True):
            p.copy_(w)
    opt.load_state_dict(saved)
    train(params, opt, range(2, 4))
    assert follows_in_kernels(opt) == [True]
    assert all(torch.equal(p, q) for p, q in zip(whole, params, strict=True))


@here
def test_a_checkpoint_of_the_kernels_continues_with_torchs_operations_and_the_reverse():
    for first, second in ((None, WithoutKernels), (WithoutKernels, None)):
        params, opt = made(stepper=first)
        train(params, opt, range(2))
        others, other = made(stepper=second)
        with torch.no_grad():
            for p, q in zip(others, params, strict=True):
                p.copy_(q)
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
        for both in ((params, opt), (others, other)):
            train(*both, range(2, 4))
        assert worst(params, others) < 1e-6


@on_gpu
def test_no_round_waits_for_the_device():
    params, opt = made()
    train(params, opt, range(3))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            opt.step()
            opt.norms()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert follows_in_kernels(opt) == [True]


@on_gpu
def test_a_replayed_graph_makes_a_round_at_every_step():
    adam = partial(torch.optim.Adam, capturable=True)
    (params, opt), (twins, eager) = made(around=adam), made(around=adam)
    for p in params:
        p.grad = torch.zeros_like(p)

    def fill(t):
        for p, g in zip(params, gradients(params, t), strict=True):
            p.grad.copy_(g)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for t in range(3):
            fill(t)
            opt.step()
    torch.cuda.current_stream().wait_stream(side)
    assert follows_in_kernels(opt) == [True]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()
    assert follows_in_kernels(opt) == [True]
    for t in range(3, 10):
        fill(t)
        graph.replay()
    train(twins, eager, range(10))
    assert worst(params, twins) < 1e-5
    ours, theirs = (o.param_groups[0]["control"]["vectors"] for o in (opt, eager))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
