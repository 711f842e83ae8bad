"""Weight norm control in JAX with flax nnx: ``python examples/jax_nnx.py``.

A small network learns to sort eight numbers. A comment marks the one line that differs from a
training script with ``optax.adamw``. Needs ``pip install 'normcontrol[jax]' flax``.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from normcontrol.optax import adamwn, norms


class Network(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.down = nnx.Linear(width, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.norm(self.up(x))))


def loss_of(model: Network, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(model(x) - jnp.sort(x, axis=-1)))


@nnx.jit
def train_step(model: Network, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args().steps

    model = Network(64, nnx.Rngs(0))
    lr = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    # The norm of the kernels doubles over the first third of the run. Biases and the norm layer are
    # not controlled. With AdamW this line is: tx = optax.adamw(lr, b2=0.95, weight_decay=0.1)
    tx = adamwn(lr, b2=0.95, ratio=optax.linear_schedule(1.0, 2.0, steps // 3), rate=0.2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    print("step    loss  ratio target")
    for step in range(1, steps + 1):
        x = jax.random.normal(jax.random.fold_in(jax.random.key(1), step), (128, 8))
        loss = train_step(model, optimizer, x)
        if step % (steps // 6) == 0:
            (reading,) = norms(optimizer.opt_state)
            print(
                f"{step:4d}  {loss:6.4f}  {reading.ratio:5.3f}  "
                f"{reading.ratio * reading.target / reading.norm:5.3f}"
            )


if __name__ == "__main__":
    main()
