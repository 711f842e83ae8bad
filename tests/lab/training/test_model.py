"""Tests that the model is nanoGPT's GPT-2: its shape, its initialisation and its initial norms."""

import math

import pytest
import torch

from normcontrol.lab.training.config import PRESETS, Model
from normcontrol.lab.training.loop import weight_norm
from normcontrol.lab.training.model import GPT


@pytest.fixture(scope="module")
def gpt2() -> GPT:
    model = GPT(PRESETS["gpt2"].model, vocab=50304)
    model.initialise(seed=0)
    return model


def test_gpt2_has_50_controlled_tensors_of_124_354_560_weights(gpt2):
    assert len(gpt2.matrices()) == 50
    assert sum(p.numel() for p in gpt2.matrices()) == 124_354_560


def test_the_initial_norm_of_gpt2_is_about_190(gpt2):
    assert weight_norm(gpt2) == pytest.approx(190.2, abs=0.1)


def test_the_squares_of_the_initial_norm_are_shared_as_in_nanogpt(gpt2):
    total = weight_norm(gpt2) ** 2
    share = {
        name: sum(
            float(p.detach().square().sum(dtype=torch.float64))
            for n, p in gpt2.named_parameters()
            if name in n
        )
        / total
        for name in ("wte", "c_fc", "c_attn", "c_proj", "wpe")
    }
    assert share == pytest.approx(
        {"wte": 0.43, "c_fc": 0.31, "c_attn": 0.23, "c_proj": 0.016, "wpe": 0.009}, abs=0.006
    )


def test_layer_norms_start_at_one_and_their_scales_alone_have_norm_138_6(gpt2):
    scales = torch.cat([p.detach() for p in gpt2.parameters() if p.dim() == 1])
    assert len([p for p in gpt2.parameters() if p.dim() == 1]) == 25
    assert float(scales.norm()) == pytest.approx(138.6, abs=0.1)


@pytest.mark.parametrize(
    ("name", "millions"), [("medium", 353.8), ("large", 772.7), ("xl", 1555.9), ("small", 44.9)]
)
def test_presets_have_the_sizes_of_their_names(name, millions):
    with torch.device("meta"):
        model = GPT(PRESETS[name].model, vocab=50304)
    assert sum(p.numel() for p in model.matrices()) / 1e6 == pytest.approx(millions, rel=0.005)


def test_the_loss_of_an_untrained_model_is_that_of_the_uniform_distribution():
    model = GPT(Model(layers=2, heads=2, width=64, context=32), vocab=128)
    model.initialise(seed=0)
    tokens = torch.randint(0, 128, (4, 33), generator=torch.Generator().manual_seed(0))
    assert float(model(tokens[:, :-1], tokens[:, 1:]).detach()) == pytest.approx(
        math.log(128), abs=0.1
    )


def test_no_position_depends_on_later_tokens():
    model = GPT(Model(layers=2, heads=2, width=64, context=32), vocab=128).eval()
    model.initialise(seed=0)
    tokens = torch.randint(0, 128, (1, 32))
    prefix = model(tokens[:, :10])
    tokens[0, 10:] = 0
    assert torch.equal(prefix, model(tokens[:, :10]))
    changed = tokens.clone()
    changed[0, 3] = (changed[0, 3] + 1) % 128
    assert not torch.equal(prefix, model(changed[:, :10]))


def test_the_seed_determines_the_weights():
    models = [GPT(Model(layers=1, heads=1, width=8, context=8), vocab=64) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        model.initialise(seed)
    assert torch.equal(models[0].wte.weight, models[1].wte.weight)
    assert not torch.equal(models[0].wte.weight, models[2].wte.weight)


@pytest.mark.parametrize("bf16_stream", [False, True])
def test_blocks_are_added_up_in_bf16_if_the_model_is_asked_to_and_computes_in_bf16(bf16_stream):
    config = Model(layers=2, heads=2, width=64, context=32, bf16_stream=bf16_stream)
    model = GPT(config, vocab=128)
    model.initialise(seed=0)
    streams: list[torch.dtype] = []
    model.ln_f.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0].dtype))
    tokens = torch.randint(0, 128, (2, 33))
    exact = model(tokens[:, :-1], tokens[:, 1:])
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    assert streams == [torch.float32, torch.bfloat16 if bf16_stream else torch.float32]
    assert loss.item() == pytest.approx(exact.item(), abs=0.02)
