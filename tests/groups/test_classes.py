"""Tests of classes of tensors: their names, their sizes, tied embeddings, and what is refused."""

from __future__ import annotations

import pytest
import torch
from small import SmallModel
from torch import nn

from normcontrol import predict
from normcontrol.groups.classes import classes_of


def test_classes_are_formed_by_name_without_numbers_shape_and_group():
    model = SmallModel()
    assert [c.name for c in classes_of(model)] == ["embed.weight", "up.weight", "down.weight"]
    unnamed = torch.optim.AdamW(model.parameters())
    assert [c.name for c in classes_of(unnamed)] == ["11x8", "16x8", "8x16"]
    apart = [
        {"params": [(f"h.{i}.up", nn.Parameter(torch.ones(2, 2)))], "weight_decay": 0.1 * (i + 1)}
        for i in range(2)
    ]
    assert [c.name for c in classes_of(torch.optim.AdamW(apart))] == [
        "h.*.up, group 0",
        "h.*.up, group 1",
    ]
    sizes = {c.name: (c.count, c.rms) for c in classes_of(model)}
    assert sizes["up.weight"] == (
        128,
        pytest.approx(model.up.weight.square().mean().sqrt().item(), rel=1e-6),
    )


def test_frozen_tensors_are_in_no_class_of_a_model_nor_of_an_optimizer():
    model = SmallModel()
    model.up.weight.requires_grad_(False)
    for weights in (model, torch.optim.AdamW(model.named_parameters())):
        assert [c.name for c in classes_of(weights)] == ["embed.weight", "down.weight"]


def test_a_tied_embedding_that_the_model_does_not_show_must_be_named():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))
    assert not any(c.tied for c in classes_of(model))
    assert [c.tied for c in classes_of(model, tied=["0.*"])] == [True, False]
    assert [c.hidden for c in classes_of(model)] == [False, True]
    with pytest.raises(
        ValueError,
        match=r"tied='head.\*' matches no regularised tensor. Names are, for example, 0.weight",
    ):
        classes_of(model, tied=["head.*"])
    for read in (classes_of, predict.calibrate):
        with pytest.raises(TypeError, match=r"tied='nope' is one name: give a list .*\['nope'\]"):
            read(model if read is classes_of else {"m": None}, tied="nope")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: predict.adamw(nn.LayerNorm(3), 1e-3, 0.1, steps=5),
            r"Nothing is regularised: no trained tensor has two or more dimensions",
        ),
        (lambda: predict.adamw([], 1e-3, 0.1, steps=5), r"Nothing is regularised"),
        (
            lambda: predict.adamw(nn.Linear(3, 3, device="meta"), 1e-3, 0.1, steps=5),
            r"weight is on the meta device, so it has no norm yet",
        ),
        (
            lambda: predict.adamw([1, 2], 1e-3, 0.1, steps=5),
            r"Give a model, an optimizer, or a list of TensorClass",
        ),
        (lambda: predict.adamw(None, 1e-3, 0.1, steps=5), r"or a list of TensorClass"),
        (lambda: predict.TensorClass("a", 0, 0.1), r"a has count=0: it is the number of weights"),
        (lambda: predict.TensorClass("a", 9, -0.1), r"a has rms=-0.1: it is the root mean square"),
        (
            lambda: predict.classes_of(nn.ParameterList([torch.full((2, 2), torch.nan)])),
            r"has rms=nan: .* or initialise the model first",
        ),
    ],
)
def test_weights_without_classes_are_refused(call, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        call()
