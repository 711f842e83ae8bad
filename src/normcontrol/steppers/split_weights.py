"""Optimizers that store a part of every weight in their state, beside the parameter.

The control multiplies parameters. An optimizer that adds a stored correction to a parameter, or
copies a stored weight of higher precision to it, would undo that. Such optimizers are recognised by
their settings or their state, and refused. This file knows nothing about targets, rates and laws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.optim import Optimizer

from normcontrol.groups.sets import WeightSet

IN_STATE = {
    "error_bits": "the low bits of the weights",
    "param::ecc": "the low bits of the weights",
    "master_param": "the weights in higher precision",
}
"""Entries of an optimizer's state that belong to its weights (FlashOptim, HeavyBall, Transformer
Engine), and what they are."""


def refuse_split_weights(optimizer: Optimizer, sets: Sequence[WeightSet]) -> None:
    """Refuse an optimizer that stores a part of a controlled weight in its state."""
    for s in sets:
        for group in s.groups:
            # HeavyBall and FlashOptim name in their groups what the state will contain.
            if group.get("param_ecc"):
                _refuse(
                    optimizer, f"param_ecc={group['param_ecc']!r}", "the low bits of the weights"
                )
            width = group.get("master_bytewidth") or 0
            if any(p.element_size() < width for p in s.params):
                _refuse(
                    optimizer, f"{8 * width} bits for each weight", "the low bits of the weights"
                )
        for p in s.params:
            state = optimizer.state.get(p)
            for key in state if isinstance(state, Mapping) else ():
                if key in IN_STATE:
                    _refuse(optimizer, f"the state {key!r}", IN_STATE[key])


def _refuse(optimizer: Optimizer, sign: str, what: str) -> None:
    name = type(optimizer).__name__
    raise ValueError(
        f"{name} has {sign}: it stores {what} in its state, and the control would scale the "
        f"parameters without them. Construct {name} without that, or set controlled=False."
    )
