"""Prints the tables of the page budget.md from the records of the study ``budget``:
``python docs/figures/make_budget.py``.

It reads records and trains nothing.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from normcontrol.lab.studies import budget
from normcontrol.lab.studies.budget import ARMS, RIVALS, Runs
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.studies.settled import ADAMWN
from normcontrol.lab.study.evidence import Evidence
from normcontrol.lab.study.ledger import STUDY
from normcontrol.lab.study.statistics import average, steps_to
from normcontrol.lab.study.verdict import judge

RESULTS = Path(__file__).parents[2] / "results" / "budget-tiny"
EVERY = (*budget.FACTORS, budget.LONGEST)


def runs() -> Runs:
    ledger = open_folder(RESULTS)
    done = ledger.results()
    return budget.runs(Evidence(ledger.cells(done), done))


def seeds(found: Runs, factor: int) -> list[int]:
    """The seeds that have all arms at a horizon."""
    return [s for s in budget.SEEDS if all((arm, factor, s) in found.records for arm in ARMS)]


def horizons(found: Runs) -> list[int]:
    return [factor for factor in EVERY if seeds(found, factor)]


def losses(found: Runs) -> str:
    """The final loss of every run of the seeds that have all arms there."""
    rows = [["steps", "arm", *map(str, budget.SEEDS), "mean"]]
    rows.append(["---"] * len(rows[0]))
    for factor in horizons(found):
        for arm in ARMS:
            there = {s: found.loss(arm, factor, s) for s in seeds(found, factor)}
            cells = [f"{there[s]:.4f}" if s in there else "-" for s in budget.SEEDS]
            rows.append([f"x{factor}", arm, *cells, f"{statistics.fmean(there.values()):.4f}"])
    return table(rows)


def gaps(found: Runs) -> str:
    """AdamWN minus each arm of AdamW by horizon, along the run."""
    shares = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
    rows = [["steps", "AdamWN minus", "pairs", *(f"{share:.0%} of the run" for share in shares)]]
    rows.append(["---"] * len(rows[0]))
    for factor in horizons(found):
        some = seeds(found, factor)
        for rival in RIVALS:
            by_share = [
                str(average([found.gap(rival, factor, s, share) for s in some])) for share in shares
            ]
            rows.append([f"x{factor}", rival, str(len(some)), *by_share])
    return table(rows)


def by_horizon(found: Runs) -> str:
    """How many times the steps one arm needs, with a full schedule, for the loss of the other."""
    rows = [["for the loss of", "at", "this arm", "needs, times the steps"], ["---"] * 4]
    for rival in RIVALS:
        for factor in found.factors:
            for one, other in ((ADAMWN, rival), (rival, ADAMWN)):
                needed = [_times(found, other, one, factor, seed) for seed in found.seeds]
                rows.append([one, f"x{factor}", other, _each(needed)])
    return table(rows)


def _times(found: Runs, arm: str, other: str, factor: int, seed: int) -> float | None:
    """By which factor the steps of ``arm`` differ from those of ``other`` at the same loss."""
    places = list(range(len(found.factors)))
    curve = [found.loss(arm, f, seed) for f in found.factors]
    level = found.loss(other, factor, seed)
    place = steps_to(places, curve, level)
    if place is None or (place == 0 and curve[0] < level):
        return None
    return 2**place / factor


def within(found: Runs) -> str:
    """The share of its steps after which a curve reaches the other's final loss."""
    rows = [["steps", "this arm", "reaches the end of", "after this share of the steps"]]
    rows.append(["---"] * 4)
    for factor in found.factors:
        for rival in RIVALS:
            for one, other in ((ADAMWN, rival), (rival, ADAMWN)):
                shares = [_share(found, one, other, factor, seed) for seed in found.seeds]
                rows.append([f"x{factor}", one, other, _each(shares)])
    return table(rows)


def _share(found: Runs, arm: str, other: str, factor: int, seed: int) -> float | None:
    steps, values = found.records[arm, factor, seed].curves["val_loss"]
    reached = steps_to(steps, values, found.loss(other, factor, seed))
    return None if reached is None else reached / steps[-1]


def _each(every: list[float | None]) -> str:
    """The mean over seeds with the lowest and highest; in how many it was not reached."""
    known = [value for value in every if value is not None]
    lost = f"outside these runs in {len(every) - len(known)} of {len(every)} seeds"
    if not known:
        return lost
    words = f"{statistics.fmean(known):.2f} ({min(known):.2f} to {max(known):.2f})"
    return words if len(known) == len(every) else f"{words}; {lost}"


def claims() -> str:
    """The outcome of every claim."""
    rows = [["claim", "outcome", "numbers"], ["---"] * 3]
    for claim, finding in judge(open_folder(RESULTS)).findings:
        rows.append([claim.name, f"**{finding.outcome}**", finding.text() or "-"])
    return table(rows)


def table(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    if not (RESULTS / STUDY).exists():
        print(f"{RESULTS.name} was not run yet.")
        return
    found = runs()
    for part in (losses(found), gaps(found), claims(), by_horizon(found), within(found)):
        print(part, end="\n\n")


if __name__ == "__main__":
    main()
