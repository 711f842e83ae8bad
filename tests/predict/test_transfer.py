"""Tests of recipes for another size of a run: identities, the quantities that stay equal, the
sources, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normcontrol import AdamWN, recipes

BASE = recipes.Size(width=256, batch=65_536, tokens=52_428_800)
SIZES = [
    recipes.Size(width=1024, batch=65_536, tokens=52_428_800),
    recipes.Size(width=256, batch=16_384, tokens=52_428_800),
    recipes.Size(width=256, batch=65_536, tokens=1e9),
    recipes.Size(width=768, batch=491_520, tokens=2.5e9),
]
SETTINGS = [
    {"lr": 2e-3, "weight_decay": 0.3},
    {"lr": 2e-3, "gain": 0.8},
    {"lr": 2e-3, "weight_decay": 0.3, "hidden_lr": 5e-4, "hidden_weight_decay": 1.2},
    {"lr": 2e-3, "gain": 0.8, "hidden_lr": 5e-4},
]


def factors(size):
    return size.width / BASE.width, size.batch / BASE.batch, size.steps / BASE.steps


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_recipe_for_the_same_size_is_the_same(settings):
    same = recipes.transfer(BASE, BASE, **settings)
    assert same.settings == settings
    assert not [reason for reason in same.why if not reason.startswith("gain is kept")]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("size", SIZES)
def test_there_and_back_again_gives_the_same_settings(size, settings):
    there = recipes.transfer(BASE, size, **settings)
    back = recipes.transfer(size, BASE, **there.settings)
    assert back.settings == pytest.approx(settings)
    assert back.method == there.method


@pytest.mark.parametrize("size", SIZES)
def test_a_step_between_two_sizes_does_not_matter(size):
    middle = recipes.transfer(BASE, SIZES[-1], **SETTINGS[2])
    direct = recipes.transfer(BASE, size, **SETTINGS[2])
    assert recipes.transfer(SIZES[-1], size, **middle.settings).settings == pytest.approx(
        direct.settings
    )


@pytest.mark.parametrize("size", SIZES)
def test_decay_times_learning_rate_times_steps_is_kept(size):
    found = recipes.transfer(BASE, size, **SETTINGS[2])
    for prefix in ("", "hidden_"):
        before, after = (
            x[f"{prefix}lr"] * x[f"{prefix}weight_decay"] * s.steps
            for x, s in ((SETTINGS[2], BASE), (found.settings, size))
        )
        assert after == pytest.approx(before)
    assert found.equates.startswith(f"lr * weight_decay * steps, {2e-3 * 0.3 * 800:.4g}")


@pytest.mark.parametrize("size", SIZES)
def test_learning_rates_follow_the_batch_and_in_mup_the_width(size):
    width, batch, _ = factors(size)
    plain = recipes.transfer(BASE, size, lr=2e-3, weight_decay=0.3).settings
    assert plain["lr"] == pytest.approx(2e-3 * math.sqrt(batch))
    assert "hidden_lr" not in plain
    mup = recipes.transfer(BASE, size, lr=2e-3, weight_decay=0.3, hidden_lr=2e-3).settings
    assert mup["lr"] == plain["lr"]
    assert mup["hidden_lr"] == pytest.approx(plain["lr"] / width)
    # The decay of the hidden matrices was not given, so that it was that of all weights.
    assert mup["hidden_weight_decay"] == pytest.approx(plain["weight_decay"] * width)


def test_the_gain_is_kept_and_its_settings_are_those_of_adamwn():
    recipe = recipes.transfer(BASE, SIZES[-1], lr=2e-3, gain=0.8)
    assert (recipe.method, recipe.settings["gain"]) == ("AdamWN", 0.8)
    AdamWN([nn.Parameter(torch.ones(4, 4))], **recipe.settings)


@pytest.mark.parametrize(
    ("settings", "size", "sources"),
    [
        (SETTINGS[0], SIZES[0], ["2203.03466"]),
        (SETTINGS[2], SIZES[0], ["2203.03466", "2405.13698"]),
        (SETTINGS[0], SIZES[1], ["2205.10287", "2405.13698"]),
        (SETTINGS[0], SIZES[2], ["2603.28743", "2405.13698"]),
        (SETTINGS[1], SIZES[2], ["2603.28743", "docs/transfer.md"]),
    ],
)
def test_every_rule_has_a_source_and_says_that_it_is_not_shown(settings, size, sources):
    recipe = recipes.transfer(BASE, size, **settings)
    assert len(recipe.why) == len(sources)
    for reason, source in zip(recipe.why, sources, strict=True):
        assert source in reason
        assert "not shown" in reason.lower()
        assert f"why: {reason}" in str(recipe)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: recipes.transfer(BASE, BASE, lr=1e-3),
            r"weight_decay=None and gain=None: give exactly one of them",
        ),
        (
            lambda: recipes.transfer(BASE, BASE, lr=1e-3, weight_decay=0.1, gain=0.8),
            r"weight_decay=0.1 and gain=0.8: give exactly one of them",
        ),
        (
            lambda: recipes.transfer(BASE, BASE, lr=0.0, gain=0.8),
            r"lr=0.0: it must be finite and above 0",
        ),
        (
            lambda: recipes.transfer(BASE, BASE, lr=1e-3, gain=math.nan),
            r"gain=nan: it must be finite and above 0",
        ),
        (
            lambda: recipes.transfer(BASE, BASE, lr=1e-3, gain=0.8, hidden_lr=-1.0),
            r"hidden_lr=-1.0: it must be finite and above 0",
        ),
        (
            lambda: recipes.transfer(
                BASE, BASE, lr=1e-3, weight_decay=0.1, hidden_weight_decay=0.2
            ),
            r"hidden_weight_decay=0.2 is for AdamW with a learning rate of its own",
        ),
        (
            lambda: recipes.transfer(
                BASE, recipes.Size(256, 65_536, 655_360), lr=1e-2, weight_decay=3.0
            ),
            r"lr \* weight_decay would be 2.4 in a run of 10 steps: more than all of the weights",
        ),
        (lambda: recipes.Size(0, 64, 128), r"width=0: it must be finite and above 0"),
        (lambda: recipes.Size(8, 64, math.inf), r"tokens=inf: it must be finite and above 0"),
        (lambda: recipes.Size("8", 64, 128), r"width='8': it must be finite and above 0"),
        (
            lambda: recipes.transfer(BASE, BASE, lr="1e-3", gain=0.8),
            r"lr='1e-3': it must be finite and above 0",
        ),
        (
            lambda: recipes.Size(8, 64, 32),
            r"tokens=32 is less than batch=64: the run would be shorter than one step",
        ),
    ],
)
def test_what_cannot_be_transferred_is_refused_with_the_reason(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
