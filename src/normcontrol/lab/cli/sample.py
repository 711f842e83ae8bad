"""``normcontrol sample``: print text from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from normcontrol.lab.cli.flags import parse
from normcontrol.lab.ranges import Count, CountOrNone, NotNegative, Seed


@dataclass(frozen=True)
class Sample:
    """Print text from a run's newest checkpoint."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    prompt: str = ""
    """What the text begins with."""
    tokens: Count = 200
    """Length of the text, at most."""
    temperature: NotNegative = 0.8
    """0 for the likeliest token at every step; higher for more variety."""
    top_k: CountOrNone = 100
    """The number of most likely tokens to choose from; 0 for all."""
    seed: Seed = 0
    """Seed of the choices."""
    device: str = "auto"
    """Where to compute."""


def run(args: Sequence[str]) -> int:
    flags = parse("sample", Sample, args)
    from normcontrol.lab.training.sample import generate, load

    model, words = load(flags.run, flags.device)
    print(flags.prompt, end="", flush=True)
    for piece in generate(
        model, words, flags.prompt, flags.tokens, flags.temperature, flags.top_k, flags.seed
    ):
        print(piece, end="", flush=True)
    print()
    return 0
