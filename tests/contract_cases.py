"""Scenarios of torch's own database of optimizer tests, for AdamW and AdamWN.

Every scenario runs with AdamW too, which shows that it requires nothing that AdamW does not do.
"""

import copy
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import Parameter

from normcontrol import AdamWN

# The database needs one class of this module, for tests of its own. The module describes all of
# torch's operators, which takes seconds.
OPERATORS = "torch.testing._internal.common_methods_invocations"
sys.modules[OPERATORS] = SimpleNamespace(DecorateInfo=lambda *given, **options: None)
try:
    from torch.testing._internal.common_optimizers import optim_db
finally:
    del sys.modules[OPERATORS]

ADAMW = next(info for info in optim_db if info.optim_cls is torch.optim.AdamW)
IMPLEMENTATIONS = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def inputs():
    """Every constructor call of the database, for every implementation. Calls that are meant for
    CUDA are included without ``capturable``."""
    cpu = ADAMW.optim_inputs_func(device="cpu", dtype=torch.float32)
    cuda = [
        i
        for i in ADAMW.optim_inputs_func(device="cuda", dtype=torch.float32)
        if i.kwargs.pop("capturable", False)
    ]
    for (name, flags), given in itertools.product(IMPLEMENTATIONS.items(), cpu + cuda):
        tensors = any(
            isinstance(v, torch.Tensor)
            for v in (given.kwargs.get("lr"), *given.kwargs.get("betas", ()))
        )
        # AdamW refuses tensors with foreach, and its fused CPU kernel refuses betas in tensors.
        if tensors and name != "for-loop":
            continue
        yield pytest.param({**given.kwargs, **flags}, id=f"{given.desc}-{name}".replace(" ", "_"))


both = pytest.mark.parametrize("cls", [torch.optim.AdamW, AdamWN])
every_input = pytest.mark.parametrize("kwargs", list(inputs()))


class Run:
    """A least-squares problem, its optimizer, and the step that every scenario repeats."""

    def __init__(self, cls, kwargs, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        self.weight = Parameter(torch.randn(10, 5, generator=generator, dtype=dtype))
        self.bias = Parameter(torch.randn(10, generator=generator, dtype=dtype))
        self.input = torch.randn(5, generator=generator, dtype=dtype)
        self.opt = cls([self.weight, self.bias], **copy.deepcopy(kwargs))

    def error(self):
        return (self.weight.mv(self.input) + self.bias).abs().square().sum()

    def loss(self):
        return -self.error() if self.opt.param_groups[0]["maximize"] else self.error()

    def closure(self):
        self.opt.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss

    def step(self, times=1):
        for _ in range(times):
            self.closure()
            self.opt.step()

    def weights(self):
        return [p.detach().clone() for p in (self.weight, self.bias)]

    def continued_by(self, opt, weight, bias):
        """The same problem with a copy of everything that changes."""
        other = copy.copy(self)
        other.opt, other.weight, other.bias = opt, weight, bias
        return other


def assert_same(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
