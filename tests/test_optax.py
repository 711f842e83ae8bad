"""The optax twin: the same numbers as torch, and at home in optax's own company."""

import importlib
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from small import MATRICES, SmallModel, with_eta
from small import train as train_torch
from small_jax import batches, learning_rate, norm_of, train, weights_of

import normcontrol
from normcontrol import AdamWN, NormControl, linear
from normcontrol.optax import NormControlState, adamwn, control_norm, norms

STEPS, LR = 200, 3e-3


def double_precision():
    return (
        jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()
    )  # its older name


def params_of(dtype=torch.float32):
    return weights_of(SmallModel(dtype))


def matrices(params):
    return [params[name] for name in MATRICES]


def ramp(count):
    """torch's ``linear(1.0, 1.5, steps=100)``: it counts steps from 1, optax updates from 0."""
    return optax.linear_schedule(1.0, 1.5, 100)(count + 1)


def torch_and_jax(torch_optimizer, tx, dtype):
    """The weights after the same training in both."""
    model = SmallModel(dtype)
    params = weights_of(model)
    optimizer = torch_optimizer(model)
    train_torch(model, optimizer, range(STEPS), with_eta(optimizer))
    params, state = train(tx, params, batches(STEPS))
    return weights_of(model), params, optimizer, state


def assert_alike(theirs, ours, within):
    for name, a in theirs.items():
        np.testing.assert_allclose(
            np.asarray(ours[name]), np.asarray(a), rtol=within, atol=within, err_msg=name
        )


class TestTheSameNumbersAsTorch:
    @pytest.mark.parametrize(
        "settings", [{}, {"scope": "tensor"}, {"scope": "row", "order": "before"}], ids=str
    )
    def test_over_200_steps_of_adamwn(self, settings):
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
            expected = torch.cat(
                [getattr(r, field).reshape(-1) for _, r in sorted(optimizer.norms().items())]
            )  # JAX sorts names
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
    def test_to_the_last_digits_in_double_precision(self, settings):
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
    def test_with_an_absolute_target(self, target):
        level = {"norm": 5.0, "rms": 0.4}[target]
        theirs, ours, _, _ = torch_and_jax(
            lambda model: AdamWN(
                model.parameters(), lr=LR, rate=0.05, scope="tensor", **{target: level}
            ),
            adamwn(learning_rate(LR, STEPS), rate=0.05, scope="tensor", **{target: level}),
            torch.float32,
        )
        assert_alike(theirs, ours, within=1e-6)

    def test_with_the_defaults_of_both(self):
        count = np.arange(0, 4000, 500)
        schedule = normcontrol.groups.settings.PAPER_RATIO
        np.testing.assert_allclose(
            [normcontrol.optax.paper_ratio(c) for c in count],
            [schedule(c + 1) for c in count],
            rtol=1e-6,
        )


class TestTheLaw:
    @pytest.mark.parametrize("order", ["after", "before"])
    @pytest.mark.parametrize("scope", ["global", "tensor", "row", "col", (0,), (-1,)], ids=str)
    def test_the_norm_goes_exactly_so_far(self, scope, order):
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
        held, _ = train(
            adamwn(lr, ratio=0.0, rate=lambda count: 0.1 * lr(count), order="before"),
            params,
            batches(STEPS),
        )
        assert_alike(decayed, held, within=2e-6)

    def test_a_nan_does_not_spread(self):
        params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
        tx = control_norm(ratio=2.0, rate=1.0)
        updates, _ = tx.update(
            {"a": jnp.full((2, 2), jnp.nan), "b": jnp.ones((2, 2))}, tx.init(params), params
        )
        assert jnp.array_equal(updates["b"], jnp.ones((2, 2)))

    def test_weights_of_norm_zero_are_left_alone_under_jit(self):
        """There is no error to be raised there, and a ratio to zero would be decay in disguise."""
        params = {"a": jnp.zeros((2, 2)), "b": jnp.ones((2, 2))}
        tx = control_norm(ratio=2.0, rate=1.0, scope="tensor")
        updates, _ = jax.jit(tx.update)(
            jax.tree.map(jnp.ones_like, params), jax.jit(tx.init)(params), params
        )
        np.testing.assert_allclose(updates["a"], 1.0)
        np.testing.assert_allclose(
            updates["b"], 1.0
        )  # from norm 2 over 4 to its target 4: twice the weights


class TestMasks:
    def controlled(self, mask):
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

    def test_optax_own_mask_around_it(self):
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


class TestInOptaxCompany:
    def test_inject_hyperparams_changes_nothing(self):
        lr, params, words = learning_rate(LR, STEPS), params_of(), batches(20)
        plain, _ = train(adamwn(lr, ratio=ramp, rate=0.05, scope="tensor"), params, words)
        injected, state = train(
            optax.inject_hyperparams(adamwn)(lr, ratio=ramp, rate=0.05, scope="tensor"),
            params,
            words,
        )
        assert_alike(plain, injected, within=1e-6)
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

    def test_a_second_step_does_not_compile_anew(self):
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

    def test_extra_arguments_pass_by(self):
        params = {"kernel": jnp.ones((2, 2))}
        tx = adamwn(LR)
        tx.update(params, tx.init(params), params, value=1.0)

    def test_dtypes_are_kept(self):
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            params = {"kernel": jnp.ones((2, 2), dtype), "bias": jnp.ones(2, dtype)}
            tx = adamwn(LR, ratio=2.0)
            updates, state = tx.update(params, tx.init(params), params)
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

    def test_the_signature_is_that_of_adamw_and_ours(self):
        theirs, ours = (
            inspect.signature(optax.adamw).parameters,
            inspect.signature(adamwn).parameters,
        )
        shared = {name: (p.default, p.kind) for name, p in ours.items() if name in theirs}
        assert shared == {name: (p.default, p.kind) for name, p in theirs.items()}
        assert list(ours)[: len(theirs)] == list(theirs)
        added = set(ours) - set(theirs)
        assert added == {"ratio", "norm", "rms", "rate", "scope", "law", "order"}
        assert added <= set(inspect.signature(AdamWN).parameters)


class TestLowPrecision:
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_a_factor_near_one_scales_on_average(self, dtype):
        """Rounded to nearest, a factor of 1 - 3e-4 changes no bf16 weight at all."""
        params = {"kernel": jax.random.normal(jax.random.key(0), (300, 1000)).astype(dtype)}
        tx = control_norm(ratio=0.0, rate=3e-4)
        updates, state = jax.jit(tx.update)(
            jax.tree.map(jnp.zeros_like, params), tx.init(params), params
        )
        moved = optax.apply_updates(params, updates)
        assert norm_of(moved) / norm_of(params) == pytest.approx(1 - 3e-4, abs=1e-5)
        assert float(norms(state)[0].norm) == pytest.approx(norm_of(moved), rel=1e-5)

    def test_the_updates_land_on_the_rounded_weights_exactly(self):
        """What is rounded to bf16 is the weight, so a second rounding in apply_updates must have
        nothing left to do."""
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


class TestBadInput:
    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({"ratio": -1.0}, "ratio takes the value -1: a norm cannot be negative"),
            ({"ratio": float("nan")}, "ratio takes the value nan: a norm cannot"),
            ({"rate": 1.5}, r"rate takes the value 1.5: a rate outside \[0, 1\] overshoots"),
            (
                {"rate": optax.linear_schedule(0.0, 1.5, 500)},
                "rate takes the value 1.5 at count 1000",
            ),
            (
                {"ratio": 1.0, "norm": 2.0},
                "ratio and norm were both given, but weights have one target",
            ),
            ({"law": "cubic"}, "law='cubic' is not known: give one of 'proportional'"),
            ({"order": "during"}, "order='during' is not known: give 'after'"),
            (
                {"scope": "group"},
                "scope='group': optax has no parameter groups. Give each label of optax.partition",
            ),
            ({"scope": "model"}, "scope='model' is not known: give one of 'global'"),
        ],
    )
    def test_settings_that_cannot_be(self, settings, sentence):
        with pytest.raises(ValueError, match=sentence):
            control_norm(**settings)

    def test_a_mask_that_selects_nothing(self):
        with pytest.raises(
            ValueError,
            match=r"Nothing would be controlled: of 1 arrays, the mask selects no array. Mend it",
        ):
            control_norm(mask={"kernel": False}).init({"kernel": jnp.ones((2, 2))})
        with pytest.raises(
            ValueError, match=r"of 1 arrays, no array has two or more dimensions. Give a mask"
        ):
            control_norm().init({"bias": jnp.ones(2)})
        with pytest.raises(
            ValueError, match="a mask or partition around control_norm leaves it no weights"
        ):
            optax.masked(control_norm(), {"kernel": False}).init({"kernel": jnp.ones((2, 2))})

    def test_a_mask_that_does_not_fit(self):
        with pytest.raises(
            ValueError,
            match="The mask does not fit the params: it must be a tree of bools like them",
        ):
            control_norm(mask={"weight": True}).init({"kernel": jnp.ones((2, 2))})
        with pytest.raises(
            TypeError, match="The mask holds 'yes': give True for what is controlled"
        ):
            control_norm(mask={"kernel": "yes"}).init({"kernel": jnp.ones((2, 2))})

    def test_an_update_without_params(self):
        params = {"kernel": jnp.ones((2, 2))}
        tx = adamwn(LR)
        with pytest.raises(ValueError, match=r"update was called without params: call tx.update"):
            tx.update(params, tx.init(params))

    def test_updates_of_something_else(self):
        params = {"kernel": jnp.ones((2, 2))}
        tx = control_norm()
        with pytest.raises(
            ValueError, match="There are 2 updates for 1 weights: control_norm needs one for each"
        ):
            tx.update([params, params], tx.init(params), params)

    def test_a_state_of_something_else(self):
        params = {"kernel": jnp.ones((2, 2))}
        with pytest.raises(
            ValueError,
            match=r"reference norms of shape \(\), but \(2,\) is needed: it belongs to other params",
        ):
            control_norm(scope="row").update(params, control_norm().init(params), params)
        with pytest.raises(ValueError, match="No norm is controlled in this optimizer state"):
            norms(optax.adam(LR).init(params))

    @pytest.mark.parametrize(
        ("scope", "whose"),
        [("global", "The controlled weights have"), ("tensor", r"params\['kernel'\] has")],
    )
    def test_a_ratio_to_nothing(self, scope, whose):
        with pytest.raises(
            ValueError,
            match=f"{whose} an initial norm of zero in scope='{scope}', so no ratio to it can be "
            "held",
        ):
            control_norm(scope=scope).init({"kernel": jnp.zeros((2, 2))})
        control_norm(scope=scope, norm=1.0).init({"kernel": jnp.zeros((2, 2))})

    def test_axes_that_are_not_there(self):
        with pytest.raises(
            ValueError,
            match=r"scope='col' needs a tensor with axes \(1,\) .* but params\['gain'\] has shape \(3,\)",
        ):
            control_norm(scope="col", mask={"gain": True}).init({"gain": jnp.ones(3)})

    @pytest.mark.parametrize("name", ["ratio", "rate", "norm"])
    def test_torch_schedules_and_tensors_for_jax(self, name):
        with pytest.raises(
            TypeError,
            match=f"{name}=linear.* is a schedule for torch, and this is JAX: give an optax "
            "schedule",
        ):
            control_norm(**{name: linear(0.0, 1.0, steps=10)})
        with pytest.raises(
            TypeError, match=f"{name} is a torch Tensor, and normcontrol.optax is for JAX"
        ):
            control_norm(**{name: torch.tensor(1.0)})

    def test_torch_weights_for_jax(self):
        with pytest.raises(
            TypeError,
            match=r"params\['w'\] is a torch Parameter, and normcontrol.optax is for JAX: give JAX arrays",
        ):
            adamwn(LR).init({"w": torch.nn.Parameter(torch.ones(2, 2))})
        with pytest.raises(TypeError, match="learning_rate is a torch Tensor"):
            adamwn(torch.tensor(1e-3))

    def test_jax_arguments_for_torch(self):
        weight = [torch.nn.Parameter(torch.ones(2, 2))]
        with pytest.raises(
            TypeError,
            match=r"is a JAX .*, and this is torch: give a number or a schedule of normcontrol",
        ):
            AdamWN(weight, ratio=jnp.asarray(2.0))
        with pytest.raises(
            TypeError,
            match=r"is an optax schedule, and this is torch: give a number or a schedule of normcontrol, such as linear",
        ):
            AdamWN(weight, ratio=optax.linear_schedule(1.0, 2.0, 100))
        with pytest.raises(
            TypeError,
            match=r"GradientTransformation.* In JAX, put normcontrol.optax.control_norm last in the chain",
        ):
            NormControl(optax.sgd(0.1))
        with pytest.raises(
            TypeError,
            match=r"The params hold a JAX array, and AdamWN is for torch: use normcontrol.optax.adamwn",
        ):
            AdamWN([jnp.ones((2, 2))])
        with pytest.raises(TypeError, match=r"The params hold a JAX array"):
            AdamWN({"kernel": jnp.ones((2, 2))})

    def test_a_decay_that_is_not_used_is_said_once(self, monkeypatch):
        monkeypatch.setattr("normcontrol.warn.GIVEN", set())
        with pytest.warns(
            UserWarning, match=r"adamwn does not decay: the value of weight_decay=0.1 is not used"
        ) as said:
            [adamwn(LR, weight_decay=0.1) for _ in range(2)]
        assert len(said) == 1


def test_importing_the_package_imports_no_jax():
    code = "import sys, normcontrol; assert not {'jax', 'optax', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_missing_or_old_optax_is_said(monkeypatch):
    monkeypatch.delitem(sys.modules, "normcontrol.optax")
    monkeypatch.setattr(optax, "__version__", "0.1.9")
    with pytest.raises(
        ImportError,
        match=r"normcontrol.optax is tested with optax 0\.2\.\d and newer, but this is 0.1.9: pip install -U optax",
    ):
        importlib.import_module("normcontrol.optax")
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(
        ImportError,
        match=r"normcontrol.optax needs jax and optax, and optax is not installed: pip install 'normcontrol\[jax\]'",
    ):
        importlib.import_module("normcontrol.optax")
