"""Trackers, which log numbers to JSONL files, TensorBoard or Weights & Biases, with one interface.

A tracker takes a step and a dictionary of numbers. :func:`values` makes such a dictionary from the
norms of an optimizer. TensorBoard draws a value and its target, such as ``norm/global`` and
``norm/global/target``, in one chart. This file may not know what else is logged.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from normcontrol.control import NormControl
from normcontrol.groups.readings import joint_references
from normcontrol.numbers import plain

TARGET = "/target"


class Tracker(Protocol):
    """The interface of all trackers. A tracker for another service needs these two methods."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log numbers of a step. May be called several times for a step, with different names."""

    def close(self) -> None:
        """Write everything that is not written yet."""


class JSONL:
    """Appends to a file, one JSON object per line.

    >>> import tempfile
    >>> tracker = JSONL(Path(tempfile.mkdtemp()) / "metrics.jsonl")
    >>> tracker.log(1, {"loss": 2.5})
    >>> tracker.path.read_text()
    '{"step": 1, "loss": 2.5}\\n'
    >>> tracker.close()
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.file.write(json.dumps({"step": plain(step), **_plain(values)}) + "\n")
        self.file.flush()

    def size(self) -> int:
        """The size of the file in bytes, after all of it has been flushed to the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.tell()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Writes event files, with a page "Custom scalars" that draws every value with its target.

    Args:
        folder: the folder of the event files.
        start: the first step that will be logged. Values of this and later steps, which an
            interrupted run has logged, are hidden.
    """

    def __init__(self, folder: str | Path, start: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ModuleNotFoundError(
                "TensorBoard was requested, but is not installed: pip install tensorboard."
            ) from None
        self.writer = SummaryWriter(str(folder), purge_step=start)
        self._has_layout = False

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if not self._has_layout and (charts := layout(values)):
            self.writer.add_custom_scalars(charts)
            self._has_layout = True
        for name, value in _numbers(values).items():
            self.writer.add_scalar(name, value, plain(step))

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Logs to a Weights & Biases run: the active one, or a new one with the arguments of
    ``wandb.init``.

    A run that was active before stays active when the tracker is closed. ``WANDB_MODE=offline`` or
    ``mode="offline"`` writes to the disk, without an account or a network.
    """

    def __init__(self, project: str | None = None, **init: Any) -> None:
        try:
            import wandb
        except ImportError:
            raise ModuleNotFoundError(
                "Weights & Biases was requested, but is not installed: pip install wandb."
            ) from None
        self._started = wandb.run is None
        try:
            self.run: Any = wandb.init(project=project, **init) if self._started else wandb.run
        except wandb.Error as error:
            raise RuntimeError(
                f"Weights & Biases could not start a run: {error} To log to the local disk only, "
                "set WANDB_MODE=offline."
            ) from error

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log(_numbers(values), step=plain(step))

    def close(self) -> None:
        if self._started:
            self.run.finish()


def controller(optimizer: Any) -> NormControl:
    """The :class:`NormControl` inside the wrappers of Accelerate, Lightning or Fabric."""
    innermost, inner, found = optimizer, optimizer, None
    # Wrappers of Lightning are instances of the class that they wrap, so the innermost one counts.
    while inner is not None:
        found = inner if isinstance(inner, NormControl) else found
        innermost, inner = inner, getattr(inner, "optimizer", None)
    if found is None:
        raise TypeError(
            f"{type(innermost).__name__} controls no norms, so there are none to log and no "
            "targets. Give an AdamWN or a NormControl. To record the norms of another optimizer, "
            "use NormTrace."
        )
    return found


@torch.no_grad()
def tensors(optimizer: Any) -> dict[str, Tensor]:
    """Like :func:`values`, but with tensors as values. This does not wait for the device; a
    framework reads the tensors when it logs them."""
    numbers: dict[str, Tensor] = {}
    optimizer = controller(optimizer)
    readings = optimizer.norms()  # before the sets are looked at: it takes over what was changed
    references = joint_references(optimizer.sets)
    for name, reading in readings.items():
        norm, target, ratio, _ = reading
        if norm.dim():  # the joint ratio is the joint norm divided by the joint initial norm
            norm, target = norm.norm(), target.norm()
            ratio = norm / references[name]
        numbers |= {
            f"norm/{name}": norm,
            f"norm/{name}{TARGET}": target,
            f"norm/{name}/ratio": ratio,
        }
    return numbers


def values(optimizer: Any) -> dict[str, float]:
    """The norm, target and ratio of everything that is controlled, as numbers by name.

    This waits for the device once. With scopes of rows or slices, the numbers are those of whole
    tensors. With sharded weights, call it on every rank, even if only one of them logs.

    >>> from normcontrol import AdamWN
    >>> values(AdamWN([torch.nn.Parameter(torch.ones(3, 3))], ratio=2.0))
    {'norm/global': 3.0, 'norm/global/target': 6.0, 'norm/global/ratio': 1.0}
    """
    numbers = tensors(optimizer)
    if not numbers:  # nothing is controlled now
        return {}
    device = next(iter(numbers.values())).device
    together = torch.stack([n.to(device, torch.float64) for n in numbers.values()])
    return dict(zip(numbers, together.tolist(), strict=True))


def layout(names: Iterable[str]) -> dict[str, Any]:
    """The argument of TensorBoard's ``add_custom_scalars``: a chart for every name that has a
    target, with both lines.

    >>> layout(["loss", "norm/a", "norm/a/target"])
    {'norms against their targets': {'norm/a': ['Multiline', ['^norm/a$', '^norm/a/target$']]}}
    """
    known = set(names)
    pairs = [(name, name + TARGET) for name in sorted(known) if name + TARGET in known]
    charts = {
        name: ["Multiline", [f"^{re.escape(tag)}$" for tag in (name, target)]]
        for name, target in pairs
    }
    return {"norms against their targets": charts} if charts else {}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The values that are numbers. Texts are logged only by :class:`JSONL`."""
    return {name: x for name, x in _plain(values).items() if isinstance(x, int | float)}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with single numbers of torch and numpy as Python's. This waits for the device."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = value.item() if hasattr(value, "item") else value
        except (RuntimeError, ValueError):
            raise ValueError(
                f"{name!r} is {len(value)} numbers, and a tracker logs one for every name. Log "
                "their mean or their norm, or each under a name of its own."
            ) from None
    return found
