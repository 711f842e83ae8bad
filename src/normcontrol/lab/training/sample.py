"""Generates text with the model of a run, at its newest checkpoint.

It reads a run folder and may not know about training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from normcontrol.lab import seeds
from normcontrol.lab.data import tokenizer
from normcontrol.lab.data.batches import padded
from normcontrol.lab.data.corpus import check_unicode
from normcontrol.lab.data.tokenizer import Tokenizer
from normcontrol.lab.errors import LabError
from normcontrol.lab.files import read_json
from normcontrol.lab.ranges import (
    Count,
    CountOrNone,
    NotNegative,
    Seed,
    check_fields,
    check_value,
)
from normcontrol.lab.training import checkpoint
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.device import choose
from normcontrol.lab.training.model import GPT
from normcontrol.lab.training.run_folder import CHECKPOINTS, CONFIG, ENVIRONMENT


def load(run: Path, device: str = "auto") -> tuple[GPT, Tokenizer]:
    """The model and tokenizer of a run, at its newest checkpoint."""
    config = Config.load(run / CONFIG)
    check_fields(config.model)
    newest = checkpoint.latest(run / CHECKPOINTS)
    if newest is None:
        raise LabError(
            f"{run} has no checkpoint. A run writes one every --checkpoint-every steps and at its "
            "end, or none if that is 0: continue it, or train it again with another value."
        )
    about = read_json(run / ENVIRONMENT, "data")["data"]
    model = GPT(config.model, padded(about["vocab"]))
    model.load_state_dict(checkpoint.load(newest)["model"])
    words = tokenizer.stored(about["tokenizer"], run, about.get("tokenizer_sha256"))
    return model.to(choose(device)).eval(), words


@torch.no_grad()
def generate(
    model: GPT,
    words: Tokenizer,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[str]:
    """Continue a prompt, and yield the text piece by piece. A piece contains whole characters."""
    for name, value, kind in (
        ("tokens", tokens, Count),
        ("temperature", temperature, NotNegative),
        ("top_k", top_k, CountOrNone),
        ("seed", seed, Seed),
    ):
        check_value(name, value, kind)
    check_unicode(prompt, "The prompt")
    device = model.wte.weight.device
    random = seeds.for_torch(seed)
    ids = [words.end, *words.encode(prompt).tolist()]
    shown = len(words.decode(ids))
    for _ in range(tokens):
        window = torch.tensor([ids[-model.config.context :]], device=device)
        logits = model(window)[0, : words.size].float().cpu()
        if temperature == 0:
            chosen = int(logits.argmax())
        else:
            if 0 < top_k < words.size:
                logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
            # In double precision, and below 0: no temperature is so small that this overflows.
            below = logits.double() - logits.max()
            chances = torch.softmax(below / temperature, dim=0)
            chosen = int(torch.multinomial(chances, 1, generator=random))
        if chosen == words.end:
            return
        ids.append(chosen)
        text = words.decode(ids)
        # A replacement character at the end means that the next token completes the character.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[shown:]
            shown = len(text)
