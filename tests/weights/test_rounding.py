"""Precision: norms are accurate for weights of every dtype, and weights in bf16 and fp16 reach
their target."""

import itertools
import math

import pytest
import torch
from small import SmallModel, total_norm, train
from torch.nn import Parameter

from normcontrol import AdamWN, NormControl
from normcontrol.scope import parse_scope
from normcontrol.weights.passes import measure
from normcontrol.weights.rounding import multiply_rounding_

LOW = [torch.bfloat16, torch.float16]


def gaussian(*shape, dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


# Low-precision weights


WITHIN = {"global": 1e-3, "tensor": 1e-3, "row": 1e-2}
PAIRS = [  # each value of a setting with each of another one
    ("global", 1.2, torch.bfloat16),
    ("global", 0.8, torch.float16),
    ("tensor", 0.8, torch.bfloat16),
    ("tensor", 1.2, torch.float16),
    ("row", 1.2, torch.bfloat16),
    ("row", 0.8, torch.float16),
]


@pytest.mark.parametrize(
    ("scope", "ratio", "dtype"),
    [
        pytest.param(*case, marks=() if case in PAIRS else pytest.mark.slow)
        for case in itertools.product(WITHIN, [1.2, 0.8], LOW)
    ],
)
def test_low_precision_weights_reach_a_target_20_percent_away(scope, ratio, dtype):
    """At k = 1e-2 the last steps change a weight by much less than one unit in its last place. 800
    steps leave a relative distance of 0.2 * 0.99^800 = 6e-5."""
    p = Parameter(gaussian(64, 256, dtype=dtype))
    first = p.detach().double()
    opt = NormControl(torch.optim.SGD([p], lr=0.1), ratio=ratio, rate=1e-2, scope=scope)
    for _ in range(800):
        opt.step()
    dim = {"row": 1}.get(scope)
    reached = p.detach().double().norm(dim=dim) / first.norm(dim=dim)
    assert (reached / ratio - 1).abs().max() < WITHIN[scope]
    cosine = torch.cosine_similarity(p.detach().double().flatten(), first.flatten(), dim=0)
    assert cosine > 0.999, "rounding adds a little noise and keeps the direction"


@pytest.mark.parametrize(("dtype", "stuck"), [(torch.bfloat16, 0.1), (torch.float16, 0.01)])
def test_with_rounding_to_nearest_the_norm_would_stop_before_the_target(dtype, stuck):
    """Without stochastic rounding the test above would fail: the weights stop changing before the
    norm reaches the target."""
    w = gaussian(64, 256, dtype=dtype)
    target = 1.2 * w.double().norm()
    for _ in range(800):
        w *= (1 - 1e-2 * (1 - target / w.double().norm())).float()
    assert w.double().norm() / target < 1 - stuck


@pytest.mark.parametrize("dtype", LOW)
def test_training_in_low_precision_reaches_and_keeps_its_target(dtype):
    model = SmallModel(dtype)
    opt = AdamWN(model.parameters(), lr=1e-3, eps=1e-4, ratio=1.5, rate=1e-2)
    train(model, opt, range(500))
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    first = [p for p in SmallModel(dtype).parameters() if p.dim() >= 2]
    assert total_norm(matrices) == pytest.approx(1.5 * total_norm(first), rel=0.02)


@pytest.mark.parametrize("dtype", LOW)
def test_rounding_is_right_on_average_and_exact_where_it_can_be(dtype):
    """A product is rounded to one of its two neighbours, with the probabilities that make it exact
    on average."""
    w = torch.full((400, 500), 1.0, dtype=dtype)
    step = torch.finfo(dtype).eps
    multiply_rounding_(w, torch.tensor(1 + step / 4), seed=torch.tensor(7))
    assert set(w.unique().tolist()) == {1.0, 1.0 + step}
    assert (w == 1).double().mean().item() == pytest.approx(
        0.75, abs=4 * math.sqrt(0.75 * 0.25 / w.numel())
    )

    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, math.inf], dtype=dtype)
    for scale in (1.0, 0.5, 2.0):
        scaled = exact.clone()
        multiply_rounding_(scaled, torch.tensor(scale), seed=torch.tensor(7))
        assert torch.equal(scaled, exact * scale)


def test_fp16_below_its_normal_numbers_is_rounded_to_multiples_of_its_smallest():
    """Below 2^-14 fp16 has the multiples of 2^-24 alone, so a product lies between two of them."""
    step = 2.0**-24
    for start, factor, ends in (
        (3, 1.1, {3, 4}),
        (-600, 1.001, {-600, -601}),
        (1, 0.25, {0, 1}),
        (1023, 1.0005, {1023, 1024}),
    ):
        w = torch.full((400, 500), start * step, dtype=torch.float16)
        multiply_rounding_(w, torch.tensor(factor), seed=torch.tensor(7))
        assert {x / step for x in w.unique().tolist()} == ends
        assert w.double().mean().item() / step == pytest.approx(start * factor, abs=5e-3)

    exact = torch.arange(-1023, 1024).mul(step).half()
    scaled = exact.clone()
    multiply_rounding_(scaled, torch.tensor(1.0), seed=torch.tensor(7))
    assert torch.equal(scaled, exact)


@pytest.mark.parametrize("dtype", LOW)
def test_a_nan_with_all_bits_set_stays_one(dtype):
    """Processors make such NaNs; random bits added to one would carry and make it zero."""
    factor = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    w = torch.ones(1000, dtype=dtype)
    multiply_rounding_(w, factor, seed=torch.tensor(7))
    assert w.isnan().all()


def test_fp16_weights_below_its_normal_numbers_reach_their_target():
    p = Parameter((gaussian(64, 64) * 1.5e-4).half())
    first = p.detach().double().norm()
    opt = NormControl(torch.optim.SGD([p], lr=0.1), ratio=1.2, rate=1e-2)
    for _ in range(800):
        opt.step()
    assert (p.detach().double().norm() / first).item() == pytest.approx(1.2, rel=5e-3)


def test_rounding_is_reproducible_and_does_not_use_the_global_generator():
    ends = []
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for seed in (0, 1):
        p = Parameter(gaussian(32, 32, dtype=torch.bfloat16))
        opt = NormControl(torch.optim.SGD([p], lr=0.1), ratio=1.2, rate=1e-2)
        for _ in range(20):
            opt.step()
        ends.append(p.detach().clone())
        assert torch.equal(torch.get_rng_state(), before) or seed
        torch.rand(3)
    assert torch.equal(*ends)


def test_two_equal_tensors_are_rounded_independently():
    """With the same random bits, both would be rounded the same way, and the errors would add
    up."""
    params = [Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(2)]
    NormControl(torch.optim.SGD(params, lr=0.1), ratio=1.1, rate=1e-2).step()
    up = [(p > 1).double().mean().item() for p in params]
    assert up == pytest.approx([1e-3 / 2**-7] * 2, rel=0.25)
    assert not torch.equal(*params)


def test_a_joint_norm_may_have_weights_of_several_dtypes():
    params = [
        Parameter(gaussian(64, 64, dtype=dtype, seed=i))
        for i, dtype in enumerate([*LOW, torch.float32, torch.float64])
    ]
    first = total_norm(params)
    NormControl(torch.optim.SGD(params, lr=0.1), ratio=1.5, rate=1.0).step()
    assert total_norm(params) == pytest.approx(1.5 * first, rel=1e-4)


# Norms


def test_the_norm_of_fp16_weights_may_exceed_the_range_of_fp16():
    p = Parameter(torch.full((100, 100), 1000.0, dtype=torch.float16))
    opt = NormControl(torch.optim.SGD([p], lr=0.1), ratio=0.5, rate=1.0)
    assert opt.norms()["global"].norm.item() == pytest.approx(100_000, rel=1e-7)
    opt.step()
    assert torch.equal(p, torch.full_like(p, 500.0))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_thirty_million_weights_is_right_to_six_digits(dtype):
    """Summed in float32, as torch does on a CPU, the third digit would be wrong."""
    w = gaussian(3000, 10_000, dtype=dtype)
    exact = math.sqrt(sum(rows.double().square().sum().item() for rows in w.split(100)))
    for scope in ("global", "tensor"):
        assert measure([w], parse_scope(scope)).item() == pytest.approx(exact, rel=1e-6)
    assert measure([w.T], parse_scope("tensor")).item() == pytest.approx(exact, rel=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("axes", ["row", "col"])
def test_the_norms_of_long_slices_are_right_to_six_digits(axes):
    w = gaussian(2, 10_000_000)
    w = w if axes == "row" else w.T.contiguous()
    exact = torch.stack([part.double().norm() for part in w.unbind(0 if axes == "row" else 1)])
    assert torch.allclose(measure([w], parse_scope(axes)), exact, rtol=1e-6, atol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    "shape", [(3, 2049), (2049, 3), (5, 70, 80), (70, 5, 80), (4, 3, 5, 700), (2, 3000, 3)]
)
@pytest.mark.parametrize("axes", [(0,), (1,), (-1,), (0, 1)])
def test_the_norms_of_slices_are_right_for_any_shape(shape, axes):
    w = gaussian(*shape)
    if len(axes) == len(shape):
        return
    dims = [d for d in range(len(shape)) if d not in [a % len(shape) for a in axes]]
    exact = torch.linalg.vector_norm(w.double(), dim=dims).flatten()
    assert torch.allclose(measure([w], parse_scope(axes)), exact, rtol=1e-6, atol=0)


def test_float64_weights_have_float64_norms():
    w = torch.randn(300, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = math.sqrt(math.fsum(x * x for x in w.flatten().tolist()))
    for scope in ("global", "tensor"):
        assert measure([w], parse_scope(scope)).item() == pytest.approx(exact, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scope", ["global", "tensor", "row"])
def test_reference_norms_survive_load_state_dict_to_the_last_bit(dtype, scope):
    """torch casts the float tensors of a state to the dtype of their parameter: 3.14159 would
    become 3.1406."""
    model = SmallModel(dtype)
    opt = AdamWN(model.parameters(), scope=scope)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()  # until then the reference is the norm of the weights as they are
    before = opt.param_groups[0]["control"]["reference"].clone()
    other = AdamWN(SmallModel(dtype, seed=1).parameters(), scope=scope)
    assert not torch.equal(other.param_groups[0]["control"]["reference"], before)
    other.load_state_dict(opt.state_dict())
    assert other.param_groups[0]["control"]["reference"].dtype == torch.float64
    assert torch.equal(other.param_groups[0]["control"]["reference"], before)
    assert [r.target.tolist() for r in other.norms().values()] == [
        r.target.tolist() for r in opt.norms().values()
    ]
