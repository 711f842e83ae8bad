"""Draws docs/figures/search.png and follow.png from the records of the studies ``search`` and
``follow``, and prints the tables of the pages search.md (of these two and others), longer.md
(``horizon``, ``growth``, ``longest``, ``remarks`` and ``kept``) and repeated.md:
``python docs/figures/make_search.py``.

It reads records and trains nothing.
"""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from make_settle import evidence
from matplotlib.figure import Figure

from normcontrol.lab.studies import (
    follow,
    horizon,
    longest,
    remarks,
    repeated,
    rise,
    rounds,
    search,
    shape,
    tuned_walk,
)
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.studies.settled import ADAMC, ADAMW, ADAMWN, HIDDEN, SQRT, TENSOR
from normcontrol.lab.study.evidence import Evidence, Trial, difference
from normcontrol.lab.study.verdict import judge

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "results" / "search-tiny"
RISE = RESULTS.with_name("rise-tiny")
FOLLOW = RESULTS.with_name("follow-tiny")
SHAPE = RESULTS.with_name("shape-tiny")
TUNED_WALK = RESULTS.with_name("tuned-walk-tiny")
HORIZON = RESULTS.with_name("horizon-tiny")
GROWTH = RESULTS.with_name("growth-tiny")
LONGEST = RESULTS.with_name("longest-tiny")
REMARKS = RESULTS.with_name("remarks-tiny")
KEPT = RESULTS.with_name("kept-tiny")
REPEATED = RESULTS.with_name("repeated-tiny")
ROUNDS = RESULTS.with_name("rounds-tiny")
REPEATED_ARMS = [
    protocol.name(arm) for protocol in (search.USUAL, repeated.REPEATED) for arm in repeated.ARMS
]
STYLES = {
    ADAMW: ("#d62728", "s"),
    ADAMC: ("#8a8a8a", "^"),
    SQRT: ("#e08214", "D"),
    ADAMWN: ("#2171b5", "o"),
    TENSOR: ("#9ecae1", "v"),
    HIDDEN: ("#6a51a3", "P"),
}
"""Colour and marker of each arm in the figure."""


def tested(found: Evidence, arm: str) -> Trial:
    """The chosen trial of an arm, in the seeds of the test."""
    (trial,) = found.trials(arm, "test")
    return trial


def table(found: Evidence, arms: Sequence[str] = search.ARMS) -> str:
    """What was chosen for each arm, and what it reached in the seeds of the test; each is compared
    with the last AdamW above it."""
    lines = [
        "| arm | lr | decay or gain | warm-up | final lr | mean loss | minus AdamW | final gain |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm in arms:
        trial, own = tested(found, arm), "-"
        settings = dict(trial.cells[0].settings)
        lr, warmup, final = (settings.pop(name) for name in ("lr", "warmup", "min_lr"))
        value = f"{next(iter(settings.values())):g}" if settings else "-"
        if re.split(", steps|, repeated", arm)[0] == ADAMW:
            base = trial
        else:
            own = str(difference(trial, base))
        lines.append(
            f"| {arm} | {lr:.4f} | {value} | {warmup} | {final:g} | {trial.mean():.4f} | {own} "
            f"| {trial.mean('gain'):.2f} |"
        )
    return "\n".join(lines)


def longer(found: Evidence) -> str:
    """The decays and the ratios that were tried with three times the steps: mean losses of the
    three seeds of the tuning, and of the seeds of the test for those that were tested."""
    lines = ["| arm | value | mean loss, tuning | mean loss, test | final gain |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for arm in [arm for arm in remarks.CHOSEN if found.trials(remarks.LONG.name(arm))]:
        key, name = search.KINDS[arm].key, remarks.LONG.name(arm)
        tuning, test = (
            {t.setting(key): t for t in found.trials(name, part)} for part in ("tuning", "test")
        )
        for value in sorted({*tuning, *test}):
            trial = tuning.get(value) or test[value]
            old, new = (
                f"{by_value[value].mean():.4f}" if value in by_value else "-"
                for by_value in (tuning, test)
            )
            gain = f"{trial.mean('gain'):.2f}"
            lines.append(f"| {arm} | {key} {value:g} | {old} | {new} | {gain} |")
    return "\n".join(lines)


def fit(found: Evidence) -> str:
    """The losses on the text that is trained on and on other text, once seen and repeated."""
    lines = ["| arm | training loss | validation loss | validation minus training |"]
    lines.append("| --- | --- | --- | --- |")
    for arm in REPEATED_ARMS:
        trial = tested(found, arm)
        train, loss = trial.mean("loss"), trial.mean()
        lines.append(f"| {arm} | {train:.4f} | {loss:.4f} | {loss - train:+.4f} |")
    return "\n".join(lines)


def tuned_before(found: Evidence) -> str:
    """AdamWN on the repeated text beside AdamW with the settings of each of its two searches."""
    again = rounds.AGAIN.name
    (before,) = found.trials(rounds.TUNED_BEFORE)
    after, ours = tested(found, again(ADAMW)), tested(found, again(ADAMWN))
    lines = ["| AdamW, repeated text | settings | mean loss | AdamWN minus it |"]
    lines.append("| --- | --- | --- | --- |")
    for name, trial in (("as `rounds` tuned it", after), ("as `repeated` tuned it", before)):
        settings = trial.cells[0].trial
        lines.append(f"| {name} | {settings} | {trial.mean():.4f} | {difference(ours, trial)} |")
    return "\n".join(lines)


def claims(folder: Path = RESULTS) -> str:
    """The outcome of every claim."""
    lines = ["| claim | outcome | numbers |", "| --- | --- | --- |"]
    for claim, finding in judge(open_folder(folder)).findings:
        numbers = re.sub(", chosen by seeds .*? and tested by others", "", finding.text())
        numbers = numbers.split(": ", 1)[1]
        lines.append(f"| {claim.name} | **{finding.outcome}** | {numbers} |")
    return "\n".join(lines)


def draw(found: Evidence) -> None:
    """The losses of all trials in order, and the differences to AdamW in the seeds of the test."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), width_ratios=(1, 1.15))
    for arm, (colour, _) in STYLES.items():
        losses = sorted(t.by_seed[0].value() for t in found.trials(arm))
        left.plot(range(1, len(losses) + 1), losses, color=colour, label=arm)
    left.set_ylim(4.1, 5.0)
    left.set_xlabel("trials with seed 0, from the best to the worst")
    left.set_ylabel("validation loss")
    left.legend(frameon=False, fontsize=9)
    base = tested(found, ADAMW)
    rest = [arm for arm in STYLES if arm != ADAMW]
    for place, arm in enumerate(rest):
        colour, marker = STYLES[arm]
        trial = tested(found, arm)
        gaps = [a - b for a, b in zip(trial.values(), base.values(), strict=True)]
        spread = [place + 0.02 * (i - len(gaps) / 2) for i in range(len(gaps))]
        right.plot(spread, gaps, marker, color=colour, alpha=0.6, markersize=5, linestyle="")
        right.plot(place, statistics.fmean(gaps), "_", color="black", markersize=22)
    right.axhline(0, color="black", linewidth=1)
    right.set_xticks(range(len(rest)), [textwrap.fill(arm, 12) for arm in rest], fontsize=9)
    right.set_ylabel("validation loss minus AdamW's, same seed")
    right.set_title("the chosen settings in twenty fresh seeds, and their means", fontsize=10)
    save(figure, "search.png")


def draw_paths(found: Evidence) -> None:
    """The norm over the run, of AdamW in every seed, and of all arms on average; and the
    differences to AdamW. The arms of AdamWN are logged four times only."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(1.6, 1))
    base = tested(found, ADAMW)
    styles = (("#d62728", "-"), ("#2171b5", "o"), ("#8a8a8a", "s--"))
    for place, (arm, (colour, style)) in enumerate(zip(follow.ARMS, styles, strict=True)):
        trial = tested(found, arm)
        curves = [record.curves["ratio"] for record in trial.records]
        for steps, ratios in curves if arm == ADAMW else ():
            left.plot(steps, ratios, color=colour, linewidth=0.4, alpha=0.5)
        means = [statistics.fmean(values) for values in zip(*(r for _, r in curves), strict=True)]
        left.plot(curves[0][0], means, style, color=colour, label=arm, zorder=3)
        if arm != ADAMW:
            gaps = [a - b for a, b in zip(trial.values(), base.values(), strict=True)]
            spread = [place + 0.02 * (i - len(gaps) / 2) for i in range(len(gaps))]
            right.plot(spread, gaps, style[0], color=colour, alpha=0.7, markersize=5)
            right.plot(place, statistics.fmean(gaps), "_", color="black", markersize=22)
    left.set_xlabel("step")
    left.set_ylabel("norm / initial norm")
    left.legend(frameon=False, fontsize=9)
    right.axhline(0, color="#d62728", linewidth=1)
    right.set_xticks((1, 2), [textwrap.fill(arm, 18) for arm in follow.ARMS[1:]], fontsize=9)
    right.set_ylabel("validation loss minus AdamW's, same seed")
    save(figure, "follow.png")


def save(figure: Figure, name: str) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / name, dpi=120)


if __name__ == "__main__":
    runs = evidence(RESULTS)
    draw(runs)
    print(table(runs), claims(), sep="\n\n", end="\n\n")
    draw_paths(evidence(FOLLOW))
    tuned = (
        (RISE, rise),
        (FOLLOW, follow),
        (SHAPE, shape),
        (TUNED_WALK, tuned_walk),
        (HORIZON, horizon),
        (GROWTH, horizon),
        (LONGEST, longest),
    )
    for folder, study in tuned:
        print(table(evidence(folder), study.ARMS), claims(folder), sep="\n\n", end="\n\n")
    for folder in (REPEATED, ROUNDS):
        runs = evidence(folder)
        print(table(runs, REPEATED_ARMS), claims(folder), fit(runs), sep="\n\n", end="\n\n")
    print(tuned_before(runs), end="\n\n")
    for folder in (REMARKS, KEPT):
        print(claims(folder), longer(evidence(folder)), sep="\n\n", end="\n\n")
