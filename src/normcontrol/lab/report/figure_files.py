"""Writes figures of matplotlib to files, in the format that the name ends in."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from normcontrol.lab.errors import LabError
from normcontrol.lab.files import write_bytes


def save(figure: Figure, path: Path, **options: Any) -> None:
    """Write a figure. ``options`` are those of ``savefig``."""
    known, kind = figure.canvas.get_supported_filetypes(), path.suffix[1:].lower()
    if kind not in known:
        raise LabError(
            f"{path} ends in {path.suffix!r}, which is no format of a figure. Known are "
            f"{', '.join(f'.{name}' for name in known)}."
        )
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, **options)
    write_bytes(path, drawn.getvalue())
