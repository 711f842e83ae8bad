"""Prints the numbers that the docs take from single records under results/: they are in no table of
docs/results/. ``tests/project/test_results_in_docs.py`` compares the pages with them.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from normcontrol.lab.study.records import Record, read_all
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.optimizers import lr_at

RESULTS = Path(__file__).parents[1] / "results"
KEYS = {"lr": "lr", "ratio": "ratio", "weight_decay": "weight_decay", "init_seed": "seed"}


def records(study: str) -> list[Record]:
    """All finished runs of a study."""
    found, _ = read_all(RESULTS / study)
    return [record for record in found if record.good]


def label(record: Record) -> str:
    """The settings of a run that the docs name."""
    config = record.config
    unused = "weight_decay" if config["ratio"] is not None else "ratio"
    return " ".join(
        [config["optimizer"]]
        + (["from scaled weights"] if config["init_scale"] != 1 else [])
        + [f"{name}={config[key]:g}" for key, name in KEYS.items() if key != unused]
    )


def too_short(study: str) -> dict[int, tuple[list[Record], float]]:
    """By number of steps: the records whose ``seconds`` cannot be those of the whole run, and the
    least seconds of the others. They have more than a fifth less time for each step than the
    fastest run with fewer steps."""
    by_steps: dict[int, list[Record]] = {}
    for record in records(study):
        by_steps.setdefault(record.config["steps"], []).append(record)
    found, fastest = {}, None
    for steps, runs in sorted(by_steps.items()):
        runs.sort(key=lambda r: r.seconds)
        least = 0.8 * steps * fastest if fastest else 0.0
        short = [r for r in runs if r.seconds < least]
        others = runs[len(short)].seconds
        if short:
            found[steps] = short, others
        fastest = min(fastest or others / steps, others / steps)
    return found


def lead_on_owt() -> dict[str, float]:
    """How much lower AdamWN's loss on owt is than AdamW's, in seed 0 of claims-small: the chosen
    setting of AdamWN against decays of AdamW at the same learning rate."""
    runs = {label(r): r.final["val_loss_owt"] for r in records("claims-small") if _main(r)}
    own = runs["AdamWN lr=0.002 ratio=2 seed=0"]
    decays = (0.1, 0.3, 1)
    return {f"{d:g}": runs[f"AdamW lr=0.002 weight_decay={d:g} seed=0"] - own for d in decays}


def _main(record: Record) -> bool:
    """True for the runs of 1,500 steps with the rate 0.1 and a start that is not scaled."""
    config = record.config
    return config["steps"] == 1500 and config["rate"] == 0.1 and config["init_scale"] == 1


def integral(steps: list[int], values: list[float]) -> float:
    """The integral of a recorded curve, linear between its points."""
    points = list(zip(steps, values, strict=True))
    return sum((b - a) * (x + y) / 2 for (a, x), (b, y) in pairwise(points))


def effective_decays() -> dict[str, dict[str, float]]:
    """The decay that AdamWN applied in the runs of 1,500 steps with the rate 0.1 in claims-small:
    by which factor it and the learning rate fell from the middle to the end, and the decays with
    which AdamW and AdamC would have subtracted as much from the first record to the last."""
    found = {}
    for record in records("claims-small"):
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in record.config.items()}
        config = Config().with_(**given)
        if not (given["optimizer"] == "AdamWN" and given["steps"] == 1500 and given["rate"] == 0.1):
            continue
        steps, decays = record.curves["decay"]
        lrs = [lr_at(config, step) for step in steps]
        middle = steps.index(750)
        total = integral(steps, [lr * decay for lr, decay in zip(lrs, decays, strict=True)])
        found[label(record)] = {
            "lr fell": lrs[middle] / lrs[-1],
            "decay fell": decays[middle] / decays[-1],
            "AdamW": total / integral(steps, lrs),
            "AdamC": total * given["lr"] / integral(steps, [lr**2 for lr in lrs]),
        }
    return found


def main() -> None:
    print("Records whose seconds cannot be those of whole runs:")
    for study in ("claims-small", "claims-tiny"):
        for steps, (short, least) in too_short(study).items():
            print(f"  {study}, {steps:,} steps, where others need at least {least:.1f} s:")
            for record in short:
                print(f"    {record.seconds:5.1f} s  {label(record)}")
    print("AdamWN's lead on owt, claims-small, lr=0.002 ratio=2 seed=0, by AdamW's decay:")
    for decay, lead in lead_on_owt().items():
        print(f"  {decay}: {lead:.4f}")
    print("Effective decay of AdamWN, 1,500 steps of claims-small, rate 0.1:")
    for name, numbers in effective_decays().items():
        print(f"  {name}: " + ", ".join(f"{key} {x:.3f}" for key, x in numbers.items()))


if __name__ == "__main__":
    main()
