"""``normcontrol prepare``: turn text into shards of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from normcontrol.lab.cli.flags import parse
from normcontrol.lab.ranges import Count, Share


@dataclass(frozen=True)
class Prepare:
    """Turn text into shards of tokens to train on. A stopped preparation continues with the same
    command."""

    source: tyro.conf.Positional[str]
    """A text, jsonl or parquet file, a folder of those, "python" for the standard library,
    "openwebtext", or hf:OWNER/NAME@REVISION for a Hugging Face dataset's parquet files. (nanoGPT's
    train.bin and val.bin need no preparation: give their folder as --data.)"""
    out: Path
    """Folder for the shards and their manifest."""
    tokenizer: str = "gpt2"
    """gpt2, bytes, or bpe:SIZE to train one on the text."""
    val_fraction: Share = 0.01
    """Share of the documents to validate on. nanoGPT's is 0.0005."""
    column: str = "text"
    """Key or column of the text, in jsonl and parquet."""
    shard_tokens: Count = 100_000_000
    """Tokens in a shard."""


def run(args: Sequence[str]) -> int:
    flags = parse("prepare", Prepare, args)
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from normcontrol.lab.data.corpus import source
    from normcontrol.lab.data.manifest import MANIFEST
    from normcontrol.lab.data.prepare import prepare
    from normcontrol.lab.files import read_json
    from normcontrol.lab.text import in_shell

    text = source(flags.source, flags.column)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("reading", total=text.size)

        def show(read: int, total: int, tokens: int) -> None:
            bar.update(task, completed=read, description=f"{tokens / 1e6:,.1f} M tokens")

        prepare(text, flags.out, flags.tokenizer, flags.val_fraction, flags.shard_tokens, show)
    splits = read_json(flags.out / MANIFEST)["splits"]
    print(
        f"{splits['train']['tokens']:,} tokens to train on and {splits['val']['tokens']:,} to "
        f"validate on. Use them with --data {in_shell(flags.out)}"
    )
    return 0
