"""A training run in JAX in a separate process; XLA_FLAGS sets the number of host devices.

``python optax_process.py straight|save|resume FOLDER [DTYPE]``: *straight* trains 40 steps, *save*
trains 20 and saves with orbax, *resume* restores and trains the other 20. The final weights and
norms are written to FOLDER as NumPy arrays.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from normcontrol.optax import adamwn, norms

WIDTH = 16


def loss(params, x):
    h = jnp.tanh(x @ params["up"] + params["bias"])
    return jnp.mean(jnp.square(h @ params["down"] - jnp.roll(x, 1, axis=-1)))


def initial(dtype):
    keys = jax.random.split(jax.random.key(0), 2)
    up, down = (
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, [(WIDTH, 32), (32, WIDTH)], strict=True)
    )
    return {"up": up / 4, "bias": jnp.zeros(32, dtype), "down": down / 4}


def placed(params):
    """Shard each matrix along both axes over all devices. The bias is replicated."""
    devices = np.array(jax.devices()).reshape(-1, 2 if len(jax.devices()) > 1 else 1)
    mesh = jax.sharding.Mesh(devices, ("data", "model"))
    specs = {
        "up": PartitionSpec("data", "model"),
        "bias": PartitionSpec(),
        "down": PartitionSpec("model", "data"),
    }
    return {name: jax.device_put(p, NamedSharding(mesh, specs[name])) for name, p in params.items()}


def on_every_device(state, replicated):
    """Replicate the scalars of the state. optax makes Adam's counter on one device, and a
    checkpoint would restore it there, away from the weights."""
    return jax.tree.map(lambda x: x if x.ndim == 2 else jax.device_put(x, replicated), state)


def main(part: str, folder: Path, dtype: str = "float32") -> None:
    params = placed(initial(jnp.dtype(dtype)))
    tx = adamwn(
        1e-2,
        ratio=optax.linear_schedule(1.0, 2.0, 30),
        rate=0.1,
        scope="tensor" if dtype == "bfloat16" else "global",
    )
    state = on_every_device(tx.init(params), params["bias"].sharding)

    @jax.jit
    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    start = 0
    with ocp.StandardCheckpointer() as checkpoints:
        if part == "resume":
            start, (params, state) = 20, checkpoints.restore(folder / "saved", (params, state))
        for t in range(start, 20 if part == "save" else 40):
            x = jax.random.normal(jax.random.fold_in(jax.random.key(1), t), (8, WIDTH)).astype(
                dtype
            )
            params, state = step(params, state, x)
        if part == "save":
            checkpoints.save(folder / "saved", (params, state))
            return
    assert params["up"].sharding.is_equivalent_to(placed(initial(jnp.float32))["up"].sharding, 2), (
        "the weights are no longer sharded"
    )
    (reading,) = norms(state)
    assert reading.norm.sharding.is_fully_replicated
    hlo = step.lower(params, state, x).compile().as_text()
    weights = {name: np.asarray(p.astype(jnp.float32)) for name, p in params.items()}
    np.savez(
        folder / f"{part}{len(jax.devices())}.npz",
        **weights,
        norm=reading.norm,
        target=reading.target,
        exchange="all-reduce" in hlo,
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
