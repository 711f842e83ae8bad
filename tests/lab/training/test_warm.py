"""A model that is kept between runs computes the same numbers, and is compiled once."""

from __future__ import annotations

import pytest
import torch

from normcontrol.lab.training.config import Model
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.model import GPT
from normcontrol.lab.training.warm import Warm


def test_warm_runs_compute_the_same_bits_as_fresh_ones(config, tmp_path):
    warm = Warm()
    for i, changes in enumerate(
        [
            {"optimizer": "AdamWN"},
            {"init_seed": 3, "init_scale": 1.5},
            {"optimizer": "AdamC"},
            {"width": 16},
        ]
    ):
        one = config.with_(**changes, dropout=0.1)
        assert train(one, tmp_path / f"warm-{i}", warm=warm)
        assert train(one, tmp_path / f"fresh-{i}")
        assert (tmp_path / f"warm-{i}/metrics.jsonl").read_bytes() == (
            tmp_path / f"fresh-{i}/metrics.jsonl"
        ).read_bytes()


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that torch compiles."""
    torch.compiler.reset()
    graphs, real = [], torch.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda model, **options: real(model, backend=backend, **options)
    )
    return graphs


def test_models_of_one_shape_are_compiled_once(graphs):
    warm, tokens = Warm(), torch.randint(0, 64, (2, 8))
    for seed in range(3):
        fresh = GPT(Model(layers=1, heads=1, width=8, context=8, init_seed=seed), vocab=64)
        fresh.initialise(seed)
        model = warm.place(fresh, torch.device("cpu"))
        compiled, adam = warm.compiled(model), torch.optim.AdamW(model.parameters())
        for _ in range(2):
            compiled(tokens, tokens).backward()
            adam.step()
            adam.zero_grad()
    assert len(graphs) == 1


def test_a_study_of_many_shapes_is_compiled_to_its_end(graphs):
    """torch by itself compiles eight, and runs the others as they are."""
    warm, tokens = Warm(), torch.randint(0, 64, (2, 8))
    for width in range(1, 11):
        fresh = GPT(Model(layers=1, heads=1, width=8 * width, context=8), vocab=64)
        warm.compiled(warm.place(fresh, torch.device("cpu")))(tokens, tokens)
    assert len(graphs) == 10
