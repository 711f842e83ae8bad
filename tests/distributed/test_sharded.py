"""Training under sharding gives the weights of the single-process run: every layout, scope and
order."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from processes import run
from spread import ORDERS, SCOPES, Model, gathered, optimizer, relative, shard, train, whole
from torch import Tensor


@functools.cache
def on_one_process(scope: Any, order: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The weights and norms to arrive at."""
    model = Model()
    opt = optimizer(model, scope, order)
    train(model, opt)
    return [p.detach() for p in model.parameters()], {
        name: reading.norm for name, reading in opt.norms().items()
    }


def compare(
    layout: str, expected: dict[tuple[Any, str], tuple[list[Tensor], dict[str, Tensor]]]
) -> None:
    for (scope, order), (weights, norms) in expected.items():
        model = Model()
        part, parts = shard(layout, model)
        opt = optimizer(model, scope, order)
        train(model, opt, part, parts)
        for (name, p), q in zip(model.named_parameters(), weights, strict=True):
            assert relative(whole(p), q) < 1e-6, (scope, order, name)
        for name, norm in gathered(opt).items():
            assert relative(norm, norms[name]) < 1e-6, (scope, order, name)


EVERY = list(itertools.product(SCOPES, ORDERS))
ONE, OTHER = (
    list(zip(SCOPES, ORDERS * 3, strict=True)),
    list(zip(SCOPES, ORDERS[::-1] * 3, strict=True)),
)


@pytest.mark.parametrize(
    ("layout", "ranks", "cases"),
    [
        ("fsdp", 2, EVERY),
        pytest.param("fsdp", 4, ONE, marks=pytest.mark.slow),
        ("fsdp with ignored parameters", 2, ONE),
        ("hybrid", 4, OTHER),
        ("tensor parallel", 2, ONE),
        pytest.param("tensor parallel", 4, OTHER, marks=pytest.mark.slow),
        ("fsdp and tensor parallel", 4, ONE),
    ],
)
def test_the_weights_after_training_are_those_of_one_process(layout, ranks, cases):
    run(compare, ranks, layout, {case: on_one_process(*case) for case in cases})


def on_kernels(expected: dict[tuple[Any, str], tuple[list[Tensor], dict[str, Tensor]]]) -> None:
    compare("fsdp", expected)
    model = Model()
    shard("fsdp", model)
    assert optimizer(model, "global", "after").implementation == "Triton kernels"


@pytest.mark.slow
def test_the_kernels_do_the_same_with_shards_under_the_interpreter():
    pytest.importorskip("triton")
    expected = {case: on_one_process(*case) for case in [("global", "after"), ("tensor", "before")]}
    run(on_kernels, 2, expected, TRITON_INTERPRET="1")
