"""``normcontrol challenge``: the paper's comparison in one command, run as a study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from normcontrol.lab.cli.flags import PresetName, given, parse, say, start, unhindered
from normcontrol.lab.errors import LabError
from normcontrol.lab.ranges import Count
from normcontrol.lab.training.config import Config

if TYPE_CHECKING:
    from normcontrol.lab.study.ledger import Ledger
    from normcontrol.lab.study.runner import Outcome


@dataclass(frozen=True)
class Challenge:
    """Train AdamW, record its norm ratio, train AdamWN at that ratio on the same data, and report.

    The settings below are those of the baseline, and of all arms as far as an arm does not change
    them.
    """

    preset: PresetName = "tiny"
    """Where all other settings start from."""
    arms: tuple[str, ...] = ("adamwn",)
    """Challengers. adamwn: at the ratio the baseline ends with; scaled: AdamW started from weights
    scaled to that norm; adamc: AdamC; or any optimizer. Each may change settings:
    adamw:weight_decay=0.05 adamwn:gain=0.8 adamwn:ratio=2.4,rate=0.05"""
    seeds: Count = 1
    """The number of seeds that everything is repeated with; two or more give intervals."""
    out: Path | None = None
    """Folder of the challenge. A stopped challenge continues in its folder."""
    config: Config = field(default_factory=Config)


def run(args: Sequence[str]) -> int:
    flags = parse("challenge", Challenge, args, Challenge(config=start("challenge", args)))
    from normcontrol.lab.studies.opening import open_folder
    from normcontrol.lab.training.parallel import is_first, leave

    out = flags.out or Path("runs") / f"challenge-{flags.preset}"
    try:
        outcome = train(flags, given(args), out)
    finally:
        leave()
    if outcome.stopped:
        say("Stopped, and saved. To continue, give the same command again.")
        return 130
    if is_first():
        show(open_folder(out))
    return 0


def train(flags: Challenge, names: Sequence[str], out: Path) -> Outcome:
    """Run the cells of the challenge that are not finished."""
    from normcontrol.lab.report.run_progress import Board
    from normcontrol.lab.studies import challenge
    from normcontrol.lab.studies.opening import begin
    from normcontrol.lab.study.runner import Runner
    from normcontrol.lab.training.parallel import join

    device = flags.config.run.device
    settings = challenge.settings_of(flags.config, flags.arms, flags.seeds)
    challenge.check_settings(settings, [name for name in names if name in flags.config.flat()])
    world = join(device)
    if not world.first:
        world.wait()  # the first process may have to prepare the data
    ledger = begin(out, challenge.NAME, "", settings=settings)
    if world.first:
        world.wait()
    with Board() as board:

        def name(label: str) -> str:
            return label.removesuffix(" seed=0") if flags.seeds == 1 else label

        if flags.seeds == 1:
            board.plan(*(arm.name for arm in challenge.all_arms(flags.arms)))
        return Runner(
            ledger,
            device=device,
            show=unhindered(lambda label, status: board.show(name(label), status)),
        ).run()


def show(ledger: Ledger) -> None:
    """Print the table and the verdict, and write the page."""
    from normcontrol.lab.report import study_page
    from normcontrol.lab.study.verdict import ONE_SEED, judge
    from normcontrol.lab.text import columns, terminal_width, wrapped

    refuse_failures(ledger)
    page, verdict, width = study_page.write(ledger, ledger.out), judge(ledger), terminal_width()
    print("\n".join(["", *columns([verdict.headings(), *verdict.table()], width), ""]))
    print(f"The page with the four panels is {page}.")
    # The sentences of the verdict contain already that there is one seed.
    notes = [f"Note: {flag}" for flag in verdict.flags if flag != ONE_SEED]
    for text in (*verdict.sentences(), *notes):
        print("\n".join(wrapped(text, width)))


def refuse_failures(ledger: Ledger) -> None:
    """Raise an error if a run failed, or if no run of the baseline ended with a norm to use."""
    done = ledger.results()
    ended = {cell.label: record for cell in ledger.cells(done) if (record := done.of(cell))}
    failed = [label for label, record in ended.items() if record.status == "failed"]
    if failed:
        error = ended[failed[0]].error.removesuffix(".")  # a sentence of ours, or torch's words
        raise LabError(
            f"{len(failed)} of {len(ended)} runs failed. {failed[0]}: {error}. The same command "
            "goes on from the last checkpoint."
        )
    if not any(record.good for record in ended.values()):
        raise LabError(next(iter(ended.values())).error)
