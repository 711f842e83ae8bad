"""The manifest of prepared data: reads it, and checks each of its fields against the shards.

It may not know how shards are made or used.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from normcontrol.lab.errors import LabError
from normcontrol.lab.files import largest, read_json, sha256

MANIFEST, SPLITS = "manifest.json", ("train", "val")
FORMAT = 1
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SIZES = {"gpt2": 50257, "bytes": 257}
"""The sizes of the vocabularies that are always the same."""

_SHARD = {"file": str, "tokens": int, "sha256": str, "max": int}


def read(folder: Path) -> dict[str, Any]:
    """The manifest in a folder, all of whose shards are as it says."""
    path = folder / MANIFEST
    manifest = read_json(path, "format", "tokenizer", "vocab", "dtype", "splits")
    try:
        _check_fields(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LabError(
            f"{path} does not describe prepared data ({_text(error)}). Restore it from a copy, or "
            "prepare the data again."
        ) from None
    entries = [entry for split in SPLITS for entry in manifest["splits"][split]["shards"]]
    dtype = DTYPES[manifest["dtype"]]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda entry: _verify(folder, entry, dtype), entries))
    for entry in entries:
        check_ids(folder / entry["file"], entry["max"], manifest["vocab"])
    return manifest


def _check_fields(manifest: dict[str, Any]) -> None:
    """Raise an error if a field is not what it must be, or contradicts another one."""
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {manifest['format']!r}, and this version reads {FORMAT}")
    if manifest["dtype"] not in DTYPES:
        raise ValueError(f"dtype={manifest['dtype']!r}; known are {', '.join(DTYPES)}")
    name = manifest["tokenizer"]
    trained = re.fullmatch(r"bpe:(\d+)", name)
    size = int(trained[1]) if trained else SIZES.get(name)
    if size is None or type(manifest["vocab"]) is not int or manifest["vocab"] != size:
        raise ValueError(f"tokenizer={name!r} with vocab={manifest['vocab']!r}")
    for split in SPLITS:
        about = manifest["splits"][split]
        for entry in about["shards"]:
            for key, kind in _SHARD.items():
                if type(entry[key]) is not kind:
                    raise ValueError(f"{key}={entry[key]!r} of a shard")
            if Path(entry["file"]).name != entry["file"]:
                raise ValueError(f"its shard {entry['file']!r} is not in its folder")
        counted = sum(entry["tokens"] for entry in about["shards"])
        if about["tokens"] != counted:
            raise ValueError(
                f"tokens={about['tokens']!r} of {split}, and its shards have {counted}"
            )


def _text(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _verify(folder: Path, entry: dict[str, Any], dtype: np.dtype[Any]) -> None:
    path = folder / entry["file"]
    if not path.exists():
        raise LabError(
            f"The shard {path} is missing, though {MANIFEST} lists it. Restore it, or prepare the "
            "data again."
        )
    if sha256(path) != entry["sha256"]:
        raise LabError(
            f"The shard {path} was changed after it was written: its checksum differs. Restore it "
            "from a copy, or prepare the data again."
        )
    size, wanted = path.stat().st_size, entry["tokens"] * dtype.itemsize
    if size != wanted:
        raise LabError(
            f"The shard {path} has {size} bytes, and {MANIFEST} says {entry['tokens']} tokens of "
            f"{dtype.name}, which are {wanted}. Restore {MANIFEST} from a copy, or prepare the "
            "data again."
        )
    highest = largest(path, dtype)
    if highest != entry["max"]:
        raise LabError(
            f"The largest token id in {path} is {highest}, and {MANIFEST} says {entry['max']}. "
            f"Restore {MANIFEST} from a copy, or prepare the data again."
        )


def check_ids(path: Path, highest: int, vocab: int) -> None:
    """Refuse tokens that are outside the vocabulary."""
    if highest >= vocab:
        raise LabError(
            f"{path} contains the token id {highest}, outside the vocabulary of {vocab}. It was "
            "made with another tokenizer than stated. Prepare the data again with the right one."
        )
