"""The gain in JAX: the last axis of an array is its output, and the norm is that of torch."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from small import SmallModel, matrices
from small_jax import weights_of

from normcontrol import AdamWN, NormControl, set_norm_
from normcontrol.optax import adamwn, control_norm, norms
from normcontrol.optax.outputs import outputs_of


def reached(params, **settings) -> float:
    """The joint norm of JAX weights after one update of nothing but control."""
    tx = optax.chain(optax.sgd(0.0), control_norm(rate=1.0, **settings))
    _, state = tx.update(
        {name: jnp.zeros_like(p) for name, p in params.items()}, tx.init(params), params
    )
    return float(norms(state)[0].norm)


def test_the_same_model_has_the_same_norm_in_torch_and_in_jax():
    model = SmallModel()
    in_torch_layout = weights_of(model)
    in_jax_layout = {
        ("embedding" if name == "embed.weight" else name): p.T
        if p.ndim == 2 and name != "embed.weight"
        else p
        for name, p in in_torch_layout.items()
    }
    opt = NormControl(torch.optim.SGD(model.parameters(), lr=0.0), gain=0.8, rate=1.0)
    opt.step()
    expected = 0.8 * math.sqrt(sum(w.shape[0] for w in matrices(model)))
    assert opt.norms()["global"].norm.item() == pytest.approx(expected)
    assert reached(in_jax_layout, gain=0.8) == pytest.approx(expected, rel=1e-6)
    told = reached(in_torch_layout, gain=0.8, outputs=lambda name, array: 0)
    assert told == pytest.approx(expected, rel=1e-6)


def test_a_convolution_trains_to_the_same_weights_in_torch_and_in_jax():
    torch.manual_seed(0)
    conv, linear = torch.nn.Conv2d(3, 6, 3).weight, torch.nn.Linear(6, 4).weight
    opt = AdamWN([conv, linear], lr=1e-2, gain=0.8, rate=0.3)

    def to_jax(kernel, matrix):  # (height, width, input, output) and (input, output)
        return {"conv": jnp.asarray(kernel.permute(2, 3, 1, 0)), "linear": jnp.asarray(matrix.T)}

    tx = adamwn(1e-2, gain=0.8, rate=0.3)
    params = to_jax(conv.detach(), linear.detach())
    state = tx.init(params)
    for _ in range(4):
        conv.grad, linear.grad = torch.randn_like(conv), torch.randn_like(linear)
        updates, state = tx.update(to_jax(conv.grad, linear.grad), state, params)
        params = optax.apply_updates(params, updates)
        opt.step()
    assert float(norms(state)[0].target) == pytest.approx(0.8 * math.sqrt(6 + 4))
    expected = to_jax(conv.detach(), linear.detach())
    assert all(jnp.allclose(params[name], expected[name], atol=1e-6) for name in params)


@pytest.mark.parametrize(
    ("scope", "expected"), [("tensor", math.sqrt(6)), ("row", math.sqrt(6 / 4)), ("col", 1.0)]
)
def test_every_part_has_its_share_of_the_outputs(scope, expected):
    tx = adamwn(0.0, gain=1.0, rate=1.0, scope=scope)
    params = {"kernel": jnp.arange(1.0, 25.0).reshape(4, 6)}
    _, state = tx.update({"kernel": jnp.ones((4, 6))}, tx.init(params), params)
    assert jnp.allclose(norms(state)[0].norm, expected)


@pytest.mark.parametrize(
    ("params", "settings", "message"),
    [
        (
            {"b": jnp.ones(3)},
            {"mask": True},
            r"params\['b'\] has the shape \(3,\): it has no inputs",
        ),
        ({"k": jnp.ones((2, 3, 4))}, {}, "the outputs cannot be known: give outputs="),
        ({"k": jnp.ones((2, 3))}, {"outputs": lambda n, a: 5}, r"outputs gave the axes \(5,\)"),
        ({"k": jnp.ones((2, 3))}, {"outputs": lambda n, a: (0, -2)}, "one of them is named twice"),
        ({"k": jnp.ones((2, 3))}, {"outputs": lambda n, a: (0, 1)}, "it would have no inputs"),
        ({"k": jnp.ones((2, 3))}, {"outputs": lambda n, a: ()}, r"outputs gave \(\) for params"),
        ({"k": jnp.ones((2, 3))}, {"outputs": lambda n, a: "k"}, "outputs gave 'k' for params"),
        ({"k": jnp.ones((2, 3))}, {"gain": float("nan")}, "gain takes the value nan"),
        ({"k": jnp.ones((2, 3))}, {"ratio": 1.0}, "ratio and gain were both given"),
        ({"k": jnp.ones((2, 3))}, {"gain": -1.0}, "gain takes the value -1"),
    ],
)
def test_what_cannot_be_is_refused(params, settings, message):
    with pytest.raises(ValueError, match=message):
        control_norm(**{"gain": 1.0, **settings}).init(params)


def test_outputs_are_told_by_a_function():
    with pytest.raises(TypeError, match="outputs=0 is no function: give one of name and array"):
        control_norm(gain=1.0, outputs=0)


@pytest.mark.parametrize("start", [0.3, 2.0], ids=["small", "large"])
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_told_nothing_torch_and_jax_hold_the_same_norms(start, scope):
    model = SmallModel()
    set_norm_(model, gain=start)
    params = {name: p for name, p in weights_of(model).items() if p.ndim == 2}
    opt = NormControl(torch.optim.SGD(model.parameters(), lr=0.0), rate=1.0, scope=scope)
    opt.step()
    tx = adamwn(0.0, rate=1.0, scope=scope, outputs=lambda name, array: 0)
    zeros = {name: jnp.zeros_like(p) for name, p in params.items()}
    _, state = tx.update(zeros, tx.init(params), params)
    theirs = sorted(reading.norm.item() for reading in opt.norms().values())
    assert sorted(norms(state)[0].norm.ravel().tolist()) == pytest.approx(theirs, rel=1e-6)
    joint = math.sqrt(sum(norm**2 for norm in theirs))
    expected = max(start, 0.8) * math.sqrt(sum(w.shape[0] for w in matrices(model)))
    assert scope == "tensor" or joint == pytest.approx(expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_told_nothing_an_array_that_starts_at_zero_does_not_raise_the_norm_of_the_others(compiled):
    """An adapter: torch leaves the outputs of its second factor out of the gain too."""
    first, second = torch.randn(8, 64) / 100, torch.zeros(1024, 8)
    opt = AdamWN([torch.nn.Parameter(first), torch.nn.Parameter(second)])
    params = {"first": jnp.asarray(first.T), "second": jnp.asarray(second.T)}
    tx = adamwn(1e-3, rate=0.1)
    init, update = (jax.jit(f) if compiled else f for f in (tx.init, tx.update))
    state = init(params)
    expected = 0.8 * math.sqrt(8)
    assert opt.norms()["global"].target.item() == pytest.approx(expected)
    for _ in range(2):
        assert float(norms(state)[0].target) == pytest.approx(expected)
        updates, state = update(
            {"first": first.T.numpy(), "second": params["second"] + 1}, state, params
        )
        params = optax.apply_updates(params, updates)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("['embedding']['embedding']", 4),
        ("['embed']['embedding'].value", 4),  # flax boxes its arrays
        (".embed.embedding", 4),
        ("['tokens/embedding']", 4),
        ("['embed']['embeddings']", 4),  # haiku's name
        ("['embedding']['kernel']", 9),
        (".embedding.kernel", 9),
        ("[0].embedding_projection.kernel", 9),
        ("['embedding/kernel']", 9),
    ],
)
def test_an_embedding_is_recognised_by_the_name_of_its_array_alone(name, expected):
    """A kernel in a module with the name embedding has its outputs in the last axis."""
    assert outputs_of(name, jnp.ones((4, 9))) == expected


@pytest.mark.parametrize("scope", ["global", "tensor", "row"])
def test_told_nothing_arrays_of_unknown_outputs_keep_their_norm(scope):
    """JAX's search for NaN finds none."""
    params = {"kernel": jnp.full((2, 3, 4), 0.01)}
    before = norms(control_norm(ratio=1.0, scope=scope).init(params))[0].norm
    with jax.debug_nans(True):
        reading = norms(control_norm(scope=scope).init(params))[0]
    assert jnp.allclose(reading.target, before)
    assert reached(params, mask=True) == pytest.approx(float(jnp.linalg.norm(before)))
