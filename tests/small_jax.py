"""The small model of the tests in JAX: the same weights, batches and loss as ``small.py``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from small import MATRICES, WORDS, SmallModel, eta

Params = dict[str, Any]
STEPS, LR = 200, 3e-3


def weights_of(model: SmallModel) -> Params:
    """Copies of a torch model's weights as JAX arrays, by name. A tied head occurs once."""
    return {name: jnp.array(p.detach().numpy(), copy=True) for name, p in model.named_parameters()}


def params_of(dtype: torch.dtype = torch.float32) -> Params:
    """The initial weights of the small model."""
    return weights_of(SmallModel(dtype))


def matrices(params: Params) -> list[jax.Array]:
    """The weights that are controlled by default."""
    return [params[name] for name in MATRICES]


def batches(steps: int) -> jax.Array:
    """The batches of the first steps, as :func:`small.loss_at` draws them."""
    drawn = [
        torch.randint(WORDS, (16, 2), generator=torch.Generator().manual_seed(1000 + t)).numpy()
        for t in range(steps)
    ]
    return jnp.asarray(np.stack(drawn))


def loss(p: Params, words: jax.Array) -> jax.Array:
    x = jnp.tanh(p["embed.weight"][words[:, 0]] @ p["up.weight"].T + p["up.bias"])
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * p[
        "norm.weight"
    ] + p["norm.bias"]
    logits = (x @ p["down.weight"].T + p["down.bias"]) @ p["embed.weight"].T + p["head.bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1]).mean()


def step_of(tx: Any, objective: Callable[..., jax.Array] = loss) -> Callable[..., Any]:
    """One training step as a function of (params, state) and a batch."""

    def step(carry: Any, words: jax.Array) -> Any:
        params, state = carry
        updates, state = tx.update(jax.grad(objective)(params, words), state, params)
        return (optax.apply_updates(params, updates), state), None

    return step


def train(tx: Any, params: Params, words: jax.Array, state: Any = None) -> Any:
    """Train on all batches in one compiled loop. Returns the weights and the optimizer state."""

    def loop(params: Params, state: Any) -> Any:
        first = tx.init(params) if state is None else state
        return jax.lax.scan(step_of(tx), (params, first), words)[0]

    return jax.jit(loop)(params, state)


def ramp(count: Any) -> Any:
    """torch's ``linear(1.0, 1.5, steps=100)``: torch counts steps from 1, optax updates from 0."""
    return optax.linear_schedule(1.0, 1.5, 100)(count + 1)


def learning_rate(lr: float, steps: int) -> Callable[[Any], jax.Array]:
    """:func:`small.eta` as an optax schedule, which counts from 0."""
    table = jnp.asarray([lr * eta(t) for t in range(1, steps + 1)])
    return lambda count: table[jnp.minimum(count, steps - 1)]


def norm_of(arrays: Any) -> float:
    """The joint norm in float64, computed without the library."""
    return float(
        np.sqrt(sum(np.square(np.asarray(a, np.float64)).sum() for a in jax.tree.leaves(arrays)))
    )


def assert_alike(expected: Params, found: Params, within: float) -> None:
    """Equal up to this relative or absolute error, by name."""
    for name, a in expected.items():
        np.testing.assert_allclose(
            np.asarray(found[name]), np.asarray(a), rtol=within, atol=within, err_msg=name
        )
