"""The JAX side gives the same numbers as torch, and the norm law holds exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from small import SmallModel, with_eta
from small import train as train_torch
from small_jax import (
    LR,
    STEPS,
    assert_alike,
    batches,
    learning_rate,
    params_of,
    ramp,
    train,
    weights_of,
)

from normcontrol import AdamWN, NormControl, linear
from normcontrol import paper_ratio as torch_paper_ratio
from normcontrol.optax import adamwn, control_norm, norms, paper_ratio


def double_precision():
    """JAX's switch to float64, by its new or its old name."""
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


def torch_and_jax(torch_optimizer, tx, dtype):
    """Train the same model in torch and in JAX. Returns both weights, and both optimizer states."""
    model = SmallModel(dtype)
    params = weights_of(model)
    optimizer = torch_optimizer(model)
    train_torch(model, optimizer, range(STEPS), with_eta(optimizer))
    params, state = train(tx, params, batches(STEPS))
    return weights_of(model), params, optimizer, state


class TestSameNumbersAsTorch:
    @pytest.mark.parametrize(
        "settings", [{}, {"scope": "tensor"}, {"scope": "row", "order": "before"}], ids=str
    )
    def test_200_steps_of_adamwn_give_the_weights_of_torch(self, settings):
        theirs, ours, optimizer, state = torch_and_jax(
            lambda model: AdamWN(
                model.named_parameters(),
                lr=LR,
                ratio=linear(1.0, 1.5, steps=100),
                rate=0.05,
                **settings,
            ),
            adamwn(learning_rate(LR, STEPS), ratio=ramp, rate=0.05, **settings),
            torch.float32,
        )
        assert_alike(theirs, ours, within=1e-6)
        (reading,) = norms(state)
        for field in ("norm", "target", "scale"):
            by_name = sorted(optimizer.norms().items())  # the order of JAX
            expected = torch.cat([getattr(r, field).reshape(-1) for _, r in by_name])
            np.testing.assert_allclose(
                np.asarray(getattr(reading, field)).reshape(-1), expected.numpy(), rtol=1e-5
            )

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"scope": "tensor", "law": "upper"},
            {"scope": "col", "law": "projection"},
            {"scope": (0,), "law": "lower"},
            {"order": "before"},
        ],
        ids=str,
    )
    def test_in_double_precision_the_weights_agree_to_the_last_digits(self, settings):
        with double_precision():
            theirs, ours, _, _ = torch_and_jax(
                lambda model: NormControl(
                    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                    ratio=1.2,
                    rate=0.05,
                    **settings,
                ),
                optax.chain(
                    optax.trace(0.9),
                    optax.scale_by_learning_rate(learning_rate(0.1, STEPS)),
                    control_norm(1.2, 0.05, **settings),
                ),
                torch.float64,
            )
            assert_alike(theirs, ours, within=1e-12)

    @pytest.mark.slow
    @pytest.mark.parametrize("target", ["norm", "rms"])
    def test_absolute_targets_agree_with_torch(self, target):
        level = {"norm": 5.0, "rms": 0.4}[target]
        theirs, ours, _, _ = torch_and_jax(
            lambda model: AdamWN(
                model.parameters(), lr=LR, rate=0.05, scope="tensor", **{target: level}
            ),
            adamwn(learning_rate(LR, STEPS), rate=0.05, scope="tensor", **{target: level}),
            torch.float32,
        )
        assert_alike(theirs, ours, within=1e-6)

    def test_the_papers_ratio_agrees_with_torch(self):
        count = np.arange(0, 4000, 500)
        np.testing.assert_allclose(
            [paper_ratio(c) for c in count], [torch_paper_ratio()(c + 1) for c in count], rtol=1e-6
        )


class TestLaw:
    @pytest.mark.parametrize("order", ["after", "before"])
    @pytest.mark.parametrize("scope", ["global", "tensor", "row", "col", (0,), (-1,)], ids=str)
    def test_the_norm_law_is_exact(self, scope, order):
        params = {
            "a": jnp.arange(1.0, 7).reshape(2, 3),
            "b": -jnp.ones((4, 2)),
            "bias": jnp.ones(3),
        }
        tx = control_norm(ratio=3.0, rate=0.25, scope=scope, order=order)
        still = jax.tree.map(jnp.zeros_like, params)
        updates, state = tx.update(still, tx.init(params), params)
        assert not updates["bias"].any()
        moved = optax.apply_updates(params, updates)
        (before,), (after,) = norms(tx.init(params)), norms(tx.init(moved))
        np.testing.assert_allclose(
            after.norm, 0.75 * before.norm + 0.25 * 3 * before.norm, rtol=1e-6
        )
        np.testing.assert_allclose(norms(state)[0].norm, after.norm, rtol=1e-6)

    def test_weight_decay_is_ratio_0_before_the_step(self):
        params, lr = params_of(), learning_rate(LR, STEPS)
        decayed, _ = train(
            optax.adamw(lr, weight_decay=0.1, mask=jax.tree.map(lambda p: p.ndim >= 2, params)),
            params,
            batches(STEPS),
        )
        controlled, _ = train(
            adamwn(lr, ratio=0.0, rate=lambda count: 0.1 * lr(count), order="before"),
            params,
            batches(STEPS),
        )
        assert_alike(decayed, controlled, within=2e-6)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", ["ratio", "rate"])
    def test_numbers_in_float64_do_not_change_dtypes(self, name, dtype):
        """They would change those of the state, and the first of a loop would not be the last."""
        with double_precision():
            params = {"kernel": jnp.ones((3, 3), dtype), "wide": jnp.ones((3, 3), "float32")}
            tx = control_norm(**{"ratio": 2.0, "rate": 1.0, name: np.float64(1.0)})
            state = tx.init(params)
            still = jax.tree.map(jnp.zeros_like, params)
            for _ in range(2):
                updates, after = tx.update(still, state, params)
                assert [x.dtype for x in after] == [x.dtype for x in state]
                assert [u.dtype for u in updates.values()] == [dtype, "float32"]

    def test_a_norm_shared_by_weights_in_bf16_and_float64(self):
        with double_precision():
            params = {"low": jnp.ones((3, 3), "bfloat16"), "high": jnp.ones((3, 3), "float64")}
            tx = control_norm(ratio=2.0, rate=1.0)
            updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
            assert all(jnp.array_equal(u, jnp.ones((3, 3))) for u in updates.values())

    def test_a_nan_does_not_spread(self):
        params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
        tx = control_norm(ratio=2.0, rate=1.0)
        updates, _ = tx.update(
            {"a": jnp.full((2, 2), jnp.nan), "b": jnp.ones((2, 2))}, tx.init(params), params
        )
        assert jnp.array_equal(updates["b"], jnp.ones((2, 2)))

    def test_weights_of_norm_zero_are_left_alone_under_jit(self):
        """Under jit no error can be raised, and a target of 0 times the ratio would be decay."""
        params = {"a": jnp.zeros((2, 2)), "b": jnp.ones((2, 2))}
        tx = control_norm(ratio=2.0, rate=1.0, scope="tensor")
        updates, _ = jax.jit(tx.update)(
            jax.tree.map(jnp.ones_like, params), jax.jit(tx.init)(params), params
        )
        np.testing.assert_allclose(updates["a"], 1.0)
        np.testing.assert_allclose(updates["b"], 1.0)  # the target norm, 4, is twice the norm
