"""Counts the controller's steps: on the device always, on the host as long as the count is certain.

It knows nothing about schedules, which are evaluated at the step that it counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Clock:
    """The number of steps that the controller has made.

    ``step`` is an integer tensor on the device of the weights. A compiled step and a CUDA graph see
    it change. The host counts too, so that schedules are evaluated and checked without waiting for
    the device. A step that may have been skipped because of an overflow, or that was compiled or
    captured in a graph, is counted on the device alone; from then on only the device knows.
    """

    # An object of its own: what a compiled step assigns to an optimizer's attributes is lost.
    # An integer tensor: torch.compile loses in-place additions to a 0-d float64 tensor.
    step: Tensor
    calls: int = 0
    """Steps that the host has counted."""
    known: bool = True
    """Whether ``calls`` is the number of steps that were made."""
