"""Draws docs/figures/transfer.png and transfer_tiny.png from the records of the study ``transfer``,
and prints the tables of regrets and differences on the page transfer.md:
``python docs/figures/make_transfer.py``.

It reads records and trains nothing. What regret is, is defined in ``normcontrol.lab``.
"""

from __future__ import annotations

import itertools
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


def draw(found: Losses, path: Path) -> None:
    """Two panels: the loss by learning rate, and the loss minus that of AdamW with the same seed in
    every condition. In the first the lines are the runs with the first seed and the crosses those
    with other seeds; in the second every mark is a run."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 4.6), layout="constrained", width_ratios=(2, 3)
    )
    base = found[regret.ADAMW]
    rates = sorted((c for c in base if c.axis in ("base", "lr")), key=learning_rate)
    for arm, (colour, marker) in STYLES.items():
        first = {learning_rate(c): found[arm][c][0] for c in rates if 0 in found[arm][c]}
        more = [(learning_rate(c), v) for c in rates for s, v in found[arm][c].items() if s]
        left.plot(list(first), list(first.values()), color=colour, marker=marker, label=arm)
        left.plot(*zip(*more, strict=True), color=colour, marker="x", linestyle="none")
    left.set_xscale("log", base=2)
    left.set_xticks([learning_rate(c) for c in rates], [f"{learning_rate(c):g}" for c in rates])
    left.set_xlabel("peak learning rate (0.002 is the base)")
    left.set_ylabel("validation loss")
    left.legend(frameon=False, title="lines: seed 0, crosses: other seeds", fontsize=9)

    shown = [c for c in ordered() if base[c]]
    others = [arm for arm in STYLES if arm != regret.ADAMW]
    for place, arm in enumerate(others):
        colour, marker = STYLES[arm]
        points = [
            (x + 0.16 * (place - 1.5), loss - base[c][seed])
            for x, c in enumerate(shown)
            for seed, loss in found[arm][c].items()
        ]
        right.plot(
            *zip(*points, strict=True),
            color=colour, marker=marker, linestyle="none", label=arm, alpha=0.8,
        )  # fmt: skip
    right.axhline(0, color="black", linewidth=0.8)
    for x, (one, other) in enumerate(itertools.pairwise(shown)):
        if one.axis != other.axis:
            right.axvline(x + 0.5, color="#dddddd", linewidth=0.8)
    right.set_xticks(range(len(shown)), [str(c) for c in shown], rotation=45, ha="right")
    right.set_ylabel("validation loss minus AdamW's, same seed")
    right.legend(frameon=False, title="each mark is a run", fontsize=9)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw_axes(found: Evidence, path: Path) -> None:
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


def learning_rate(condition: regret.Condition) -> float:
    return transfer.changed(transfer.PLANS["small"].base, condition).optim.lr


def main() -> None:
    for scale in ("tiny", "small"):
        found = evidence(scale)
        for text in (table(found), differences(losses(found)), worst(found)):
            print(text, end="\n\n")
        for arm, (mean, seeds) in every_mean(found).items():
            print(f"mean regret of {arm}: {mean} ({seeds} seeds)")
        print(f"in the seeds by which nothing was tuned: {means(found)}", end="\n\n")
    draw(losses(evidence("small")), HERE / "transfer.png")
    draw_axes(evidence("tiny"), HERE / "transfer_tiny.png")


if __name__ == "__main__":
    main()
