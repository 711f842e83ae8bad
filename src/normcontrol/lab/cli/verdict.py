"""``normcontrol verdict``: print what a study showed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from normcontrol.lab.cli.flags import parse


@dataclass(frozen=True)
class Verdict:
    """What the finished cells of a study show: sentences, a table, and the outcome of each
    claim."""

    study: tyro.conf.Positional[str]
    """The study's folder, or its name under results/."""


def run(args: Sequence[str]) -> int:
    flags = parse("verdict", Verdict, args)
    from normcontrol.lab.studies.opening import find, open_folder
    from normcontrol.lab.study.verdict import judge
    from normcontrol.lab.study.verdict_text import lines
    from normcontrol.lab.text import terminal_width

    for line in lines(judge(open_folder(find(flags.study))), terminal_width()):
        print(line)
    return 0
