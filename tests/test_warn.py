"""A warning names the line of the user's code, and not one of ours or of torch's."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch

from normcontrol import AdamWN, NormControl, predict, trace
from normcontrol.warn import GIVEN


def matrix(fill: float = 1.0):
    return torch.nn.Parameter(torch.full((4, 4), fill))


def bias():
    return torch.nn.Parameter(torch.ones(4))


def past_its_end():
    p = matrix()
    opt = AdamWN([p], ratio=trace([1.0, 1.1], steps=[0, 1]))
    for _ in range(2):
        p.grad = torch.ones_like(p)
        opt.step()


def loads_adamw():
    AdamWN([matrix()]).load_state_dict(torch.optim.AdamW([matrix()]).state_dict())


TIED = [predict.TensorClass("wte", 640, 0.02, tied=True)]
CASES = {
    "does not decay": lambda: AdamWN([matrix()], weight_decay=0.1),
    "Nothing is controlled": lambda: AdamWN([bias()]),
    "is controlled now": lambda: NormControl(torch.optim.SGD([bias()], lr=0.1)),
    "no reference norms": loads_adamw,
    "The trace ends": past_its_end,
    "tied to the head": lambda: predict.adamw(TIED, lr=1e-3, weight_decay=0.1, steps=5),
}


@pytest.mark.parametrize("says", CASES)
def test_a_warning_names_the_line_that_called_the_library(says, monkeypatch):
    monkeypatch.setattr("normcontrol.warn.GIVEN", set())
    with pytest.warns(UserWarning, match=says) as given:
        CASES[says]()
    lines, first = inspect.getsourcelines(CASES[says])
    for warning in given:
        assert warning.filename == __file__
        assert first <= warning.lineno < first + len(lines)


def test_a_topic_is_warned_of_once(monkeypatch):
    monkeypatch.setattr("normcontrol.warn.GIVEN", GIVEN - {"decay"})
    with pytest.warns(UserWarning, match="does not decay"):
        AdamWN([matrix()], weight_decay=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdamWN([matrix()], weight_decay=0.1)
