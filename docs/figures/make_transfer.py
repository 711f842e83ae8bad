"""Draws docs/figures/transfer.png from the records of the study ``transfer``, and prints the table
of regrets on the page transfer.md: ``python docs/figures/make_transfer.py``.

It reads records and trains nothing. What regret is, is defined in ``normcontrol.lab``.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from normcontrol.lab.studies import regret, transfer
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.study.evidence import Evidence

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "results" / "transfer-small"
STYLES = {
    regret.FIXED: ("#2171b5", "o"),
    regret.HIDDEN: ("#6baed6", "v"),
    regret.ADAMW: ("#d62728", "s"),
    regret.TIMESCALE: ("#e08214", "D"),
    regret.ADAMC: ("#8a8a8a", "^"),
}
"""Colour and marker of each arm. The tuned gain is left out: where it is the one that is not tuned,
its runs are the same."""

Losses = dict[str, dict[float, dict[int, float]]]
"""By arm, learning rate and seed."""


def evidence() -> Evidence:
    """The cells and records of the study."""
    ledger = open_folder(RESULTS)
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


def losses(found: Evidence) -> Losses:
    """Final validation losses of the settings that are carried over, on the axis of the learning
    rate."""
    out: Losses = defaultdict(lambda: defaultdict(dict))
    rates = [c for c in transfer.conditions() if c.axis == "lr"]
    factors = {str(regret.BASE): 1.0, **{str(c): float(Fraction(c.factor)) for c in rates}}
    for cell in found.cells:
        arm, _, where = cell.arm.partition(regret.AT)
        factor, record = factors.get(where or str(regret.BASE)), found.done.of(cell)
        if cell.part != regret.TUNING and factor is not None and record is not None:
            lr = transfer.PLANS["small"].base.optim.lr * factor
            out[arm][lr][cell.seed] = record.value()
    return out


def draw(found: Losses, path: Path) -> None:
    """Two panels: the loss, and the loss minus that of AdamW with the same rate and seed.

    Losses at neighbouring rates differ by far more than arms do at one rate, hence the second. The
    lines are the runs with the first seed, the crosses those with other seeds.
    """
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    base = found[regret.ADAMW]
    for arm, (colour, marker) in STYLES.items():
        for ax, less in zip(axes, (False, True), strict=True):
            points = {
                (lr, seed): loss - (base[lr][seed] if less else 0.0)
                for lr, by_seed in sorted(found[arm].items())
                for seed, loss in by_seed.items()
            }
            first = {lr: value for (lr, seed), value in points.items() if seed == 0}
            more = [(lr, value) for (lr, seed), value in points.items() if seed != 0]
            ax.plot(list(first), list(first.values()), color=colour, marker=marker, label=arm)
            if more:
                ax.plot(*zip(*more, strict=True), color=colour, marker="x", linestyle="none")
    rates = sorted(base)
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xticks(rates, [f"{lr:g}" for lr in rates])
        ax.set_xlabel("peak learning rate (0.002 is the base)")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("validation loss")
    axes[1].set_ylabel("validation loss minus AdamW's, same seed")
    axes[0].legend(frameon=False, title="lines: seed 0, crosses: other seeds", fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    found = evidence()
    print(table(found))
    draw(losses(found), HERE / "transfer.png")
    print("docs/figures/transfer.png")


if __name__ == "__main__":
    main()
