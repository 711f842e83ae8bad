"""``normcontrol schedule``: show the schedules of a run before it is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from normcontrol.lab.cli.flags import PresetName, given, parse, start
from normcontrol.lab.training.config import Config


@dataclass(frozen=True)
class Schedule:
    """Draw the learning rate, the target ratio r_t and the rate k_t of a run before it is run."""

    preset: PresetName = "tiny"
    """Where all other settings start from."""
    out: Path = Path("schedule.png")
    """The picture."""
    config: Config = field(default_factory=Config)


def run(args: Sequence[str]) -> int:
    flags = parse("schedule", Schedule, args, Schedule(config=start("schedule", args)))
    from normcontrol.lab.report.schedules import draw, rows
    from normcontrol.lab.text import columns, terminal_width
    from normcontrol.lab.training.options import check_used

    check_used(flags.config, given(args))
    table = [("step", "lr", "r_t", "k_t"), *rows(flags.config)]
    print("\n".join(columns(table, terminal_width())))
    draw(flags.config, flags.out)
    print(f"Drawn in {flags.out}.")
    return 0
