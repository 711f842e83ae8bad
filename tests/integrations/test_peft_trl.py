"""PEFT's adapters and TRL's SFTTrainer with AdamWN, on a small model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from small import total_norm

pytest.importorskip("transformers")

from small_llama import (
    arguments,
    assert_same,
    batches,
    make_model,
    tokenizer_of_words,
    trainer,
)
from transformers import Trainer

from normcontrol import AdamWN
from normcontrol.integrations.huggingface import adamwn, log_norms
from normcontrol.watch.trackers import values

ROOT = Path(__file__).parents[2]


def lora(model=None):
    """A model with LoRA adapters on two of its matrices."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        model or make_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )


def test_adapters_that_start_at_zero_are_not_controlled(tmp_path):
    model = lora()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = total_norm(p for name, p in named.items() if "lora_A" in name)
    made = trainer(tmp_path, model, {"rate": 1.0})
    with pytest.warns(
        UserWarning,
        match=r"self_attn.q_proj.lora_B.default.weight and 1 more are not controlled: adapters start them at zero",
    ):
        made.train()
    assert total_norm(p for name, p in named.items() if "lora_A" in name) == pytest.approx(before)
    assert all(p.any() for name, p in named.items() if "lora_B" in name)

    again = trainer(tmp_path, lora(), {"rate": 1.0})  # B is not zero in its checkpoint
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(again.model, made.model)


def test_tensors_of_zeros_without_names_are_refused_with_advice(tmp_path):
    model, args = lora(), arguments(tmp_path)
    made = Trainer(model, args, train_dataset=batches(), optimizer_cls_and_kwargs=adamwn(args))
    with pytest.raises(
        ValueError,
        match=r"2 of the 4 tensors to be controlled are zero at the start.*adamwn\(args, model\)",
    ):
        made.train()


def test_adapters_of_other_kinds_that_start_at_zero_are_refused_with_advice(tmp_path):
    """LoRA's are recognised by name. The factor of another kind would be held near zero."""
    peft = pytest.importorskip("peft")
    config = peft.AdaLoraConfig(init_r=4, target_r=2, total_step=8, target_modules=["q_proj"])
    model = peft.get_peft_model(make_model(), config)
    with pytest.raises(
        ValueError,
        match=r"1 of the 2 tensors .* zero at the start \(the first, .*lora_E.default, has the shape "
        r"\(4, 1\)\).* only LoRA's are recognised. Leave others alone",
    ):
        trainer(tmp_path, model).create_optimizer()
    settings = {"controlled": lambda name, p: "lora_E" not in name}  # as the error says
    opt = trainer(tmp_path, model, settings).create_optimizer()
    assert opt.report().startswith("AdamWN: 1 of 3 tensors controlled")


def adapter_steps(**settings) -> tuple[AdamWN, dict[str, torch.Tensor]]:
    """Train a model with adapters in a loop of its own. Returns the optimizer, and B by name."""
    model = lora()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    opt = AdamWN(named.items(), lr=1e-3, rate=0.5, **settings)
    rows = torch.stack([b["input_ids"] for b in batches(8)])
    for _ in range(8):
        opt.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        opt.step()
    return opt, {name: p for name, p in named.items() if "lora_B" in name}


def test_a_tensor_of_zeros_is_controlled_as_the_page_says():
    opt, factors = adapter_steps(ratio=1.0)
    for name, p in factors.items():
        assert p.any()
        assert next(line for line in opt.report().splitlines() if name in line).split()[-1] == "-"
    with pytest.raises(
        ValueError, match=r"lora_B.default.weight has an initial norm of zero.*absolute"
    ):
        adapter_steps(ratio=1.0, scope="tensor")
    _, pulled = adapter_steps(gain=0.8, scope="tensor")
    _, bounded = adapter_steps(gain=0.8, scope="tensor", law="upper")
    for name, p in pulled.items():
        assert total_norm([p]) == pytest.approx(0.8 * 4, rel=0.05)
        assert 0 < total_norm([bounded[name]]) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("make", ["make_model", "lora"])
def test_supervised_fine_tuning_with_trl(make, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"input_ids": [b["input_ids"].tolist() for b in batches()]})

    def start():
        model = globals()[make]()
        args = trl.SFTConfig(
            **{
                **arguments(tmp_path).to_dict(),
                "output_dir": str(tmp_path),
                "max_length": 8,
                "bf16": False,
            }
        )
        with_control = {"optimizer_cls_and_kwargs": adamwn(args, model, rate=1.0)}
        made = trl.SFTTrainer(
            model, args, train_dataset=data, processing_class=tokenizer_of_words(), **with_control
        )
        log_norms(made)
        return made

    whole = start()
    controlled = [
        p
        for group in whole.create_optimizer().param_groups
        if group["control"]["controlled"]
        for p in group["params"]
    ]
    before = total_norm(controlled)
    whole.train()
    assert total_norm(controlled) == pytest.approx(before)
    assert [e["norm/global"] for e in whole.state.log_history if "loss" in e] == pytest.approx(
        [before] * 4
    )
    again = start()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(again.model, whole.model)


def test_the_example_of_the_page_with_a_small_model(tmp_path, monkeypatch):
    """The page downloads a model and a data set. Here small ones take their place."""
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    make_model().save_pretrained(tmp_path / "model")
    tokenizer_of_words().save_pretrained(tmp_path / "model")
    rows = datasets.Dataset.from_dict({"input_ids": [b["input_ids"].tolist() for b in batches(16)]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(
        r"^```py\n(.*?)^```$", (ROOT / "docs/huggingface.md").read_text(), re.M | re.S
    )
    namespace: dict = {}
    replaced = {
        "Qwen/Qwen3-0.6B": str(tmp_path / "model"),
        "logging_steps=10": "logging_steps=2, use_cpu=True, bf16=False, report_to='none'",
    }
    for on_the_page, in_the_test in replaced.items():
        code = code.replace(on_the_page, in_the_test)
    exec(code, namespace)
    assert namespace["trainer"].state.global_step == 6
    assert values(namespace["trainer"].optimizer)["norm/global/ratio"] == pytest.approx(1, abs=0.01)
