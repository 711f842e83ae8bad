"""Measures `normcontrol prepare` with GPT-2's BPE: its speed compared with tiktoken's
encode_ordinary_batch on the same text and cores, and its memory.

It prints the ratio of the speeds, and the peak memory for a corpus and for one five times as large.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tiktoken

from normcontrol.lab.data import corpus
from normcontrol.lab.data.prepare import prepare


def write_corpus(folder: Path, megabytes: int) -> Path:
    """Write the standard library repeatedly, up to this size, in files of ten megabytes."""
    texts = [piece.text for piece, _ in corpus.embedded().pieces()]
    folder.mkdir()
    size, number, file = 0, 0, None
    while size < megabytes * 1_000_000:
        for text in texts:
            if file is None or file.tell() > 10_000_000:
                file = (folder / f"{number:04d}.txt").open("w")
                number += 1
            file.write(text)
            size += len(text)
            if size >= megabytes * 1_000_000:
                break
    file.close()
    return folder


def peak_memory(folder: Path, out: Path) -> float:
    """The peak memory, in megabytes, of a separate process that prepares the corpus."""
    code = f"""
import resource
from pathlib import Path
from normcontrol.lab.data import corpus
from normcontrol.lab.data.prepare import prepare
prepare(corpus.source({str(folder)!r}), Path({str(out)!r}), "gpt2", val_fraction=0.02)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
    return float(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=40)
    size = parser.parse_args().megabytes
    cores = len(os.sched_getaffinity(0))
    bpe = tiktoken.get_encoding("gpt2")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        small = write_corpus(folder / "small", size)
        texts = [piece.text for piece, _ in corpus.source(str(small)).pieces()]
        ratios = []
        for i in range(3):
            start = time.perf_counter()
            bpe.encode_ordinary_batch(texts, num_threads=cores)
            theirs = time.perf_counter() - start
            start = time.perf_counter()
            prepare(corpus.source(str(small)), folder / f"out-{i}", "gpt2", val_fraction=0.02)
            ours = time.perf_counter() - start
            ratios.append(theirs / ours)
            speeds = (
                f"tiktoken {size / theirs:.1f} MB/s, prepare (with reading and writing) "
                f"{size / ours:.1f} MB/s"
            )
            print(f"{size} MB on {cores} cores: {speeds}")
        print(f"speed, prepare / tiktoken: {sorted(ratios)[1]:.2f} (at least 1)")
        large = write_corpus(folder / "large", 5 * size)
        memory = (
            peak_memory(small, folder / "memory-small"),
            peak_memory(large, folder / "memory-large"),
        )
    print(
        f"peak memory: {memory[0]:.0f} MB for {size} MB of text, {memory[1]:.0f} MB for {5 * size} "
        f"MB; growth {memory[1] / memory[0]:.2f}"
    )


if __name__ == "__main__":
    main()
