"""Settings that have no effect are refused, and the table that says so is what ``build`` does."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from normcontrol.lab.cli.main import main
from normcontrol.lab.errors import LabError
from normcontrol.lab.training.config import Config, Model, Optim, preset
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.model import GPT
from normcontrol.lab.training.optimizer_names import known_name
from normcontrol.lab.training.optimizers import build
from normcontrol.lab.training.options import CHOICES, CONDITIONS, OFF, USES, check_used, unused

BY_ALL = {"optimizer", "lr", "min_lr", "schedule", "warmup", "decay", "clip"}
"""The settings of the optimizer that the training loop uses, whatever the optimizer is."""

OTHER = {
    "betas": (0.8, 0.9),
    "weight_decay": 0.7,
    "ratio": 3.0,
    "gain": 0.6,
    "hidden_only": True,
    "ratio_start": 0.5,
    "ramp": 7,
    "growth": "walk",
    "rate": 0.3,
    "scope": "tensor",
    "norm_layers": True,
    "replay": (0.1, 0.2),
    "path": (1.1, 1.2),
}
"""Another value for each setting that not all optimizers use."""

MODEL = Model(layers=1, heads=1, width=8, context=4)


@functools.cache
def model():
    return GPT.initialised(MODEL, 64)


@functools.cache
def built(optimizer, **changes):
    """All that the optimizers of a config differ by, as text."""
    torch.manual_seed(0)
    made = build(Config(MODEL).with_(optimizer=optimizer, **changes), model())
    groups = [dict(group) for one in made for group in one.param_groups]
    for group in groups:
        group["params"] = [tuple(p.shape) for p in group["params"]]
        group["control"] = dict(group.get("control", {}))
    return str(groups)


def test_every_setting_of_the_optimizer_is_in_the_table():
    assert {field.name for field in dataclasses.fields(Optim)} == BY_ALL | CHOICES
    assert OTHER.keys() == CHOICES
    settings = set(Config().flat())
    assert all(condition.settings <= settings for condition in CONDITIONS)
    assert {name: Config().flat()[name] for name in OFF} == OFF


@pytest.mark.parametrize("optimizer", USES)
def test_a_setting_is_in_the_table_if_it_changes_the_optimizer(optimizer):
    for name, value in OTHER.items():
        # Settings of the control have an effect on a controlled norm only, and decay on another.
        controls = name not in ("weight_decay", "ratio", "gain") and "ratio" in USES[optimizer]
        base = {"ratio": 2.0} if controls else {}
        config = Config(MODEL).with_(optimizer=optimizer, **base)
        said = name in unused(config.with_(**{name: value}), [name])
        try:
            same = built(optimizer, **base) == built(optimizer, **{**base, name: value})
        except LabError:  # it is refused by the optimizer itself, not ignored
            same = said
        assert said == same, (optimizer, name)


@pytest.mark.parametrize(
    ("changes", "given", "sentence"),
    [
        (
            {"optimizer": "AdamW", "norm_layers": True},
            [],
            "norm_layers=True would have no effect: AdamW takes no norm_layers. Omit it, or choose "
            "AdamWN.",
        ),
        (
            {"optimizer": "adamw", "hidden_only": True},
            [],
            "hidden_only=True would have no effect: AdamW takes no hidden_only. Omit it, or choose "
            "AdamWN.",
        ),
        ({"optimizer": "SGD"}, ["betas"], "betas=(0.9, 0.95) would have no effect: SGD takes no"),
        ({"optimizer": "AdamH", "ratio": 2.0}, [], "AdamH takes no ratio. Omit it"),
        (
            {"optimizer": "AdamW", "rate": 0.1},
            ["rate"],
            "rate=0.1 would have no effect: the norm is not controlled. Omit it, or give a ratio "
            "or a gain too.",
        ),
        (
            {"optimizer": "AdamW", "ratio": 2.0},
            ["weight_decay"],
            "weight_decay=0.5 would have no effect: the norm is controlled, and then nothing is "
            "decayed. Omit it.",
        ),
        ({"gain": 0.8}, ["ramp"], "ramp=25 would have no effect: a gain is the target from the"),
        ({}, ["ramp"], "ramp=25 would have no effect: a gain is the target from the"),
        (
            {"ratio": 2.0, "ramp": 0},
            ["ratio_start"],
            "ratio_start=1.0 would have no effect: there is no ramp.",
        ),
        (
            {"ratio": 2.0, "growth": "walk"},
            ["ramp"],
            "ramp=25 would have no effect: growth=walk goes from 1 to the ratio over the whole "
            "run. Omit it.",
        ),
        ({"gain": 0.8, "growth": "walk"}, ["growth"], "growth=walk would have no effect: a gain"),
        ({}, ["decay"], "decay=0.2 would have no effect: only wsd has it. Omit it, or give sch"),
        ({}, ["dropout_seed"], "dropout_seed=0 would have no effect: there is no dropout."),
        ({"data": "x"}, ["tokenizer"], "tokenizer=bpe:1024 would have no effect: prepared data"),
    ],
)
def test_a_setting_without_effect_is_refused(changes, given, sentence):
    config = preset("tiny").with_(**changes)
    with pytest.raises(LabError) as refused:
        check_used(config, given)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("target", [{"ratio": 1.5}, {"init_gain": None}])
def test_a_ramp_that_would_end_after_the_run_is_refused(target):
    """The run would be one of another target, under the name of this one."""
    config = preset("tiny").with_(warmup=2, **target)
    check_used(config.with_(steps=25))
    with pytest.raises(LabError) as refused:
        check_used(config.with_(steps=24))
    assert str(refused.value) == (
        "ramp=25 is longer than steps=24: the ratio would never reach its target. Use a shorter "
        "ramp, 1 for example, or 0 for none."
    )


@pytest.mark.parametrize(
    "free",
    [{"gain": 0.8}, {"ratio": 2.0, "growth": "walk"}, {"optimizer": "AdamW"}, {"ramp": 0}],
)
def test_a_ramp_that_is_not_used_may_have_any_length(free):
    check_used(preset("tiny").with_(steps=9, warmup=2, **free))


def test_settings_with_an_effect_are_accepted():
    tiny = preset("tiny")
    given = ["ratio", "rate", "ramp", "betas", "lr", "layers", "tokenizer"]
    check_used(tiny.with_(ratio=2.0), given)
    check_used(tiny.with_(ratio=2.0, growth="walk"), ["ratio", "growth"])
    check_used(tiny.with_(optimizer="AdamW"), ["weight_decay", "betas"])
    check_used(tiny.with_(optimizer="SGD", ratio=2.0), ["ratio", "rate", "scope"])
    check_used(tiny.with_(schedule="wsd", dropout=0.1), ["decay", "dropout_seed"])
    if "Muon" in USES:  # AdamW beside it decays
        check_used(tiny.with_(optimizer="Muon", ratio=2.0), ["weight_decay", "betas"])


@pytest.mark.parametrize("name", ["QK-Clip", "muown", "weight-norm"])
def test_a_method_that_the_laboratory_cannot_train_is_not_called_unknown(name):
    with pytest.raises(LabError, match=f"{name} is a method of the library that needs more than"):
        known_name(name)


def test_a_run_and_its_schedules_are_refused_before_anything_is_written(config, tmp_path, capsys):
    with pytest.raises(LabError, match="AdamW takes no norm_layers"):
        train(config.with_(norm_layers=True), tmp_path / "run")
    out = str(tmp_path / "run")
    assert main(["train", "--optimizer", "SGD", "--betas", "0.9", "0.99", "--out", out]) == 1
    assert "SGD takes no betas" in capsys.readouterr().err
    assert main(["schedule", "--weight-decay=0.5", "--out", str(tmp_path / "a.png")]) == 1
    assert "weight_decay=0.5 would have no effect" in capsys.readouterr().err
    assert main(["schedule", "--no-norm-layers", "--out", str(tmp_path / "a.png")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("flags", [["--preset", "tiny"], ["--out=elsewhere"]])
def test_flags_that_a_resume_would_ignore_are_refused(flags, config, tmp_path, capsys):
    config.save(tmp_path / "config.json")
    assert main(["train", "--resume", str(tmp_path), *flags]) == 1
    name = flags[0].partition("=")[0]
    assert f"{name} would have no effect with --resume: a run is continued in its own folder" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("flag", ["--scale=small", "--limit-minutes=0", "--list", "--out=x"])
def test_flags_that_a_replay_would_ignore_are_refused(flag, tmp_path, capsys):
    assert main(["study", "--replay", str(tmp_path), flag]) == 1
    said = capsys.readouterr().err
    assert f"so that {flag.partition('=')[0]} would have no effect. With --replay, only" in said
