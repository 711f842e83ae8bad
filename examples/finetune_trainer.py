"""Fine-tune a GPT-2 with Hugging Face's Trainer, stop in the middle, resume, and compare.

    python examples/finetune_trainer.py               # tiny: under a minute on a CPU
    python examples/finetune_trainer.py --size gpt2   # 86M weights, in bf16 on a GPU

A model with GPT-2's layers is trained for a short time on source code of Python's standard library,
with one token for each byte. Then it is fine-tuned on Python's manual, once with AdamWN at the norm
that it has and once with AdamW. Each of the two runs is made a second time: it is stopped after
half of the steps, and a new Trainer resumes it from its checkpoint. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from normcontrol.integrations.huggingface import adamwn

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 64, "layers": 2, "heads": 2, "context": 64, "batch": 16, "lr": 3e-3},
    "gpt2": {"width": 768, "layers": 12, "heads": 12, "context": 512, "batch": 16, "lr": 3e-4},
}
"""How large the model and its batches are, and the learning rate of the first training."""


def code() -> bytes:
    """Source code of Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"".join(path.read_bytes() for path in files)


def manual() -> bytes:
    """The pages of Python's manual that `help()` shows."""
    return "\n".join(topics.values()).encode()


def rows(text: bytes, context: int) -> list[dict[str, torch.Tensor]]:
    """The text as rows of bytes, 4,000 at most."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    count = min(len(tokens) // context, 4000)
    return [{"input_ids": row, "labels": row} for row in tokens[: count * context].view(count, -1)]


def norm(model: torch.nn.Module) -> float:
    """The norm of all matrices and embeddings, which are what Trainer would decay."""
    squares = [p.detach().double().square().sum() for p in model.parameters() if p.dim() >= 2]
    return float(torch.stack(squares).sum().sqrt())


class StopAfter(TrainerCallback):
    """Stops a run, as if its time were up. The checkpoint of that step is written before."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = (
            control.should_training_stop or state.global_step >= self.steps
        )


def trainer(model: GPT2LMHeadModel, out: Path, data: list[Any], **chosen: Any) -> Trainer:
    """A Trainer with AdamWN if there is a `rate`, else with Trainer's own AdamW. The last rows of
    the data are for evaluation."""
    rate = chosen.pop("rate", None)
    args = TrainingArguments(
        str(out),
        save_steps=chosen["max_steps"] // 2,
        save_total_limit=1,
        weight_decay=0.1,  # for AdamWN it marks what is controlled
        bf16=torch.cuda.is_available(),
        full_determinism=torch.cuda.is_available(),  # so that two runs can be compared bit for bit
        dataloader_pin_memory=torch.cuda.is_available(),
        per_device_eval_batch_size=32,
        logging_strategy="no",
        disable_tqdm=True,
        report_to="none",
        seed=0,
        **chosen,
    )
    optimizer = {"optimizer_cls_and_kwargs": adamwn(args, model, rate=rate)} if rate else {}
    made = Trainer(model, args, train_dataset=data[:-256], eval_dataset=data[-256:], **optimizer)
    made.remove_callback(PrinterCallback)
    return made


def compare(size: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train, fine-tune, and return losses, norms and times."""
    chosen = SIZES[size]
    training = {"max_steps": steps, "per_device_train_batch_size": chosen["batch"]}
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=chosen["context"],
        n_embd=chosen["width"],
        n_layer=chosen["layers"],
        n_head=chosen["heads"],
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    source, text = (rows(text, chosen["context"]) for text in (code(), manual()))
    first = trainer(model, folder / "first", source, **training, learning_rate=chosen["lr"])
    first.train()
    model.save_pretrained(folder / "pretrained")

    def finetune(out: str, rate: float | None, stop: int = 0, resume: bool = False) -> Trainer:
        start = GPT2LMHeadModel.from_pretrained(folder / "pretrained")
        lr = chosen["lr"] / 3
        made = trainer(start, folder / out, text, **training, learning_rate=lr, rate=rate)
        if stop:
            made.add_callback(StopAfter(stop))
        made.train(resume_from_checkpoint=resume)
        return made

    found: dict[str, Any] = {
        "size": size,
        "weights": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "before": {"loss": first.evaluate(text[-256:])["eval_loss"], "norm": norm(model)},
    }
    for name, rate in (("AdamWN", 0.1), ("AdamW", None)):
        began = time.monotonic()
        whole = finetune(name, rate)
        seconds = time.monotonic() - began
        finetune(f"{name}-stopped", rate, stop=steps // 2)
        resumed = finetune(f"{name}-stopped", rate, resume=True)
        pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
        found[name] = {
            "loss": whole.evaluate()["eval_loss"],
            "norm": norm(whole.model),
            "resumed loss": resumed.evaluate()["eval_loss"],
            "resumed norm": norm(resumed.model),
            "largest difference": max((p - q).abs().max().item() for p, q in pairs),
            "seconds": seconds,
        }
    return found


def table(found: dict[str, Any]) -> str:
    before = found["before"]
    lines = [
        f"GPT-2 of {found['weights']:,} weights on {found['device']}, {found['steps']} steps of "
        "fine-tuning",
        f"{'':14}{'loss':>10}{'norm':>10}{'resumed: loss':>16}{'norm':>10}{'weights':>12}",
        f"{'before':14}{before['loss']:>10.4f}{before['norm']:>10.3f}",
    ]
    for name in ("AdamWN", "AdamW"):
        r = found[name]
        lines.append(
            f"{name:14}{r['loss']:>10.4f}{r['norm']:>10.3f}{r['resumed loss']:>16.4f}"
            f"{r['resumed norm']:>10.3f}{r['largest difference']:>12.1e}"
        )
    lines.append("weights: the largest difference to the run that was not stopped")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=60, help="of each training")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(args.size, args.steps, Path(folder))
    found["seconds"] = time.monotonic() - began
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
