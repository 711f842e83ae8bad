"""``normcontrol train``: train one model, or continue a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from normcontrol.lab.cli.flags import PresetName, parse, say, start, unhindered
from normcontrol.lab.errors import LabError
from normcontrol.lab.training.config import Config


@dataclass(frozen=True)
class Train:
    """Train a model. Without a flag: the tiny preset, with AdamWN, on the standard library of this
    Python."""

    preset: PresetName = "tiny"
    """Where all other settings start from."""
    out: Path | None = None
    """Folder of the run; by default a new one under runs/."""
    resume: Path | None = None
    """Continue the run in this folder, with its own settings. Only settings that change memory or
    speed may be given too."""
    config: Config = field(default_factory=Config)


def run(args: Sequence[str]) -> int:
    flags = parse("train", Train, args, Train(config=start("train", args)))
    if "RANK" in os.environ and not (flags.resume or flags.out):
        raise LabError(
            "Several processes were started, and each would choose a folder of its own. Give a "
            "common one as --out."
        )
    from normcontrol.lab.report.run_progress import Board
    from normcontrol.lab.training.loop import train
    from normcontrol.lab.training.parallel import leave
    from normcontrol.lab.training.run_folder import free_name

    method = flags.config.optim.optimizer
    out = flags.resume or flags.out or free_name(Path("runs"), f"{flags.preset}-{method}")
    try:
        with Board() as board:
            finished = train(
                flags.config,
                out,
                resume=bool(flags.resume),
                display=unhindered(lambda status: board.show(out.name, status)),
            )
    finally:
        leave()
    if not finished:
        say(f"Stopped, and saved. To continue:\n  normcontrol train --resume {out}")
        return 130
    say(f"Done: {out}. Text from it with:\n  normcontrol sample {out}")
    return 0
