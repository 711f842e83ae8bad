"""``normcontrol sample``: print text from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from normcontrol.lab.cli.flags import parse


@dataclass(frozen=True)
class Sample:
    """Print text from a run's newest checkpoint."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    prompt: str = ""
    """What the text begins with."""
    tokens: int = 200
    """Length of the text, at most."""
    temperature: float = 0.8
    """0 for the likeliest token at every step; higher for more variety."""
    top_k: int = 100
    """Choose among so many of the likeliest tokens; 0 for all."""
    seed: int = 0
    """Seed of the choices."""
    device: str = "auto"
    """Where to compute."""


def run(args: Sequence[str]) -> int:
    asked = parse("sample", Sample, args)
    from normcontrol.lab.training.sample import generate, load

    model, words = load(asked.run, asked.device)
    print(asked.prompt, end="", flush=True)
    for piece in generate(
        model, words, asked.prompt, asked.tokens, asked.temperature, asked.top_k, asked.seed
    ):
        print(piece, end="", flush=True)
    print()
    return 0
