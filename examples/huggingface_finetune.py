"""Hugging Face Trainer: train a small model from a config, then fine-tune it at a constant norm.

    python examples/huggingface_finetune.py
    python examples/huggingface_finetune.py --resume   # fine-tunes again, from its checkpoint

The model is trained on source code of Python's standard library, and its norm grows to twice the
initial norm, as in the paper. It is saved, loaded, and fine-tuned on other files of the library.
The reference is now the norm of the loaded weights, and the default of ``adamwn`` keeps it. AdamW
fine-tunes the same model, to show how its norm changes. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from normcontrol import NormTrace, linear
from normcontrol.integrations.huggingface import adamwn, log_norms

CONTEXT = 64


def texts(pattern: str, rows: int) -> list[dict[str, Any]]:
    """Rows of ASCII codes from the files of the standard library that match the pattern."""
    text = b"".join(
        path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob(pattern))
    )
    codes = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        .long()
        .clamp(max=127)[: rows * CONTEXT]
        .view(-1, CONTEXT)
    )
    return [{"input_ids": row, "labels": row} for row in codes]


def arguments(out: Path, steps: int, lr: float) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        learning_rate=lr,
        # The tensors that Trainer would decay are controlled. The value is not used.
        weight_decay=0.1,
        per_device_train_batch_size=16,
        logging_steps=max(1, steps // 5),
        save_steps=steps // 2,
        # With "tensorboard" or "wandb" the norms are logged there, together with the loss.
        report_to="none",
        seed=0,
    )


def pretrain(out: Path, steps: int) -> None:
    """Train a new model with the paper's ramp of the norm, and save it."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=CONTEXT))
    args = arguments(out, steps, lr=3e-3)
    ratio = linear(1, 2, steps=0.2 * steps)
    trainer = Trainer(
        model,
        args,
        train_dataset=texts("a*.py", 2000),
        optimizer_cls_and_kwargs=adamwn(args, model, ratio=ratio, rate=0.05),
    )
    log_norms(trainer)
    trainer.train()
    model.save_pretrained(out / "trained")


def finetune(out: Path, trained: Path, steps: int, resume: bool) -> Trainer:
    """Fine-tune with AdamWN at the norm of the loaded weights."""
    model = LlamaForCausalLM.from_pretrained(trained)
    args = arguments(out, steps, lr=1e-3)
    trainer = Trainer(
        model,
        args,
        train_dataset=texts("t*.py", 2000),
        optimizer_cls_and_kwargs=adamwn(args, model, rate=0.05),
    )
    log_norms(trainer)
    trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{steps // 2}") if resume else None)
    return trainer


def finetune_with_adamw(out: Path, trained: Path, steps: int) -> NormTrace:
    """Fine-tune with AdamW and record the norm."""
    args = arguments(out, steps, lr=1e-3)
    trainer = Trainer(
        LlamaForCausalLM.from_pretrained(trained), args, train_dataset=texts("t*.py", 2000)
    )
    norms = NormTrace(trainer.create_optimizer())
    trainer.train()
    return norms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/huggingface"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="fine-tune again, from the checkpoint after half of the steps",
    )
    args = parser.parse_args()
    if not args.resume:
        pretrain(args.out / "first", args.steps)
    trained = args.out / "first" / "trained"
    tuned = finetune(args.out / "tuned", trained, args.steps // 2, args.resume)
    last = [entry for entry in tuned.state.log_history if "norm/global" in entry][-1]
    print(
        f"AdamWN: loss {last['loss']:.4f}, norm {last['norm/global']:.6f}, target "
        f"{last['norm/global/target']:.6f}"
    )
    if not args.resume:
        norms = finetune_with_adamw(args.out / "adamw", trained, args.steps // 2).norms
        print(f"AdamW: the norm went from {norms[0]:.4f} to {norms[-1]:.4f}")


if __name__ == "__main__":
    main()
