"""``normcontrol train``: train one model, or continue a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normcontrol.lab.cli.flags import PresetName, given, parse, say, start, unhindered
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
    speed may be given too, and --data or --optimizer if their files were moved."""
    config: Config = field(default_factory=Config)


def run(args: Sequence[str]) -> int:
    flags = parse("train", Train, args, Train(config=start("train", args)))
    without_effect = [flag for flag in ("preset", "out") if flags.resume and flag in given(args)]
    if without_effect:
        raise LabError(
            f"--{without_effect[0]} would have no effect with --resume: a run is continued in its "
            "own folder, with its own settings. Omit one of the two."
        )
    if "RANK" in os.environ and not (flags.resume or flags.out):
        raise LabError(
            "Several processes were started, and each would choose a folder of its own. Give a "
            "common one as --out."
        )
    from normcontrol.lab.files import folder_name
    from normcontrol.lab.report.run_progress import Board
    from normcontrol.lab.text import in_shell
    from normcontrol.lab.training.checkpoint import latest
    from normcontrol.lab.training.loop import train
    from normcontrol.lab.training.metrics import read
    from normcontrol.lab.training.optimizer_names import known_name
    from normcontrol.lab.training.options import check_used
    from normcontrol.lab.training.parallel import leave
    from normcontrol.lab.training.run_folder import CHECKPOINTS, check_same, free_name

    check_used(flags.config, given(args))
    new = folder_name(f"{flags.preset} {known_name(flags.config.optim.optimizer)}")
    out = flags.resume or flags.out or free_name(Path("runs"), new)
    if flags.resume:
        check_same(out, flags.config)
        say_where(out, flags.config.run.steps)
    try:
        with Board() as board:
            finished = train(
                flags.config,
                out,
                resume=bool(flags.resume),
                display=unhindered(lambda status: board.show(out.absolute().name, status)),
            )
    finally:
        leave()
    if not finished:
        say(f"Stopped, and saved. To continue:\n  normcontrol train --resume {in_shell(out)}")
        return 130
    done = f"Done: {out}, with {final(read(out))}."
    if latest(out / CHECKPOINTS):
        done += f" Text from it with:\n  normcontrol sample {in_shell(out)}"
    say(done)
    return 0


def say_where(run: Path, steps: int) -> None:
    """Print where a run is continued, if it is not finished."""
    from normcontrol.lab.training.checkpoint import latest, step_of
    from normcontrol.lab.training.run_folder import CHECKPOINTS

    newest = latest(run / CHECKPOINTS)
    if newest is None:
        say(
            f"{run} has no checkpoint: it was stopped before the first one, and starts again. "
            "--checkpoint-every N writes more of them."
        )
    elif step_of(newest) < steps:
        say(f"{run} continues after step {step_of(newest)} of {steps}.")


def final(lines: Sequence[Mapping[str, Any]]) -> str:
    """In words, the validation losses at the end of a run."""
    last: Mapping[str, Any] = next((line for line in reversed(lines) if "val_loss" in line), {})
    losses = {key: value for key, value in last.items() if key.startswith("val_loss")}
    names = {key: key.removeprefix("val_loss").replace("_", " on ", 1) for key in losses}
    return " and ".join(f"a validation loss{names[key]} of {losses[key]:.4f}" for key in losses)
