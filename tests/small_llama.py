"""A small Llama model, its data and a Trainer for it, for the tests with Hugging Face's libraries.

Nothing is downloaded. Import this module after ``pytest.importorskip("transformers")``.
"""

from __future__ import annotations

import os

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from normcontrol.integrations.huggingface import adamwn, log_norms


def make_model(**more) -> LlamaForCausalLM:
    """A Llama with one small layer, with the same weights at every call."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "max_position_embeddings": 16, **more}))


def batches(rows: int = 64) -> list[dict[str, torch.Tensor]]:
    """Rows of random words, the same at every call."""
    words = torch.randint(32, (rows, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in words]


def arguments(out, **more) -> TrainingArguments:
    """Training arguments for eight steps on a CPU, with a checkpoint after four."""
    chosen = {
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_steps": 8,
        "save_steps": 4,
        "logging_steps": 2,
        "per_device_train_batch_size": 4,
        "report_to": "none",
        **more,
    }
    return TrainingArguments(str(out), use_cpu=True, disable_tqdm=True, seed=3, **chosen)


def trainer(out, model=None, settings=None, kind=Trainer, **more) -> Trainer:
    """A Trainer with AdamWN and ``log_norms``."""
    model, args = model or make_model(), arguments(out, **more)
    made = kind(
        model,
        args,
        train_dataset=batches(),
        optimizer_cls_and_kwargs=adamwn(args, model, **(settings or {})),
    )
    log_norms(made)
    return made


def matrices(model) -> list[torch.Tensor]:
    """The weights that are controlled by default."""
    return [p for p in model.parameters() if p.dim() >= 2]


def assert_same(one, two) -> None:
    """Two models have the same bits."""
    for (name, p), (_, q) in zip(one.state_dict().items(), two.state_dict().items(), strict=True):
        assert torch.equal(p, q), name


def tokenizer_of_words():
    """A tokenizer of 32 words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({str(i): i for i in range(32)}, unk_token="0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="0", eos_token="1", unk_token="0"
    )
