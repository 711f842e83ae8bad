"""Keeps compiled models between the runs of a study: at `small`, compiling a model takes half as
long as training it. It may not know about data, optimizers or the training loop.

The weights of each new model are copied into the kept model of the same shape, so that a run
computes the same numbers as it would in a process of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from normcontrol.lab.training.model import GPT

SHAPES = 64
"""How many shapes torch may compile the model for. Beyond its own limit, 8, it would run further
shapes uncompiled, and a study of widths and depths has more."""


class Warm:
    """The kept models of a process, one for each shape and device.

    >>> from normcontrol.lab.training.config import Model
    >>> warm, shape = Warm(), Model(layers=1, heads=1, width=8, context=8)
    >>> first = warm.place(GPT(shape, vocab=64), torch.device("cpu"))
    >>> warm.place(GPT(shape, vocab=64), torch.device("cpu")) is first
    True
    """

    def __init__(self) -> None:
        self._models: dict[Any, GPT] = {}
        self._compiled: dict[int, Any] = {}

    def place(self, fresh: GPT, device: torch.device) -> GPT:
        """The kept model on the device, with the weights of ``fresh``."""
        key = (
            replace(fresh.config, init_seed=0, init_scale=1.0, init_gain=None, dropout_seed=0),
            fresh.vocab,
            device,
        )
        kept = self._models.get(key)
        if kept is None:
            self._models[key] = kept = fresh.to(device)
        else:
            kept.load_state_dict(fresh.state_dict())
            for p in kept.parameters():
                p.grad = None
        return kept

    def compiled(self, model: GPT) -> Any:
        """The compiled model. Only the first run that calls it spends time on compiling."""
        if id(model) not in self._compiled:
            limits = torch._dynamo.config
            limits.recompile_limit = max(limits.recompile_limit, SHAPES)
            self._compiled[id(model)] = torch.compile(model, dynamic=False)
        return self._compiled[id(model)]
