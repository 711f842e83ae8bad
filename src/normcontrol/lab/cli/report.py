"""``normcontrol report``: write a study's page and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from normcontrol.lab.cli.flags import parse


@dataclass(frozen=True)
class Report:
    """Write a study's page, one self-contained HTML file, and its figures as PNG and PDF."""

    study: tyro.conf.Positional[str]
    """The study's folder, or its name under results/."""
    out: Path | None = None
    """Where to; by default into the study's folder."""


def run(args: Sequence[str]) -> int:
    flags = parse("report", Report, args)
    from normcontrol.lab.report import study_page
    from normcontrol.lab.studies.opening import find, open_folder

    folder = find(flags.study)
    print(f"The page is {study_page.write(open_folder(folder), flags.out or folder)}.")
    return 0
