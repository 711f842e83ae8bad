"""The norm law: after control, ``||theta'|| = |(1 - k) ||theta|| + k * target|`` for any weights."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import total_norm

from normcontrol import NormControl
from normcontrol.law import LAWS

shapes = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(2, 3)), min_size=1, max_size=3
)
dtypes = st.sampled_from(
    [torch.float64, torch.float32, torch.complex64, torch.bfloat16, torch.float16]
)
scopes = st.sampled_from(["global", "group", "tensor", "row", "col", (0, 1), -3])
kinds = st.sampled_from(["ratio", "norm", "rms"])
laws = st.sampled_from(["proportional", "upper", "lower", "projection", "band(0.5)"])
unit = st.floats(0.0, 1.0)

# The largest relative error of a weight: the rounding of factor, product and norm, or one unit in
# the last place of a low-precision format, which is rounded up or down.
PRECISION = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.complex64: 1e-6,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
}


def parts_of(params, scope):
    """Lists of views; the views of a list share a norm."""
    if scope in ("global", "group"):
        return [list(params)]
    if scope == "tensor":
        return [[p] for p in params]
    axes = {"row": (0,), "col": (1,), -3: (0,)}.get(scope, scope)
    moved = [p.movedim(axes, tuple(range(len(axes)))).flatten(0, len(axes) - 1) for p in params]
    return [[part] for p in moved for part in p]


def norm_after(law, norm, target, k):
    """The norm after one step, by the definition of each law."""
    if law == "projection":
        return target if k > 0 else norm
    if (law == "upper" and norm <= target) or (law == "lower" and norm >= target):
        return norm
    if law == "band(0.5)":
        target = min(max(norm, 0.5 * target), target)
    return abs((1 - k) * norm + k * target)


@settings(max_examples=300, deadline=None)
@given(
    shapes,
    dtypes,
    scopes,
    kinds,
    st.floats(0.0, 3.0),
    unit,
    laws,
    st.sampled_from(["after", "before"]),
    st.integers(0, 2**31),
)
def test_the_norm_law(shapes, dtype, scope, kind, level, rate, law, order, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1 for shape in shapes]
    params = [torch.nn.Parameter(w.to(dtype) * (1j if dtype.is_complex else -1)) for w in drawn]
    opt = NormControl(
        torch.optim.SGD(params, lr=0.1),
        **{kind: level},
        rate=rate,
        scope=scope,
        law=law,
        order=order,
    )
    norms = [total_norm(part) for part in parts_of(params, scope)]
    roots = [math.sqrt(sum(w.numel() for w in part)) for part in parts_of(params, scope)]
    targets = [
        level * {"ratio": n, "norm": 1.0, "rms": root}[kind]
        for n, root in zip(norms, roots, strict=True)
    ]

    opt.step()  # without gradients, only the controller changes the weights

    for part, norm, target in zip(parts_of(params, scope), norms, targets, strict=True):
        expected = norm_after(law, norm, target, rate)
        assert total_norm(part) == pytest.approx(
            expected, rel=PRECISION[dtype], abs=PRECISION[dtype] * 1e-3 + 1e-15 * norm
        )
    readings = [n for r in opt.norms().values() for n in r.norm.reshape(-1).tolist()]
    assert readings == pytest.approx(
        [norm_after(law, n, t, rate) for n, t in zip(norms, targets, strict=True)],
        rel=1e-6,
        abs=1e-12,
    )


@pytest.mark.parametrize(
    ("law", "after"),
    [
        ("proportional", (1.5, 1.875, 3.0)),
        ("upper", (1.0, 1.75, 3.0)),
        ("lower", (1.5, 1.875, 4.0)),
        ("projection", (2.0, 2.0, 2.0)),
        ("band(0.75)", (1.25, 1.75, 3.0)),
    ],
)
def test_each_law_below_its_target_close_to_it_and_above_it(law, after):
    for before, expected in zip((1.0, 1.75, 4.0), after, strict=True):
        weights = torch.nn.Parameter(torch.full((2, 2), before / 2, dtype=torch.float64))
        NormControl(torch.optim.SGD([weights], lr=0.1), norm=2.0, rate=0.5, law=law).step()
        assert total_norm([weights]) == pytest.approx(expected, rel=1e-14)


@settings(max_examples=50, deadline=None)
@given(shapes, unit, st.floats(0.0, 3.0), st.integers(0, 2**31))
def test_control_scales_and_does_not_rotate(shapes, rate, ratio, seed):
    """All weights that share a norm are multiplied by the same factor."""
    generator = torch.Generator().manual_seed(seed)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for shape in shapes
    ]
    before = [p.detach().clone() for p in params]
    opt = NormControl(torch.optim.SGD(params, lr=0.1), ratio=ratio, rate=rate)
    opt.step()
    scale = opt.norms()["global"].scale
    assert 1 - rate <= scale <= max(1, ratio) + 1e-12
    assert all(torch.equal(p, w * scale) for p, w in zip(params, before, strict=True))


def controlled(weight, steps=1, **settings) -> list:
    """The weights after some steps of the controller alone."""
    p = torch.nn.Parameter(torch.tensor(weight))
    opt = NormControl(torch.optim.SGD([p], lr=0.1), **settings)
    for _ in range(steps):
        opt.step()
    return p.tolist()


TRIANGLE = [[3.0, 4.0]]  # norm 5
ROWS = [[3.0, 4.0], [12.0, 16.0]]  # row norms 5 and 20


@pytest.mark.parametrize(
    ("weight", "settings", "expected"),
    [
        (TRIANGLE, {"ratio": 2.0, "rate": 0.5}, [[4.5, 6.0]]),  # 5 -> 7.5, half-way to 10
        (TRIANGLE, {"ratio": 2.0, "rate": 1.0}, [[6.0, 8.0]]),  # k = 1: in one step
        (TRIANGLE, {"ratio": 2.0, "rate": 0.0}, TRIANGLE),
        (TRIANGLE, {"ratio": 0.0, "rate": 0.25}, [[2.25, 3.0]]),  # weight decay
        (TRIANGLE, {"norm": 10.0, "rate": 1.0}, [[6.0, 8.0]]),
        (TRIANGLE, {"norm": 10.0, "rate": 0.01, "law": "projection"}, [[6.0, 8.0]]),
        (TRIANGLE, {"norm": 10.0, "rate": 0.5, "law": "upper"}, TRIANGLE),
        (TRIANGLE, {"norm": 10.0, "rate": 0.5, "law": "lower"}, [[4.5, 6.0]]),
        (TRIANGLE, {"norm": 2.5, "rate": 1.0, "law": "upper"}, [[1.5, 2.0]]),  # max-norm
        (TRIANGLE, {"norm": 2.5, "rate": 1.0, "law": "lower"}, TRIANGLE),
        ([[2.0, 2.0], [2.0, 2.0]], {"rms": 1.0, "rate": 1.0}, [[1.0, 1.0], [1.0, 1.0]]),
        (ROWS, {"norm": 10.0, "rate": 1.0, "scope": "row"}, [[6.0, 8.0], [6.0, 8.0]]),
        (
            ROWS,
            {"norm": 10.0, "rate": 0.5, "scope": "row", "law": "upper"},
            [[3.0, 4.0], [9.0, 12.0]],
        ),
        (
            [[3.0, 0.0], [4.0, 2.0]],
            {"norm": 10.0, "rate": 1.0, "scope": "col"},
            [[6.0, 0.0], [8.0, 10.0]],
        ),
        (  # a stack of two experts
            [[[3.0, 4.0]], [[0.0, 2.0]]],
            {"norm": 10.0, "rate": 1.0, "scope": (0,)},
            [[[6.0, 8.0]], [[0.0, 10.0]]],
        ),
    ],
)
def test_values_by_hand(weight, settings, expected):
    assert controlled(weight, **settings) == expected


def test_one_norm_over_all_weights_by_default():
    """Tensors of norm 3 and 4 have the joint norm 5. With the target 10, both are doubled."""
    params = [
        torch.nn.Parameter(torch.tensor([[3.0, 0.0]])),
        torch.nn.Parameter(torch.tensor([[0.0], [4.0]])),
    ]
    opt = NormControl(torch.optim.SGD(params, lr=0.1), norm=10.0, rate=1.0)
    opt.step()
    assert [p.tolist() for p in params] == [[[6.0, 0.0]], [[0.0], [8.0]]]
    assert opt.norms()["global"].norm.item() == 10.0


def test_the_reference_is_the_initial_norm_and_not_the_last():
    """Three steps at k = 1 and ratio 2 double the norm once, not three times."""
    assert controlled(TRIANGLE, steps=3, ratio=2.0, rate=1.0) == [[6.0, 8.0]]


def test_a_law_that_is_added_to_the_registry_can_be_used(monkeypatch):
    monkeypatch.setitem(LAWS, "halfway", lambda norm, target, rate: (norm + target) / (2 * norm))
    assert controlled(TRIANGLE, norm=10.0, law="halfway") == [[4.5, 6.0]]
