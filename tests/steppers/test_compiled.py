"""Every Triton kernel compiles for GPUs, with the arguments that its host launches it with.

No GPU is needed. The hosts run with tensors on the CPU, and their launches are recorded instead of
made: a host never reads what a kernel has computed. Then Triton compiles what was recorded."""

from __future__ import annotations

import dis
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kernel_cases import INTERPRETED
from torch import nn
from torch.optim import SGD

import normcontrol
from normcontrol import AdamWN, NormControl
from normcontrol.lab.training import gelu, loss
from normcontrol.steppers import tables
from normcontrol.weights.rounding import multiply_rounding_

triton = pytest.importorskip("triton", reason="Triton is not installed, so it compiles nothing")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter compiles nothing")

SOURCE = Path(normcontrol.__file__).parent
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Launched(NamedTuple):
    """What a host launched: a kernel, its arguments, and its constants by their names."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


@pytest.fixture(scope="module")
def launches() -> list[Launched]:
    """What the hosts launch with all their options, in few steps: compiling takes its time."""
    made: list[Launched] = []

    def record(kernel, *arguments, grid, warmup, **constants):
        made.append(Launched(kernel, arguments, constants))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.JITFunction, "run", record)
        patch.setattr(tables, "is_interpreted", lambda: True)  # the kernels take tensors on a CPU
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        overflow = {"found_inf": torch.zeros(1)}
        scaler = {**overflow, "grad_scale": torch.ones(())}
        options = {"amsgrad": True, "maximize": True, "lr": torch.tensor(1e-3)}
        step(AdamWN(weights(FP32), fused=True))
        before = AdamWN(weights(BF16, 1), fused=True, order="before", scope="tensor", **options)
        step(before, scaler)
        clips = {"max_grad_norm": 1.0, "scope": "tensor", "law": "upper"}
        step(AdamWN(weights(FP16), fused=True, **clips), scaler)
        step(NormControl(SGD(weights(FP32), lr=0.1), scope="tensor"))
        for params in (weights(FP32) + weights(FP16), weights(BF16, 1)):
            step(NormControl(SGD(params, lr=0.1), size="spectral", scope="tensor"))
        step(NormControl(SGD(weights(FP32, 1), lr=0.1), scope="row", law="upper"))
        step(NormControl(SGD(weights(BF16), lr=0.1), scope="row"))
        step(NormControl(SGD(weights(FP16), lr=0.1, fused=True), scope="row"), overflow)
        with torch.no_grad():
            for weight in weights(BF16) + weights(FP16):
                multiply_rounding_(weight.as_subclass(OnGPU), torch.ones(()), torch.ones(()))
        x, weight, targets = torch.ones(3, 4), torch.ones(50, 4), torch.ones(3, dtype=torch.int64)
        loss.head_losses(x, weight, targets)
        loss.row_losses(x.bfloat16(), targets)
        gelu.gelu_backward(x.bfloat16(), gelu.gelu_forward(x.bfloat16()))
    return made


def weights(dtype: torch.dtype, shift: int = 0) -> list[nn.Parameter]:
    """Parameters with gradients. ``shift`` moves them away from the 16-byte boundary."""
    made = []
    for rows, columns in ((30, 64), (5, 64)):
        both = [torch.ones(rows * columns + shift, dtype=dtype) for _ in range(2)]
        weight, gradient = (t[shift:].view(rows, columns) for t in both)
        made.append(nn.Parameter(weight))
        made[-1].grad = gradient
    return made


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU, and is not."""

    is_cuda = True


def step(opt: NormControl, scaler: dict[str, torch.Tensor] | None = None) -> None:
    vars(opt).update(scaler or {})  # as GradScaler does
    opt.step()


def kernels_in_source() -> dict[str, Any]:
    """Every function of ours that Triton compiles, by its module and name."""
    found: dict[str, Any] = {}
    for path in SOURCE.rglob("*.py"):
        count = path.read_text().count("triton.jit")
        if count:
            name = ".".join(["normcontrol", *path.relative_to(SOURCE).with_suffix("").parts])
            every = [v for v in vars(import_module(name)).values() if is_compiled(v)]
            mine = [kernel for kernel in every if kernel.fn.__module__ == name]
            assert len(mine) == count, f"{path.name} has {count} kernels, and {len(mine)} are found"
            found |= {f"{name}.{kernel.fn.__name__}": kernel for kernel in mine}
    return found


def is_compiled(value: Any) -> bool:
    return isinstance(value, triton.JITFunction)


def with_callees(kernel: Any) -> Iterator[Any]:
    """A kernel and the functions that are compiled into it."""
    yield kernel
    for instruction in dis.get_instructions(kernel.fn):
        if instruction.opname == "LOAD_GLOBAL":
            callee = kernel.fn.__globals__.get(instruction.argval)
            if is_compiled(callee):
                yield from with_callees(callee)


def test_the_hosts_launch_every_kernel(launches):
    launched = {id(f) for launch in launches for f in with_callees(launch.kernel)}
    missing = [name for name, kernel in kernels_in_source().items() if id(kernel) not in launched]
    assert not missing, f"no host launches {missing} here: add a step that does"


def test_the_hosts_launch_every_kernel_with_each_option_on_and_off_and_with_every_dtype(launches):
    values = defaultdict(set)
    for kernel, _, constants in launches:
        for name, value in constants.items():
            values[kernel.fn.__name__, name].add(value)
    assert len(values) > 50
    dtypes = {getattr(triton.language, str(t).removeprefix("torch.")) for t in tables.SUPPORTED}
    for of, seen in values.items():
        if seen & {True, False} and all(isinstance(value, bool) for value in seen):
            assert seen == {True, False}, f"{of} is always {seen}"
        if seen & dtypes:
            assert seen == dtypes, f"{of} is never {dtypes - seen}"


class Driver:
    """Stands in for Triton's driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.target = triton.backends.compiler.GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return -self.target.arch  # no number of a GPU: Triton keeps what it compiled by it

    def get_current_stream(self, device: int) -> int:
        return 0


def with_most_options(launches: list[Launched]) -> list[Launched]:
    """One launch of every kernel, with as many options on as it was launched with."""
    chosen: dict[int, Launched] = {}
    for launch in launches:
        rival = chosen.setdefault(id(launch.kernel), launch)
        if options_on(launch) > options_on(rival):
            chosen[id(launch.kernel)] = launch
    return list(chosen.values())


def options_on(launch: Launched) -> int:
    return sum(value is True for value in launch.constants.values())


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("capability", "every"),
    [
        (90, False),
        pytest.param(90, True, marks=pytest.mark.slow),
        pytest.param(80, False, marks=pytest.mark.slow),
    ],
)
def test_what_the_hosts_launch_compiles(capability, every, launches, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(capability))
    for kernel, arguments, constants in launches if every else with_most_options(launches):
        compiled = kernel.run(*arguments, grid=(1,), warmup=True, **constants)
        assert compiled.asm["cubin"]
