"""The controller in an optax chain: optax's wrappers, ``jit``, donated buffers, dtypes, rounding."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_jax import (
    LR,
    STEPS,
    assert_alike,
    batches,
    learning_rate,
    matrices,
    norm_of,
    params_of,
    ramp,
    train,
)

from normcontrol import AdamWN
from normcontrol.optax import NormControlState, adamwn, control_norm, norms
from normcontrol.optax.rounding import round_to


class TestInAChain:
    def test_inject_hyperparams_changes_nothing(self):
        lr, params, words = learning_rate(LR, STEPS), params_of(), batches(20)
        direct, _ = train(adamwn(lr, ratio=ramp, rate=0.05, scope="tensor"), params, words)
        injected, state = train(
            optax.inject_hyperparams(adamwn)(lr, ratio=ramp, rate=0.05, scope="tensor"),
            params,
            words,
        )
        assert_alike(direct, injected, within=1e-6)
        assert float(state.hyperparams["ratio"]) == pytest.approx(float(ramp(19)))

    def test_an_injected_ratio_can_be_set_by_hand(self):
        params = {"kernel": jnp.ones((2, 2))}
        tx = optax.inject_hyperparams(control_norm, static_args="mask")(
            ratio=1.0, rate=1.0, mask=lambda p: jax.tree.map(lambda _: True, p)
        )
        state = tx.init(params)
        state.hyperparams["ratio"] = jnp.asarray(3.0)
        updates, _ = jax.jit(tx.update)({"kernel": jnp.zeros((2, 2))}, state, params)
        np.testing.assert_allclose(updates["kernel"], 2.0)

    def test_multi_steps_controls_once_for_each_accumulated_step(self):
        words = batches(24)
        pairs = words.reshape(12, 32, 2)
        tx = lambda: adamwn(LR, ratio=ramp, rate=0.05)  # noqa: E731
        whole, _ = train(tx(), params_of(), pairs)
        split, state = train(
            optax.MultiSteps(tx(), every_k_schedule=2).gradient_transformation(), params_of(), words
        )
        assert_alike(whole, split, within=1e-5)
        counts = [
            s.count
            for s in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, NormControlState))
            if hasattr(s, "norm0")
        ]
        assert [int(count) for count in counts] == [12]

    def test_map_params_finds_no_weights_in_its_state(self):
        params = params_of()
        for scope in ("global", "row"):
            tx = adamwn(LR, scope=scope, mask=lambda p: jax.tree.map(lambda x: x.ndim >= 2, p))
            state = tx.init(params)
            mapped = optax.tree_utils.tree_map_params(tx, lambda p: p + 1, state)
            assert jnp.array_equal(norms(mapped)[0].norm, norms(state)[0].norm)
            assert jnp.array_equal(mapped[0].mu["up.bias"], state[0].mu["up.bias"] + 1)

    def test_a_schedule_is_called_with_an_array_also_when_it_is_checked(self):
        """Optax calls its schedules with arrays, so a schedule may use their methods."""
        params = {"kernel": jnp.ones((2, 2))}
        tx = control_norm(ratio=lambda count: 2 - 1 / (count.astype(jnp.float32) + 1), rate=1.0)
        state = tx.init(params)
        assert float(norms(state)[0].target) == 2
        for _ in range(2):
            updates, state = jax.jit(tx.update)({"kernel": jnp.zeros((2, 2))}, state, params)
            params = optax.apply_updates(params, updates)
        assert float(norms(state)[0].norm) == pytest.approx(3)

    def test_a_second_step_does_not_compile_again(self):
        params = params_of()
        tx = adamwn(learning_rate(LR, STEPS), ratio=ramp)
        step = jax.jit(tx.update, donate_argnums=1)
        state = tx.init(params)
        for _ in range(3):
            _, state = step(params, state, params)
        assert step._cache_size() == 1

    @pytest.mark.parametrize("jit_init", [False, True])
    def test_state_and_weights_may_be_donated(self, jit_init):
        params = {"kernel": jnp.ones((2, 2))}
        tx = control_norm(ratio=2.0, rate=1.0)
        state = (jax.jit(tx.init) if jit_init else tx.init)(params)
        _, state = jax.jit(tx.update, donate_argnums=(0, 1))(
            {"kernel": jnp.zeros((2, 2))}, state, params
        )
        assert float(norms(state)[0].norm) == 4

    def test_extra_arguments_of_update_are_accepted(self):
        params = {"kernel": jnp.ones((2, 2))}
        tx = adamwn(LR)
        tx.update(params, tx.init(params), params, value=1.0)

    def test_the_readings_of_flax_nnx_are_arrays(self):
        """Its optimizer stores the state in variables, which cannot be formatted as numbers."""
        nnx = pytest.importorskip("flax.nnx")
        model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, adamwn(LR, ratio=2.0), wrt=nnx.Param)
        (seen,) = norms(optimizer.opt_state)
        assert {type(value) for value in seen} == {type(jnp.ones(()))}
        assert f"{seen.norm:.3f}" == f"{norm_of(model.kernel[...]):.3f}"

    def test_dtypes_are_kept(self):
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            params = {"kernel": jnp.ones((2, 2), dtype), "bias": jnp.ones(2, dtype)}
            tx = adamwn(LR, ratio=2.0)
            updates, state = jax.jit(lambda p, tx=tx: tx.update(p, tx.init(p), p))(params)
            assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
            assert norms(state)[0].norm.dtype == jnp.float32

    def test_complex_weights(self):
        params = {"kernel": jnp.full((2, 2), 3 + 4j)}
        tx = control_norm(ratio=2.0, rate=1.0)
        updates, _ = tx.update({"kernel": jnp.zeros((2, 2), complex)}, tx.init(params), params)
        np.testing.assert_allclose(updates["kernel"], 3 + 4j, rtol=1e-6)

    def test_integers_and_missing_leaves_are_not_weights(self):
        params = {"kernel": jnp.ones((2, 2)), "table": jnp.ones((2, 2), int), "gone": None}
        tx = control_norm(ratio=2.0, rate=1.0)
        updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
        assert updates["table"].dtype == params["table"].dtype
        assert not updates["table"].any()
        np.testing.assert_allclose(updates["kernel"], 1.0)

    def test_the_signature_is_that_of_adamw_and_the_settings(self):
        theirs, ours = (
            inspect.signature(optax.adamw).parameters,
            inspect.signature(adamwn).parameters,
        )
        shared = {name: (p.default, p.kind) for name, p in ours.items() if name in theirs}
        assert shared == {name: (p.default, p.kind) for name, p in theirs.items()}
        assert list(ours)[: len(theirs)] == list(theirs)
        added = set(ours) - set(theirs)
        assert added == {
            "ratio",
            "norm",
            "rms",
            "gain",
            "hold",
            "rate",
            "scope",
            "law",
            "order",
            "outputs",
        }
        assert added <= set(inspect.signature(AdamWN).parameters)


class TestLowPrecision:
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_a_factor_near_one_scales_on_average(self, dtype):
        """Rounded to nearest, a factor of 1 - 3e-4 would not change any bf16 weight."""
        params = {"kernel": jax.random.normal(jax.random.key(0), (300, 1000)).astype(dtype)}
        tx = control_norm(ratio=0.0, rate=3e-4)
        updates, state = jax.jit(tx.update)(
            jax.tree.map(jnp.zeros_like, params), tx.init(params), params
        )
        moved = optax.apply_updates(params, updates)
        assert norm_of(moved) / norm_of(params) == pytest.approx(1 - 3e-4, abs=1e-5)
        assert float(norms(state)[0].norm) == pytest.approx(norm_of(moved), rel=1e-5)

    def test_fp16_below_its_normal_numbers_scales_on_average(self):
        """There fp16 has the multiples of 2^-24 alone; 3.3 of them are three or four."""
        params = {"kernel": jnp.full((300, 1000), 3 * 2.0**-24, jnp.float16)}
        tx = control_norm(ratio=1.1, rate=1.0)
        updates, _ = jax.jit(tx.update)(
            jax.tree.map(jnp.zeros_like, params), tx.init(params), params
        )
        moved = np.asarray(optax.apply_updates(params, updates)["kernel"], np.float64) * 2**24
        assert set(np.unique(moved)) == {3.0, 4.0}
        assert moved.mean() == pytest.approx(3.3, abs=5e-3)

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_a_nan_with_all_bits_set_stays_one(self, dtype):
        """Random bits added to such a NaN would carry and make it zero."""
        theta = np.full(1000, 0x7FFFFFFF, np.uint32).view(np.float32)
        rounded = round_to(jnp.dtype(dtype), jnp.asarray(theta), jnp.int32(1), 0)
        assert bool(jnp.isnan(rounded).all())

    def test_apply_updates_gives_the_rounded_weights_exactly(self):
        """The weights are rounded to bf16 once: apply_updates must not round them again."""
        params = {"kernel": jax.random.normal(jax.random.key(0), (100, 100)).astype(jnp.bfloat16)}
        tx = control_norm(ratio=1.0, rate=1.0)
        half = {"kernel": -params["kernel"] / 2}
        updates, _ = tx.update(half, tx.init(params), params)
        assert jnp.array_equal(optax.apply_updates(params, updates)["kernel"], params["kernel"])

    @pytest.mark.slow
    def test_the_norm_follows_its_target_in_training(self):
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params_of())
        trained, _ = train(adamwn(1e-5, ratio=ramp, rate=0.05), params, batches(STEPS))
        assert norm_of(matrices(trained)) / norm_of(matrices(params)) == pytest.approx(
            1.5, rel=5e-3
        )
