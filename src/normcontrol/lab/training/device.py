"""Everything that depends on the device of a run: its choice and precision, its peak speed, the
attention kernels, and the message when its memory is full. It may not know about the model, the
optimizer or the training loop.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterator

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
"""Dense bf16 FLOP/s according to the manufacturers' data sheets. A name that contains another one
comes before it."""


def choose(name: str, local_rank: int = 0) -> torch.device:
    """The device with this name. "auto" is a GPU if there is one, else the CPU."""
    if name == "auto":
        name = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise LabError(
            f"device={name!r} is not the name of a device in torch. Give auto, cpu, cuda, or "
            "cuda:1."
        ) from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise LabError(
                f"device={name!r} was requested, but torch finds no GPU. Use --device cpu, or a "
                "torch built for your GPU."
            )
        if device.index is None:
            device = torch.device("cuda", local_rank)
        if device.index >= (count := torch.cuda.device_count()):
            raise LabError(
                f"device={str(device)!r} was requested, but the highest GPU that torch finds is "
                f"cuda:{count - 1}. Give that one or a lower one, or start fewer processes."
            )
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        _check_computes(device)
    return device


def _check_computes(device: torch.device) -> None:
    """Refuse a device that torch knows by name and cannot compute on: one that this torch is not
    built for or that is not in this machine, and "meta", which stores no numbers."""
    try:
        torch.ones(1, device=device).item()
    except Exception as error:  # each kind of device raises errors of its own
        raise LabError(
            f"device={str(device)!r} cannot be used here ({str(error).splitlines()[0]}). Give "
            "auto, cpu, cuda, or cuda:1."
        ) from None


def precision(name: str, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast, or None to compute in fp32. bf16 on a device without bf16 matrix units
    is slower than fp32, so it is an error."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = device.type == "cpu" and torch.cpu._is_amx_tile_supported()
    if name == "bf16" and not fast:
        raise LabError(
            f"precision=bf16 was requested, but {describe(device)} has no bf16 matrix units and "
            "would be slower than in fp32. Use --precision fp32."
        )
    return (
        torch.bfloat16
        if name == "bf16" or (name == "auto" and fast and device.type == "cuda")
        else None
    )


def check_stream(config: Config, dtype: torch.dtype | None) -> None:
    """Refuse bf16_stream in a run that computes in fp32, where it would have no effect."""
    if config.model.bf16_stream and dtype is None:
        raise LabError(
            "bf16_stream was requested, but this run computes in fp32, where it has no effect. Use "
            "--precision bf16 on a device with bf16 units, or omit it."
        )


def describe(device: torch.device) -> str:
    """The name of the GPU or the CPU model."""
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
    """The dense bf16 FLOP/s of the GPU, or None if it is not known. An MFU is not computed from a
    guessed peak."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_BF16.items() if key in name), None)


@contextlib.contextmanager
def fast_kernels(device: torch.device) -> Iterator[None]:
    """On a GPU: float32 matrices are multiplied in TF32, and cuDNN's attention kernel, the fastest
    on Hopper, is preferred; if it does not support the inputs, torch uses the next one of the list.
    Both settings belong to the whole process, so they are put back at the end."""
    if device.type != "cuda":
        yield
        return
    kernels = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with sdpa_kernel(kernels, set_priority=True):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def memory_advice(config: Config) -> Iterator[None]:
    """Replace torch's out-of-memory error by one that says which setting to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        micro = config.data.micro_batch
        advice = (
            f"Halve the micro-batch, --micro-batch {micro // 2}: only memory and speed depend on it"
            if micro > 1
            else "The micro-batch is already 1: shard the model over more GPUs (--parallel fsdp), "
            "or use a shorter --context"
        )
        raise LabError(
            f"The GPU's memory is full at micro_batch={micro}. {advice}. "
            f"({str(error).splitlines()[0]})"
        ) from None


class Stopwatch:
    """Measures tokens per second. The caller adds to ``tokens``; :meth:`lap` returns the speed
    since the last lap."""

    def __init__(self) -> None:
        self.then, self.tokens = time.perf_counter(), 0

    def lap(self) -> float:
        now = time.perf_counter()
        speed = self.tokens / max(now - self.then, 1e-9)
        self.then, self.tokens = now, 0
        return speed
