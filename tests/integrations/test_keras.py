"""Keras with the torch backend: the callback of the page controls what Keras trains."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from fork_server import python

if importlib.util.find_spec("keras") is None:  # not imported: its backend is chosen at the import
    pytest.skip("Keras is not installed", allow_module_level=True)

PAGE = (Path(__file__).parents[2] / "docs/keras.md").read_text()
CHECKS = """
reading = control.controller.norms()["global"]
kernels = [layer.kernel for layer in model.layers]
norm = sum((k.value.detach() ** 2).sum() for k in kernels).sqrt()
assert torch.isclose(norm, reading.norm.float()), (norm, reading)
assert abs(reading.norm / (0.8 * 65**0.5) - 1) < 0.02, reading  # 64 outputs and 1
assert model.evaluate(x, x.sum(1), verbose=0) < 0.2  # and Keras trains

again = ControlNorms(gain=0.8, rate=0.1, outputs=-1)
again.set_model(model)
again.on_train_begin()
again.controller.load_state_dict(control.controller.state_dict())
assert again.controller.param_groups[0]["control"]["step"] == 80

constraint = keras.constraints.MinMaxNorm(1.0, 1.0, rate=0.1, axis=0)
w = torch.nn.Parameter(torch.randn(8, 64))
expected = constraint(w.detach().clone())
variables = [type("Variable", (), {"path": "w", "value": w})]
NormControl(Given(variables), norm=1.0, rate=0.1, scope="col").step()
assert torch.allclose(w, expected, rtol=1e-5)
"""


def test_the_callback_controls_and_keras_trains():
    (code,) = re.findall(r"^```py\n(.*?)^```$", PAGE, re.M | re.S)
    ended = python("-c", code + CHECKS)
    assert ended.status == 0, ended.err
    assert "sequential/dense/kernel" in ended.out
