"""Errors of the JAX side are sentences: settings, masks, states, torch objects, missing packages."""

import importlib
import subprocess
import sys

import jax.numpy as jnp
import optax
import pytest
import torch
from small_jax import LR

import normcontrol
from normcontrol import AdamWN, NormControl, linear
from normcontrol.optax import adamwn, control_norm, norms, paper_ratio


class TestErrors:
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
    def test_invalid_settings(self, settings, sentence):
        with pytest.raises(ValueError, match=sentence):
            control_norm(**settings)

    def test_a_mask_that_selects_nothing(self):
        with pytest.raises(
            ValueError,
            match=r"Nothing would be controlled: of 1 arrays, the mask selects none. Correct it, such as {'layer': True, 'norm': False}\.$",
        ):
            control_norm(mask={"kernel": False}).init({"kernel": jnp.ones((2, 2))})
        with pytest.raises(
            ValueError, match=r"of 1 arrays, none has two or more dimensions. Give a mask"
        ):
            control_norm().init({"bias": jnp.ones(2)})
        with pytest.raises(
            ValueError, match="a mask or partition around control_norm leaves it no weights"
        ):
            optax.masked(control_norm(), {"kernel": False}).init({"kernel": jnp.ones((2, 2))})

    def test_a_mask_that_does_not_match(self):
        with pytest.raises(
            ValueError,
            match="The mask does not match the params: it must be a tree of bools with their structure",
        ):
            control_norm(mask={"weight": True}).init({"kernel": jnp.ones((2, 2))})
        with pytest.raises(
            TypeError, match="The mask contains 'yes': give True for arrays that are controlled"
        ):
            control_norm(mask={"kernel": "yes"}).init({"kernel": jnp.ones((2, 2))})

    def test_an_update_without_params(self):
        params = {"kernel": jnp.ones((2, 2))}
        tx = adamwn(LR)
        with pytest.raises(ValueError, match=r"update was called without params: call tx.update"):
            tx.update(params, tx.init(params))

    def test_updates_of_other_params(self):
        params = {"kernel": jnp.ones((2, 2))}
        tx = control_norm()
        with pytest.raises(
            ValueError, match="There are 2 updates for 1 weights: control_norm needs one for each"
        ):
            tx.update([params, params], tx.init(params), params)

    @pytest.mark.parametrize("shape", [(3, 2), (1, 3)])
    def test_updates_of_another_shape(self, shape):
        """One of them could be broadcast to the weights."""
        tx, params = control_norm(), {"kernel": jnp.ones((2, 3))}
        sentence = rf"An update has the shape \({shape[0]}, {shape[1]}\), but .* shape \(2, 3\)\."
        with pytest.raises(ValueError, match=sentence):
            tx.update({"kernel": jnp.ones(shape)}, tx.init(params), params)

    @pytest.mark.parametrize(
        ("law", "found"), [(lambda n, t, r: 1.0, "1.0"), (lambda n, t, r: t[:1] / n[:1], "shape")]
    )
    def test_a_law_that_returns_no_scale_for_every_norm(self, law, found):
        with pytest.raises(
            ValueError, match=rf"returned {found}.* for norms of shape \(2,\): a law"
        ):
            control_norm(law=law)

    def test_a_mask_that_selects_whole_numbers_alone(self):
        counter = {"counter": jnp.ones((2, 2), jnp.int32)}
        with pytest.raises(ValueError, match="the mask selects none"):
            control_norm(mask={"counter": True}).init(counter)

    def test_a_state_of_other_params(self):
        params = {"kernel": jnp.ones((2, 2))}
        with pytest.raises(
            ValueError,
            match=r"reference norms of shape \(\), but \(2,\) is needed: it was made for other params",
        ):
            control_norm(scope="row").update(params, control_norm().init(params), params)
        with pytest.raises(ValueError, match="No norm is controlled in this optimizer state"):
            norms(optax.adam(LR).init(params))

    @pytest.mark.parametrize(
        ("scope", "which"),
        [("global", "The controlled weights have"), ("tensor", r"params\['kernel'\] has")],
    )
    def test_a_ratio_to_zero(self, scope, which):
        with pytest.raises(
            ValueError,
            match=f"{which} an initial norm of zero in scope='{scope}', so a ratio to it is not "
            "defined",
        ):
            control_norm(scope=scope).init({"kernel": jnp.zeros((2, 2))})
        control_norm(scope=scope, norm=1.0).init({"kernel": jnp.zeros((2, 2))})
        with pytest.raises(ValueError, match=f"{which} an initial norm of NaN"):
            control_norm(scope=scope).init({"kernel": jnp.full((2, 2), jnp.nan)})

    def test_a_scope_with_axes_that_the_array_does_not_have(self):
        with pytest.raises(
            ValueError,
            match=r"scope='col' needs a tensor with axes \(1,\) .* but params\['gain'\] has shape \(3,\)",
        ):
            control_norm(scope="col", mask={"gain": True}).init({"gain": jnp.ones(3)})

    @pytest.mark.parametrize("scope", [(0, 0), (0, -2)])
    def test_a_scope_that_names_an_axis_twice(self, scope):
        with pytest.raises(ValueError, match=r"names an axis twice for params\['kernel'\]"):
            control_norm(scope=scope).init({"kernel": jnp.ones((2, 2))})

    @pytest.mark.parametrize(
        "given", ["x", "0.5", True, lambda count: None, [1.0, 2.0], jnp.ones(1)]
    )
    def test_a_value_that_is_no_number(self, given):
        for name in ("ratio", "rate"):
            with pytest.raises(TypeError, match=f"{name}=.* is no number.*: give one, or an optax"):
                control_norm(**{name: given})

    @pytest.mark.parametrize("name", ["ratio", "rate", "norm"])
    def test_torch_schedules_and_tensors(self, name):
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

    @pytest.mark.parametrize("given", [normcontrol.paper_ratio, lambda: 1.0, linear])
    def test_functions_that_do_not_take_a_count(self, given):
        with pytest.raises(TypeError, match=r"ratio=.* cannot be called with a count.*paper_ratio"):
            control_norm(ratio=given)

    def test_torch_weights(self):
        with pytest.raises(
            TypeError,
            match=r"params\['w'\] is a torch Parameter, and normcontrol.optax is for JAX: give JAX arrays",
        ):
            adamwn(LR).init({"w": torch.nn.Parameter(torch.ones(2, 2))})
        with pytest.raises(TypeError, match="learning_rate is a torch Tensor"):
            adamwn(torch.tensor(1e-3))

    def test_jax_arguments_for_the_torch_side(self):
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
        with pytest.raises(TypeError, match="is an optax schedule, and this is torch"):
            AdamWN(weight, ratio=paper_ratio)
        with pytest.raises(
            TypeError,
            match=r"GradientTransformation.* In JAX, put normcontrol.optax.control_norm last in the chain",
        ):
            NormControl(optax.sgd(0.1))
        with pytest.raises(
            TypeError,
            match=r"The params contain a JAX array, and AdamWN is for torch: use normcontrol.optax.adamwn",
        ):
            AdamWN([jnp.ones((2, 2))])
        with pytest.raises(TypeError, match=r"The params contain a JAX array"):
            AdamWN({"kernel": jnp.ones((2, 2))})

    def test_a_decay_that_is_not_used_gives_one_warning(self, monkeypatch):
        monkeypatch.setattr("normcontrol.warn.GIVEN", set())
        with pytest.warns(
            UserWarning, match=r"adamwn does not decay: the value of weight_decay=0.1 is not used"
        ) as warned:
            [adamwn(LR, weight_decay=0.1) for _ in range(2)]
        assert len(warned) == 1


def test_importing_the_package_imports_no_jax():
    code = "import sys, normcontrol; assert not {'jax', 'optax', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_a_missing_or_old_optax_is_an_import_error(monkeypatch):
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
