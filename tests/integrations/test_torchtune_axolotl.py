"""torchtune's and axolotl's ways to name an optimizer, with the examples of the page. Where the
package is not installed, a few lines that do the same take the place of its factory."""

from __future__ import annotations

import importlib
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from small import SmallModel, loss_at, train

from normcontrol import AdamWN, linear

yaml = pytest.importorskip("yaml")
PAGE = (Path(__file__).parents[2] / "docs/torchtune.md").read_text()
CONFIG, PLUGINS = (
    yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
)


def stand_in(node: dict, *args):
    """What ``torchtune.config.instantiate`` does."""
    module, _, name = node["_component_"].rpartition(".")
    component = getattr(importlib.import_module(module), name)
    return component(*args, **{k: v for k, v in node.items() if k != "_component_"})


def torchtunes(node: dict, *args):
    config = pytest.importorskip("torchtune.config", exc_type=ImportError)
    return config.instantiate(pytest.importorskip("omegaconf").OmegaConf.create(node), *args)


@pytest.mark.parametrize("instantiate", [stand_in, torchtunes])
def test_torchtunes_component_is_adamwn_with_the_settings_of_the_file(instantiate):
    model = SmallModel()
    opt = instantiate(CONFIG["optimizer"], model.parameters())
    assert isinstance(opt, AdamWN)
    (group,) = opt.param_groups
    assert (group["lr"], group["control"]["ratio"], group["control"]["rate"]) == (2e-5, 1.0, 0.1)

    ramp = {**CONFIG["optimizer"], "ratio": "linear(1, 1.5, steps=4)", "betas": [0.9, 0.95]}
    opt = instantiate({**ramp, "rate": 1.0}, model.parameters())
    assert opt.param_groups[0]["control"]["ratio"] == linear(1, 1.5, steps=4)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    for step in range(6):
        train(model, opt, range(step, step + 1))
        schedule.step()
    assert opt.norms()["global"].ratio.item() == pytest.approx(1.5)


def test_an_optimizer_for_each_tensor_holds_its_norm():
    """torchtune's ``optimizer_in_bwd``."""
    model = SmallModel()
    with pytest.warns(UserWarning, match="Nothing is controlled now"):
        each = [stand_in({**CONFIG["optimizer"], "rate": 1.0}, [p]) for p in model.parameters()]
    before = [p.norm().item() for p in model.parameters() if p.dim() > 1]
    loss_at(model, 0).backward()
    for opt in each:
        opt.step()
    after = [p.norm().item() for p in model.parameters() if p.dim() > 1]
    assert after == pytest.approx(before)


def test_axolotls_plugin_puts_adamwn_into_the_trainer(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from small_llama import arguments, batches, make_model
    from transformers import Trainer

    try:
        from axolotl.core.trainers.mixins.optimizer import OptimizerMixin
    except ImportError:
        base = types.ModuleType("axolotl.integrations.base")
        base.BasePlugin = OptimizerMixin = type("Nothing", (), {})
        monkeypatch.setitem(sys.modules, base.__name__, base)
    (code,) = re.findall(r"^```py\n# norm_control.py\n(.*?)^```$", PAGE, re.M | re.S)
    (tmp_path / "norm_control.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    module, _, name = PLUGINS["plugins"][0].rpartition(".")
    plugin = getattr(importlib.import_module(module), name)()

    args = arguments(tmp_path, weight_decay=PLUGINS["weight_decay"])
    for option in ("loraplus_lr_ratio", "embedding_lr_scale", "embedding_lr", "lr_groups"):
        setattr(args, option, None)  # axolotl's own
    trainer = type("AxolotlTrainer", (OptimizerMixin, Trainer), {})(
        make_model(), args, train_dataset=batches()
    )
    plugin.post_trainer_create({}, trainer)
    trainer.train()
    assert "norm/global/target" in trainer.state.log_history[0]
    control = trainer.optimizer.param_groups[0]["control"]
    assert (control["ratio"], control["rate"], int(control["step"])) == (1.0, 0.1, 8)
