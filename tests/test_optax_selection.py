"""Which arrays are controlled: masks, optax's own masks and partitions."""

import jax
import jax.numpy as jnp
import optax
import pytest
from small_jax import norm_of

from normcontrol.optax import control_norm, norms


class TestMasks:
    def controlled(self, mask):
        """The names of the arrays that change."""
        params = {
            "layer": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
            "norm": {"scale": jnp.ones(2)},
        }
        tx = control_norm(ratio=2.0, rate=1.0, mask=mask)
        updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
        found, _ = jax.tree_util.tree_flatten_with_path(updates)
        return {jax.tree_util.keystr(path) for path, update in found if update.any()}

    def test_matrices_by_default(self):
        assert self.controlled(None) == {"['layer']['kernel']"}

    def test_a_tree_of_bools(self):
        assert self.controlled(
            {"layer": {"kernel": False, "bias": True}, "norm": {"scale": True}}
        ) == {
            "['layer']['bias']",
            "['norm']['scale']",
        }

    def test_a_prefix(self):
        assert self.controlled({"layer": True, "norm": False}) == {
            "['layer']['kernel']",
            "['layer']['bias']",
        }

    def test_a_function_of_the_params(self):
        assert self.controlled(lambda params: jax.tree.map(lambda p: p.ndim == 1, params)) == {
            "['layer']['bias']",
            "['norm']['scale']",
        }

    def test_optax_masked_around_control_norm(self):
        params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
        tx = optax.masked(control_norm(ratio=2.0, rate=1.0), {"a": True, "b": False})
        updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
        assert updates["a"].all()
        assert not updates["b"].any()

    def test_partition_gives_each_group_its_own_norm(self):
        params = {"a": jnp.ones((2, 2)), "b": jnp.ones((3, 3))}
        tx = optax.partition(
            {"up": control_norm(ratio=2.0, rate=1.0), "down": control_norm(ratio=0.5, rate=1.0)},
            {"a": "up", "b": "down"},
        )
        updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
        moved = optax.apply_updates(params, updates)
        assert [norm_of(moved["a"]), norm_of(moved["b"])] == pytest.approx([4.0, 1.5])
        assert sorted(float(r.ratio) for r in norms(state)) == pytest.approx([0.5, 2.0])
