"""Fits the law C ~ lr^-p to one half of the committed AdamW runs, and tests it on the other half.

The half of a setting was fixed before any error was computed: it is the parity of the first byte of
the SHA-256 of its :func:`name`. Even: the fit. Odd: the test. All runs have the first seed.

The exponents are fitted to the runs of the first model alone. In the test, the constants come from
one run of the fit's half, each in turn, and the norm of every run of the other half is predicted.
So an error includes the choice of the run calibrated on.
"""

from __future__ import annotations

import hashlib
import math
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

from predict_runs import TIED, Run, records

from normcontrol import predict
from normcontrol.lab.training.run_folder import revision
from normcontrol.watch.trace import EXPONENTS

RESULTS = Path(__file__).parents[1] / "results"
STUDIES = {
    "45 M weights": ("claims-small", "family-small"),
    "0.17 M weights": ("claims-tiny", "family-tiny"),
    "18 M weights, start at gain 0.8": ("transfer-small",),
}
"""The studies with the runs of each model. Runs with another width, depth or batch are left out."""
GRID = [round(0.05 * i, 2) for i in range(31)]
"""The exponents that are tried."""
KINDS = ("all", "hidden matrices")


def name(run: Run) -> str:
    """The name of a setting, whose hash decides its half."""
    c = run.config
    return (
        f"width {c.model.width}, layers {c.model.layers}, batch {c.data.tokens_per_step}, "
        f"steps {c.run.steps}, lr {c.optim.lr:g}, decay {c.optim.weight_decay:g}"
    )


def is_test(run: Run) -> bool:
    """True if the run belongs to the half for the test."""
    return hashlib.sha256(name(run).encode()).digest()[0] % 2 == 1


def load(studies: Sequence[str]) -> list[Run]:
    """The runs of the most frequent model of some studies."""
    found = {record.id: record for study in studies for record in records(RESULTS / study)}

    def model(config: dict[str, Any]) -> list[Any]:
        return [config.get(key) for key in ("width", "layers", "tokens_per_step", "init_gain")]

    common = [model(record.config) for record in found.values()]
    most = max(common, key=common.count)
    return [Run(record) for record in found.values() if model(record.config) == most]


def error(a: Run, b: Run, classes: Sequence[str], exponent: Callable[[str], float]) -> float:
    """The relative error of the norm of b, with constants from a."""
    predicted = measured = 0.0
    for c in (c for c in b.classes if c.name in classes):
        (first, last), (start, end) = ([r.norms[s][c.name] ** 2 for s in ends(r)] for r in (a, b))
        (kept_a, noise_a), (kept_b, noise_b) = (
            [x[-1] for x in r.walk(exponent(c.name))] for r in (a, b)
        )
        added = (last - kept_a * first) / noise_a * noise_b  # number of weights times C times noise
        predicted += max(kept_b * start + added, 0.0)
        measured += end
    return math.sqrt(predicted / measured) - 1


def ends(run: Run) -> tuple[int, int]:
    return min(run.norms), max(run.norms)


def rms(errors: Sequence[float]) -> float:
    return math.sqrt(sum(e * e for e in errors) / len(errors))


def fit(runs: Sequence[Run]) -> dict[str, float]:
    """The exponents with the smallest root mean square of the errors over all pairs of runs: of the
    hidden matrices, and then, given that, of the tied embedding."""
    everything = [c.name for c in runs[0].classes]
    hidden = [c.name for c in runs[0].classes if c.hidden]

    def best(classes: Sequence[str], law: Callable[[str, float], float]) -> float:
        return min(
            GRID,
            key=lambda p: rms(
                [error(a, b, classes, lambda n: law(n, p)) for a, b in permutations(runs, 2)]
            ),
        )

    matrices = best(hidden, lambda _, p: p)
    return {
        "hidden matrices": matrices,
        "tied embedding": best(everything, lambda n, p: p if n in TIED else matrices),
        "one exponent for all weights": best(everything, lambda _, p: p),
    }


def predicted(a: Run, b: Run, kind: str, law: bool) -> tuple[float, bool]:
    """The error of the library's prediction of b, calibrated on a, and whether the measured norm
    lies within its bounds. Without the law C is constant."""
    constants = predict.calibrate(a.trace(), a.tied)
    if not law:
        constants = {n: replace(c, exponent=0.0) for n, c in constants.items()}
    classes = [c for c in b.classes if c.hidden or kind == "all"]
    start, end = (math.sqrt(sum(b.norms[s][c.name] ** 2 for c in classes)) for s in ends(b))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # doubts about the tied embedding
        p = predict.adamw(classes, b.lrs, b.decay, constants=constants)
    return p.ratio * start / end - 1, p.low <= end / start <= p.high


def needed(pairs: Sequence[tuple[Run, Run]], kind: str, moved: float | None = None) -> float:
    """The smallest factor, in steps of 0.1, by which the bounds of C have to be widened so that
    they contain the measured norm of the second run of every pair, calibrated on the first. With
    ``moved`` it is that of the tied embedding, and ``moved`` is the one of all other classes."""
    constants = {a: predict.calibrate(a.trace(), a.tied) for a, _ in pairs}

    def contained(a: Run, b: Run, factor: float) -> bool:
        low = high = measured = 0.0
        for c in (c for c in b.classes if c.hidden or kind == "all"):
            start, end = (b.norms[s][c.name] ** 2 for s in ends(b))
            constant, by = constants[a][c.name], factor if c.tied else moved or factor
            kept, noise = (x[-1] for x in b.walk(constant.exponent))
            noise *= c.count * constant.lr**constant.exponent
            bounds = [x * y for x in (constant.low, constant.high) for y in (by, 1 / by)]
            low += max(kept * start + min(bounds) * noise, 0.0)
            high += max(kept * start + max(bounds) * noise, 0.0)
            measured += end
        return low <= measured <= high

    factors = (round(1 + 0.1 * i, 1) for i in range(100))
    return next(f for f in factors if all(contained(a, b, f) for a, b in pairs))


def widening(models: Sequence[Sequence[Run]]) -> list[float]:
    """The factors that are needed within each of some sets of runs, of all classes and of tied
    embeddings."""
    pairs = [pair for runs in models for pair in permutations(runs, 2)]
    moved = needed(pairs, "hidden matrices")
    return [moved, needed(pairs, "all", moved)]


def ranges(runs: Sequence[Run]) -> dict[str, list[float]]:
    """The smallest and largest C of every class, each from its own run."""
    found = [predict.calibrate(run.trace()) for run in runs]
    values = {n: [constants[n].value for constants in found] for n in found[0]}
    return {n: [min(v), max(v)] for n, v in values.items()}


def halves() -> dict[str, Any]:
    """Fit, then test. The exponents in use are those of the library."""
    models = {title: load(studies) for title, studies in STUDIES.items()}
    fitted = fit([r for r in next(iter(models.values())) if not is_test(r)])
    rows = []
    for title, runs in models.items():
        pair = [r for r in runs if not is_test(r)], [r for r in runs if is_test(r)]
        for kind in KINDS:
            row: dict[str, Any] = {"runs": title, "kind": kind, "fit": len(pair[0])}
            row["test"] = len(pair[1])
            for key, law in (("constant", False), ("law", True)):
                found = [predicted(a, b, kind, law) for a, b in product(*pair)]
                row[key] = {"rms": rms([e for e, _ in found])}
                row[key]["worst"] = max((e for e, _ in found), key=abs)
                row[key]["outside"] = sum(not within for _, within in found)
            row["pairs"] = len(found)
            rows.append(row)
    return {
        "command": shlex.join(["python", "benchmarks/predict.py", *sys.argv[1:]]),
        "revision": revision(),
        "fitted": fitted,
        "in use": dict(zip(("hidden matrices", "tied embedding"), EXPONENTS, strict=True)),
        "rows": rows,
        "widening": {
            "first halves": widening(
                [[r for r in runs if not is_test(r)] for runs in models.values()]
            ),
            "all runs": widening(list(models.values())),
        },
        "C": {title: ranges(runs) for title, runs in models.items()},
    }


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    lines = [
        "| runs | | fit, test | constant C: rms error | worst | C ~ lr^-p: rms error | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [row["runs"], row["kind"], f"{row['fit']}, {row['test']}"]
        for key in ("constant", "law"):
            worst = f"{row[key]['worst']:+.0%}".replace("%", " %")
            cells += [f"{100 * row[key]['rms']:.1f} %", worst]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
