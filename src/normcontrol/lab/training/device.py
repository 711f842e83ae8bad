"""The device: which one, how it computes, what its peak is, and what to say when its memory is
full."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from normcontrol.lab.errors import LabError
from normcontrol.lab.training.config import Config

PEAK_BF16 = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Dense bf16 FLOP/s by the makers' data sheets, the more special names first."""


def choose(name: str, local_rank: int = 0) -> torch.device:
    """The device by its name; "auto" is the GPU if there is one."""
    if name == "auto":
        name = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise LabError(
            f"device={name!r} is not a device that torch knows. Give auto, cpu, cuda, or cuda:1."
        ) from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise LabError(
                f"device={name!r} was asked for, but torch sees no GPU here. Use --device cpu, or "
                "a torch built for your GPU."
            )
        if device.index is None:
            device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    return device


def precision(asked: str, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast, or None for plain fp32. A CPU without bf16 units is slower in bf16, so
    it is refused there."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = device.type == "cpu" and torch.cpu._is_amx_tile_supported()
    if asked == "bf16" and not fast:
        raise LabError(
            f"precision=bf16 was asked for, but {describe(device)} has no bf16 matrix units and "
            "would be slower than in fp32. Use "
            "--precision fp32."
        )
    return (
        torch.bfloat16
        if asked == "bf16" or (asked == "auto" and fast and device.type == "cuda")
        else None
    )


def describe(device: torch.device) -> str:
    """The card's or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as file:
            return next(
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def peak_flops(device: torch.device) -> float | None:
    """The card's dense bf16 peak, or None where it is not known: an MFU against a guess would be a
    guess."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_BF16.items() if key in name), None)


def attention(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """On a GPU, attention by cuDNN's kernel if it has one that fits, else by torch's own choice: on
    Hopper it is the fastest."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    kernels = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(kernels, set_priority=True)


@contextlib.contextmanager
def memory_advice(config: Config) -> Iterator[None]:
    """Say which knob to turn when the GPU's memory is full."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        micro = config.data.micro_batch
        knob = (
            f"Halve the micro-batch, --micro-batch {micro // 2}: it changes memory and speed, and "
            "nothing else"
            if micro > 1
            else "The micro-batch is 1 already: shard the model over more GPUs (--parallel fsdp), "
            "or use a shorter --context"
        )
        raise LabError(
            f"The GPU's memory is full at micro_batch={micro}. {knob}. "
            f"({str(error).splitlines()[0]})"
        ) from None


class Stopwatch:
    """Tokens a second since the last look."""

    def __init__(self) -> None:
        self.then, self.tokens = time.perf_counter(), 0

    def lap(self) -> float:
        now = time.perf_counter()
        speed = self.tokens / max(now - self.then, 1e-9)
        self.then, self.tokens = now, 0
        return speed
