"""The sizes at which a study can be run. A module of its own, because the command line needs them
before torch is imported."""

from __future__ import annotations

from typing import Literal, get_args

Scale = Literal["tiny", "small", "full"]
SCALES: tuple[str, ...] = get_args(Scale)
