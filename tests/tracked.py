"""Reads what trackers wrote: event files of TensorBoard, and offline runs of Weights & Biases.

Tests use it. It may not know about normcontrol.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All series in a folder of TensorBoard, as TensorBoard reads them."""
    return {
        tag: [(e.step, e.value) for e in _accumulated(folder).Scalars(tag)]
        for tag in _accumulated(folder).Tags()["scalars"]
    }


def charts(folder: Path) -> dict[str, list[str]]:
    """The charts of the custom layout, and the patterns of the series in each."""
    from tensorboard.plugins.custom_scalar import layout_pb2

    (event,) = _accumulated(folder).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    return {
        chart.title: list(chart.multiline.tag)
        for category in layout.category
        for chart in category.chart
    }


def _accumulated(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


@contextlib.contextmanager
def wandb_mode(mode: str) -> Iterator[None]:
    """Set WANDB_MODE, and restart Weights & Biases, which reads it only when the first run of a
    process starts."""
    wandb = pytest.importorskip("wandb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", mode)
        patch.setenv("WANDB_SILENT", "true")
        wandb.teardown()
        yield
        wandb.finish()  # Hugging Face's Trainer does not finish its run
        wandb.teardown()


def history(folder: Path) -> list[dict[str, Any]]:
    """The logged rows of the offline runs in a folder, one for each call of ``log``, read from the
    file that `wandb sync` would send.

    A process of Weights & Biases writes the file. It is complete when that process has ended, which
    on a busy machine is later than the end of the run.
    """
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()
    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in _records(path.read_bytes()):
            parsed = wandb_internal_pb2.Record.FromString(record)
            if parsed.WhichOneof("record_type") == "history":
                rows.append(
                    {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in parsed.history.item
                    }
                )
    return rows


def _records(log: bytes) -> list[bytes]:
    """The records of a log in the format of LevelDB: blocks of 32 KiB. A record may be divided into
    several pieces."""
    records, at, pending = [], 7, b""  # after the header of the file
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:  # too short for a header: the rest of the block is padding
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", log, at)
        pending += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            records.append(pending)
            pending = b""
    return records
