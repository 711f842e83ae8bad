"""Draws docs/figures/transfer.png and transfer_tiny.png from the records of the study ``transfer``,
and prints the tables of regrets and differences on the page transfer.md:
``python docs/figures/make_transfer.py``.

It reads records and trains nothing. What regret is, is defined in ``normcontrol.lab``.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from normcontrol.lab.studies import regret, transfer
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.study.evidence import Evidence
from normcontrol.lab.study.statistics import paired

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "results"
STYLES = {
    regret.FIXED: ("#2171b5", "o"),
    regret.HIDDEN: ("#6baed6", "v"),
    regret.ADAMW: ("#d62728", "s"),
    regret.TIMESCALE: ("#e08214", "D"),
    regret.ADAMC: ("#8a8a8a", "^"),
}
"""Colour and marker of each arm. The tuned gain is left out: where it is the one that is not tuned,
its runs are the same."""

Losses = dict[str, dict[regret.Condition, dict[int, float]]]
"""By arm, condition and seed."""


def evidence(scale: str) -> Evidence:
    """The cells and records of the study at a scale."""
    ledger = open_folder(RESULTS / f"transfer-{scale}")
    done = ledger.results()
    return Evidence(ledger.cells(done), done)


def table(found: Evidence) -> str:
    """Mean regret by condition and arm, with the number of seeds, in Markdown.

    Worst and mean over conditions are left out: with unequal numbers of seeds they would compare
    different seeds. The claims compare them seed by seed.
    """
    rows = [r for r in regret.table(found, transfer.conditions()) if r[0] not in ("worst", "mean")]
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def differences(found: Losses) -> str:
    """AdamWN at gain 0.8 minus each rival by condition, paired over seeds, in Markdown."""
    rows = [["AdamWN at gain 0.8 minus", *regret.RIVALS, "seeds"], ["---"] * 4]
    for condition in ordered():
        by_arm = [found[arm][condition] for arm in (regret.FIXED, *regret.RIVALS)]
        seeds = sorted(set.intersection(*map(set, by_arm)))
        mine, *theirs = [[losses[seed] for seed in seeds] for losses in by_arm]
        if seeds:
            less = [str(paired(mine, other)) for other in theirs]
            rows.append([str(condition), *less, str(len(seeds))])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def worst(found: Evidence) -> str:
    """By axis, the worst regret of AdamWN at gain 0.8 minus that of each rival, paired over all
    seeds, and over those by which nothing was tuned; in Markdown."""
    regrets, arms = regret.Regrets.of(found), (regret.FIXED, *regret.RIVALS)
    tuned = {cell.seed for cell in found.cells if cell.part == regret.TUNING}
    rows = [["worst regret minus that of", *2 * (*regret.RIVALS, "seeds")], ["---"] * 7]
    axes = {
        axis: [c for c in ordered() if c.axis in ("base", axis)] for axis in transfer.CONDITIONS
    }
    for name, conditions in {**axes, "all": ordered()}.items():
        every = regrets.seeds(arms, conditions)
        row = [name]
        for seeds in (every, [s for s in every if s not in tuned]):
            mine, *theirs = [regrets.over(arm, conditions, seeds) for arm in arms]
            row += [str(paired(mine, other)) if seeds else "-" for other in theirs]
            row.append(", ".join(map(str, seeds)) or "-")
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def means(found: Evidence) -> str:
    """The mean regrets over all conditions of AdamWN at gain 0.8 and of each rival, of the seeds by
    which nothing was tuned."""
    regrets, arms = regret.Regrets.of(found), (regret.FIXED, *regret.RIVALS)
    seeds, _ = regret.tested(found, regrets.seeds(arms, ordered()))
    *most, last = [
        f"{statistics.fmean(regrets.over(arm, ordered(), seeds, statistics.fmean)):.4f}"
        for arm in arms
    ]
    return f"{', '.join(most)} and {last}"


def every_mean(found: Evidence) -> dict[str, tuple[str, int]]:
    """By arm, the mean regret over all conditions in the seeds that have all of them, those of the
    tuning too, and the number of these seeds."""
    regrets, out = regret.Regrets.of(found), {}
    for arm in STYLES:
        seeds = regrets.seeds([arm], ordered())
        mean = statistics.fmean(regrets.over(arm, ordered(), seeds, statistics.fmean))
        out[arm] = f"{mean:.4f}", len(seeds)
    return out


def final_gain(found: Evidence, arm: str) -> str:
    """The gain at which the runs with the carried-over setting of an arm ended, mean over seeds."""
    cells = (c for c in found.cells if c.arm == arm and c.part != regret.TUNING)
    records = map(found.done.of, cells)
    return f"{statistics.fmean(record.final['gain'] for record in records if record):.2f}"


def ordered() -> list[regret.Condition]:
    """The base, then the conditions axis by axis with rising factors."""
    axes = list(transfer.CONDITIONS)
    some = sorted(transfer.conditions(), key=lambda c: (axes.index(c.axis), Fraction(c.factor)))
    return [regret.BASE, *some]


def losses(found: Evidence) -> Losses:
    """Final validation losses of the settings that are carried over."""
    out: Losses = defaultdict(lambda: defaultdict(dict))
    names = {str(c): c for c in ordered()}
    for cell in found.cells:
        arm, _, where = cell.arm.partition(regret.AT)
        record = found.done.of(cell)
        if cell.part != regret.TUNING and record is not None:
            out[arm][names[where or str(regret.BASE)]][cell.seed] = record.value()
    return out


def draw(found: Evidence, path: Path) -> None:
    """One panel for each axis, one line for each arm: the mean of the regret over the seeds by
    which nothing was tuned, with its standard error."""
    regrets = regret.Regrets.of(found)
    axes = list(transfer.CONDITIONS)
    figure, panels = plt.subplots(
        1, len(axes), figsize=(13, 3.6), layout="constrained", sharey=True
    )
    for axis, panel in zip(axes, panels, strict=True):
        some = sorted(
            (c for c in ordered() if c.axis in ("base", axis)),
            key=lambda c: Fraction(c.factor or "1"),
        )
        for place, (arm, (colour, marker)) in enumerate(STYLES.items()):
            seeds, _ = regret.tested(found, regrets.seeds([arm], some))
            values = [regrets.over(arm, [c], seeds) for c in some]
            panel.errorbar(
                [x + 0.06 * (place - 2) for x in range(len(some))],
                [statistics.fmean(v) for v in values],
                [statistics.stdev(v) / len(v) ** 0.5 for v in values],
                color=colour, marker=marker, markersize=4, linewidth=1, label=arm,
            )  # fmt: skip
        panel.set_title(axis)
        panel.set_xticks(range(len(some)), [f"x{c.factor or 1}" for c in some])
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("regret: loss above the lowest")
    panels[0].set_ylim(bottom=-0.004)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center", ncols=len(STYLES), frameon=False, fontsize=9,
    )  # fmt: skip
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    for scale, name in (("tiny", "transfer_tiny.png"), ("small", "transfer.png")):
        found = evidence(scale)
        draw(found, HERE / name)
        for text in (table(found), differences(losses(found)), worst(found)):
            print(text, end="\n\n")
        for arm, (mean, seeds) in every_mean(found).items():
            print(f"mean regret of {arm}: {mean} ({seeds} seeds)")
        print(f"in the seeds by which nothing was tuned: {means(found)}", end="\n\n")


if __name__ == "__main__":
    main()
