"""Where numbers are looked at: JSONL files, TensorBoard and Weights & Biases, behind one small
interface.

A tracker takes a step and a dictionary of numbers; :func:`values` makes that dictionary from an
optimizer's norms. Every value that comes with a target, as ``norm/global`` with
``norm/global/target``, is drawn against it in one TensorBoard chart.
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

TARGET = "/target"


class Tracker(Protocol):
    """What every tracker does; write one for another service in these two methods."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers of this step. It may be called several times for a step, with other names."""

    def close(self) -> None:
        """Write what is not written yet."""


class JSONL:
    """One JSON object a line, appended to a file.

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
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()

    def size(self) -> int:
        """Bytes that are on disk for good."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.tell()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Event files in a folder, with a page "Custom scalars" that draws every value against its
    target.

    Args: folder: where the event files go. start: the first step that will be logged. What an
        interrupted run had logged from there on is hidden.
    """

    def __init__(self, folder: str | Path, start: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ModuleNotFoundError(
                "TensorBoard was asked for, but is not installed: pip install tensorboard."
            ) from None
        self.writer = SummaryWriter(str(folder), purge_step=start)
        self._laid_out = False

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if not self._laid_out and (charts := layout(values)):
            self.writer.add_custom_scalars(charts)
            self._laid_out = True
        for name, value in _numbers(values).items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A Weights & Biases run: the one that is active already, or a new one with the arguments of
    ``wandb.init``.

    A run that was active stays so when the tracker is closed. ``WANDB_MODE=offline`` or
    ``mode="offline"`` writes to disk without an account or a network.
    """

    def __init__(self, project: str | None = None, **init: Any) -> None:
        try:
            import wandb
        except ImportError:
            raise ModuleNotFoundError(
                "Weights & Biases was asked for, but is not installed: pip install wandb."
            ) from None
        self._begun = wandb.run is None
        try:
            self.run: Any = wandb.init(project=project, **init) if self._begun else wandb.run
        except wandb.Error as error:
            raise RuntimeError(
                f"Weights & Biases starts no run. It says: {error} To log to this machine's disk "
                "alone, set WANDB_MODE=offline."
            ) from error

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log(_numbers(values), step=step)

    def close(self) -> None:
        if self._begun:
            self.run.finish()


def controller(optimizer: Any) -> NormControl:
    """The optimizer under norm control, out of what Accelerate, Lightning or Fabric wrapped around
    it."""
    inner, found = optimizer, None
    while (
        inner is not None
    ):  # Lightning's wrappers pass for what they wrap, so it is the last one that counts
        found = inner if isinstance(inner, NormControl) else found
        inner = getattr(inner, "optimizer", None)
    if found is None:
        raise TypeError(
            f"{type(optimizer).__name__} controls no norms, so there are none to log. Give an "
            "AdamWN or a NormControl. (The norm of any "
            "other optimizer's weights is recorded by NormTrace.)"
        )
    return found


@torch.no_grad()
def tensors(optimizer: Any) -> dict[str, Tensor]:
    """As :func:`values`, but tensors, for a framework that reads them when it logs: nothing is
    waited for."""
    numbers: dict[str, Tensor] = {}
    for name, reading in controller(optimizer).norms().items():
        norm, target, ratio = reading.norm, reading.target, reading.ratio
        if norm.dim():  # the joint ratio: that of the joint norm to the joint initial norm
            initial = torch.where(ratio > 0, norm / ratio, norm).norm()
            norm, target = norm.norm(), target.norm()
            ratio = norm / initial
        numbers |= {
            f"norm/{name}": norm,
            f"norm/{name}{TARGET}": target,
            f"norm/{name}/ratio": ratio,
        }
    return numbers


def values(optimizer: Any) -> dict[str, float]:
    """The norm, target and ratio of everything that is controlled, as numbers by name.

    This waits for the device once. With scopes of rows or slices, they are the joint numbers of
    each tensor; under sharding call it on every rank, even if only one of them logs.

    >>> from normcontrol import AdamWN
    >>> values(AdamWN([torch.nn.Parameter(torch.ones(3, 3))], ratio=2.0))
    {'norm/global': 3.0, 'norm/global/target': 6.0, 'norm/global/ratio': 1.0}
    """
    numbers = tensors(optimizer)
    device = next(iter(numbers.values())).device
    return dict(
        zip(
            numbers,
            torch.stack([n.to(device, torch.float64) for n in numbers.values()]).tolist(),
            strict=True,
        )
    )


def layout(names: Iterable[str]) -> dict[str, Any]:
    """TensorBoard's ``add_custom_scalars`` argument: a chart for every name that has a target, with
    both lines in it.

    >>> layout(["loss", "norm/global", "norm/global/target"])
    {'norms against their targets': {'norm/global': ['Multiline', ['^norm/global$', '^norm/global/target$']]}}
    """
    known = set(names)
    pairs = [(name, name + TARGET) for name in sorted(known) if name + TARGET in known]
    charts = {
        name: ["Multiline", [f"^{re.escape(tag)}$" for tag in (name, target)]]
        for name, target in pairs
    }
    return {"norms against their targets": charts} if charts else {}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
