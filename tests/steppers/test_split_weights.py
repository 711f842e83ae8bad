"""Optimizers that store a part of their weights in the state are refused: at construction if their
groups tell it, else at the step that creates the state, before any weight is scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from normcontrol import NormControl


class Correcting(torch.optim.SGD):
    """SGD whose state gets an entry in the first step, as that of FlashOptim does."""

    entry = "error_bits"

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p][self.entry] = torch.zeros_like(p, dtype=torch.int8)
        return loss


def sgd(dtype: torch.dtype = torch.float32, kind: Any = torch.optim.SGD, **also: Any) -> Any:
    p = nn.Parameter(torch.eye(4, dtype=dtype))
    p.grad = torch.zeros_like(p)
    return kind([{"params": [p], **also}], lr=0.1)


@pytest.mark.parametrize(
    ("make", "sign"),
    [
        (lambda: sgd(torch.bfloat16, param_ecc="bf16+8"), "param_ecc='bf16\\+8'"),
        (lambda: sgd(torch.bfloat16, master_bytewidth=3), "24 bits for each weight"),
    ],
)
def test_groups_that_announce_split_weights_are_refused_at_construction(make, sign):
    with pytest.raises(ValueError, match=f"SGD has {sign}: it stores the low bits of the weights"):
        NormControl(make())


@pytest.mark.parametrize("entry", ["error_bits", "param::ecc", "master_param"])
def test_a_state_with_split_weights_is_refused_at_the_first_step_before_any_scaling(
    entry, monkeypatch
):
    monkeypatch.setattr(Correcting, "entry", entry)
    opt = NormControl(sgd(kind=Correcting), ratio=2.0, rate=1.0)
    with pytest.raises(ValueError, match=f"the state '{entry}'.*controlled=False"):
        opt.step()
    (p,) = opt.param_groups[0]["params"]
    assert torch.equal(p, torch.eye(4))


def test_weights_that_are_whole_or_not_controlled_are_accepted():
    NormControl(sgd(master_bytewidth=4)).step()
    NormControl(sgd(master_bytewidth=None, param_ecc=None)).step()
    split = sgd(kind=Correcting, param_ecc="bf16+8", controlled=False)
    with pytest.warns(UserWarning, match="Nothing is controlled"):
        opt = NormControl(split)
    opt.step()
