"""Draws docs/figures/settle.png from the records of the study ``settle``, and prints the tables of
the pages settle.md, gpt2.md, muon.md and larger.md, and one of longer.md:
``python docs/figures/make_settle.py``.

It reads records and trains nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from normcontrol.lab.studies import gpt2, larger, matched, predicted, settle
from normcontrol.lab.studies.muon import LESS_DECAY
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.studies.optimizers import MUON, MUON_CONTROLLED
from normcontrol.lab.studies.settled import (
    ADAMC,
    ADAMW,
    ADAMWN,
    ANGLE,
    FAST,
    HIDDEN,
    REPLAYED,
    SQRT,
    TENSOR,
)
from normcontrol.lab.studies.tuning import TUNING, Arm
from normcontrol.lab.study.comparison import choose
from normcontrol.lab.study.evidence import Evidence, Trial, difference
from normcontrol.lab.study.statistics import paired
from normcontrol.lab.study.verdict import judge
from normcontrol.lab.training.optimizers import lr_at

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "results" / "settle-small"
TINY = RESULTS.with_name("settle-tiny")
CONFIRMED = RESULTS.with_name("confirm-small")
MUONS = RESULTS.with_name("muon-tiny")
CAUSES = RESULTS.with_name("causes-tiny")
GPT2 = RESULTS.with_name("gpt2-small")
LARGER = RESULTS.with_name("larger-tiny")
MATCHED = RESULTS.with_name("matched-tiny")
CATCHUP = RESULTS.with_name("catchup-tiny")
PREDICTED = RESULTS.with_name("predicted-tiny")
STYLES = {
    ADAMW: ("#d62728", "s"),
    ADAMC: ("#8a8a8a", "^"),
    ADAMWN: ("#2171b5", "o"),
    REPLAYED: ("#6baed6", "v"),
}
"""Colour and marker of each arm in the figure."""


def evidence(folder: Path = RESULTS) -> Evidence:
    """The cells and records of a study."""
    ledger = open_folder(folder)
    done = ledger.results()
    return Evidence(ledger.cells(done), done)


def chosen(found: Evidence, arm: str) -> Trial:
    choice = choose(found.trials(arm))
    assert choice is not None
    return choice.trial


def tuning(found: Evidence, arms: Mapping[str, Arm] = settle.ARMS) -> str:
    """The trials of every tuned arm with seed 0, in the order in which they were run. An arm that
    is not tuned to the end has no best one."""
    rows = [["arm", "trials and their losses, the best one in bold"], ["---"] * 2]
    for arm in arms:
        if not found.trials(arm, TUNING):
            continue
        order = {c.trial: None for c in found.cells if (c.arm, c.part) == (arm, TUNING)}
        by_name = {t.settings: t for t in found.trials(arm, TUNING)}
        whole = order.keys() == by_name.keys()
        best = min(by_name.values(), key=lambda t: t.mean()) if whole else None
        words = []
        for name in filter(by_name.get, order):
            trial = by_name[name]
            text = f"{' '.join(f'{v:g}' for _, v in trial.cells[0].settings)}: {trial.mean():.4f}"
            words.append(f"**{text}**" if trial is best else text)
        rows.append([f"{arm} (lr, {arms[arm].key})", "; ".join(words)])
    return table(rows)


def seeds(found: Evidence) -> str:
    """The loss of every arm by fresh seed."""
    arms = dict.fromkeys((*STYLES, *(cell.arm for cell in found.cells)))
    tested = [arm for arm in arms if any(t.seeds != [0] for t in found.trials(arm))]
    trials = [chosen(found, arm) for arm in tested]
    every = [seed for seed in trials[0].seeds if seed]
    rows = [["validation loss, seed", *map(str, every), "mean", "s.d."]]
    rows.append(["---"] * len(rows[0]))
    for trial in trials:
        losses = {s: trial.values(seeds=[s])[0] for s in every if s in trial.by_seed}
        cells = [f"{losses[s]:.4f}" if s in losses else "-" for s in every]
        values = list(losses.values())
        spread = f"{statistics.stdev(values):.4f}" if len(values) > 1 else "-"
        rows.append([trial.name, *cells, f"{statistics.fmean(values):.4f}", spread])
    return table(rows)


def differences(found: Evidence) -> str:
    """Pairs of arms in the fresh seeds that both have, on both texts if there were two."""
    pairs = [(ADAMWN, ADAMW), (REPLAYED, ADAMWN), (ADAMWN, ADAMC), (REPLAYED, ADAMW)]
    pairs += [(ADAMC, ADAMW), (ANGLE, ADAMWN), (FAST, ADAMWN), (ADAMWN, SQRT)]
    pairs += [(ADAMWN, TENSOR), (ADAMWN, HIDDEN)]
    owt = any("val_loss_owt" in record.final for record in found.done.values())
    keys = {"validation loss": "val_loss"} | ({"on owt": "val_loss_owt"} if owt else {})
    rows = [["difference", *keys, "pairs", "detectable"]]
    rows.append(["---"] * len(rows[0]))
    for one, other in pairs:
        if not (found.trials(one) and found.trials(other)):
            continue
        trials = chosen(found, one), chosen(found, other)
        fresh = [seed for seed in trials[0].seeds if seed]
        less = [difference(*trials, key, fresh) for key in keys.values()]
        if less[0] is not None and less[0].detectable is not None:
            numbers = [*map(str, less), str(less[0].n), f"{less[0].detectable:.4f}"]
            rows.append([f"{one} minus {other}", *numbers])
    return table(rows)


def claims(folder: Path = RESULTS) -> str:
    """The outcome of every claim."""
    rows = [["claim", "outcome", "numbers"], ["---"] * 3]
    for claim, finding in judge(open_folder(folder)).findings:
        rows.append([claim.name, f"**{finding.outcome}**", finding.text() or "-"])
    return table(rows)


def confirmed() -> str:
    """Every pair of the study that confirms, on both texts, and its claim."""
    found = evidence(CONFIRMED)
    trials = chosen(found, ADAMWN), chosen(found, ADAMW)
    keys = ("val_loss", "val_loss_owt")
    rows = [["seed", "AdamWN", "AdamW", "AdamWN minus AdamW", "on owt"], ["---"] * 5]
    for seed in trials[0].seeds:
        one, other = ([t.values(key, [seed])[0] for key in keys] for t in trials)
        less = [f"{a - b:+.4f}" for a, b in zip(one, other, strict=True)]
        rows.append([str(seed), f"{one[0]:.4f}", f"{other[0]:.4f}", *less])
    means = [f"{trial.mean():.4f}" for trial in trials]
    rows.append(["mean", *means, *(str(difference(*trials, key)) for key in keys)])
    ((claim, finding),) = judge(open_folder(CONFIRMED)).findings
    says = f"**{claim.says}** {finding.outcome.capitalize()}: {finding.text()}."
    return "\n\n".join((table(rows), says, course(found)))


def muons() -> str:
    """Every setting of Muon in the study ``muon``, against Muon under control in the same seeds."""
    found = evidence(MUONS)
    (controlled,) = first = found.trials(MUON_CONTROLLED)
    rows = [["arm", "lr", "decay or gain", "seeds", "mean loss", f"minus {MUON_CONTROLLED}"]]
    rows.append(["---"] * len(rows[0]))
    for trial in (*first, *found.trials(MUON), *found.trials(LESS_DECAY)):
        (_, lr), (_, value) = trial.cells[0].settings
        less = "-" if trial is controlled else str(difference(trial, controlled))
        count, mean = str(len(trial.seeds)), f"{trial.mean():.4f}"
        rows.append([trial.arm, f"{lr:g}", f"{value:g}", count, mean, less])
    return table(rows)


def larger_model() -> str:
    """Every arm of the study ``larger``: its tuning, and the fresh seeds against AdamW."""
    found = evidence(LARGER)
    rows = [["arm", "lr", "decay, gain or ratio", "seeds", "mean loss", "s.d.", "minus AdamW"]]
    rows = [[*rows[0], "final gain"], ["---"] * 8]
    (adamw,) = found.trials(ADAMW, "seeds")
    for arm in larger.PLANS["tiny"].arms:
        (trial,) = found.trials(arm, "seeds")
        settings = [f"{value:g}" for _, value in trial.cells[0].settings]
        less = "-" if arm == ADAMW else str(difference(trial, adamw))
        numbers = [f"{trial.mean():.4f}", f"{statistics.stdev(trial.values()):.4f}", less]
        seeds = str(len(trial.seeds))
        rows.append([arm, *settings, seeds, *numbers, f"{trial.mean('gain'):.2f}"])
    return "\n\n".join((tuning(found, larger.PLANS["tiny"].arms), table(rows), claims(LARGER)))


def at_adamws_norm(
    folder: Path, arms: tuple[str, ...] = matched.ARMS, shown: str = matched.PAPERS
) -> str:
    """Every arm of the study ``matched``, ``catchup`` or ``predicted``, against AdamW in the same
    seeds, and one of them against it along the run."""
    found = evidence(folder)
    (adamw,) = found.trials(ADAMW)
    rows = [["arm", "mean loss", "s.d.", "minus AdamW", "final norm / initial", "lower than AdamW"]]
    rows.append(["---"] * len(rows[0]))
    for arm in arms:
        (trial,) = found.trials(arm)
        pairs = list(zip(trial.values(), adamw.values(), strict=True))
        below = f"{sum(one < other for one, other in pairs)} of {len(pairs)}"
        less = ["-", "-"] if arm == ADAMW else [str(difference(trial, adamw)), below]
        loss = f"{trial.mean():.4f}", f"{statistics.stdev(trial.values()):.4f}"
        rows.append([arm, *loss, less[0], f"{trial.mean('ratio'):.3f}", less[1]])
    parts = table(rows), claims(folder), course(found, shown), norms(found, arms)
    return "\n\n".join(parts)


def norms(found: Evidence, arms: tuple[str, ...]) -> str:
    """The norm of every arm over its initial norm along the run, where losses were measured."""
    rows = [["norm / initial, after step", *arms], ["---"] * (1 + len(arms))]
    trials = [trial for arm in arms for trial in found.trials(arm)]
    for step in trials[0].records[0].curves["val_loss"][0]:
        means = [
            statistics.fmean(dict(zip(*r.curves["ratio"], strict=True))[step] for r in t.records)
            for t in trials
        ]
        rows.append([str(step), *(f"{mean:.2f}" for mean in means)])
    return table(rows)


def causes() -> str:
    """Every arm of the study ``causes``, against AdamWN in the same seeds."""
    found = evidence(CAUSES)
    (controlled,) = found.trials(ADAMWN)
    rows = [["arm", "mean loss", "minus AdamWN", "final norm / initial", "in single runs"]]
    rows.append(["---"] * len(rows[0]))
    for arm in (ADAMWN, REPLAYED, ANGLE):
        (trial,) = found.trials(arm)
        less = "-" if arm == ADAMWN else str(difference(trial, controlled))
        norms = trial.values("ratio")
        ends = f"{min(norms):.3f} to {max(norms):.3f}"
        rows.append([arm, f"{trial.mean():.4f}", less, f"{statistics.fmean(norms):.3f}", ends])
    return table(rows)


def paper_model() -> str:
    """The claims of the study ``gpt2``; every arm and its difference to AdamW, on both texts."""
    found = evidence(GPT2)
    (adamw,) = found.trials(ADAMW)
    rows = [["arm", "seeds", "validation loss", "minus AdamW", "on owt, minus AdamW"]]
    rows[0] += ["last training loss", "final norm / initial", "final gain"]
    rows.append(["---"] * len(rows[0]))
    for arm in (ADAMW, gpt2.PAPERS, gpt2.GAIN, ADAMC):
        for trial in found.trials(arm):
            keys = ("val_loss", "val_loss_owt")
            less = ["-" if arm == ADAMW else str(difference(trial, adamw, k)) for k in keys]
            loss, ratio, gain = (
                f"{statistics.fmean(trial.values(key)):.{digits}f}"
                for key, digits in (("loss", 4), ("ratio", 2), ("gain", 2))
            )
            seeds = ", ".join(map(str, trial.seeds))
            rows.append([arm, seeds, f"{trial.mean():.4f}", *less, loss, ratio, gain])
    return f"{claims(GPT2)}\n\n{table(rows)}"


def more_decay() -> str:
    """The arms of the study ``gpt2`` in the seed of its control, by their loss."""
    found = evidence(GPT2)
    seed = gpt2.SEEDS[0]
    arms = (ADAMW, *gpt2.MORE_DECAY, ADAMC, gpt2.PAPERS, gpt2.GAIN)
    trials = [trial for arm in arms for trial in found.trials(arm)]
    adamw = trials[0]
    rows = [["arm", "decay", "validation loss", "minus AdamW", "on owt", "minus AdamW"]]
    rows[0] += ["last training loss", "final norm / initial", "final gain"]
    rows.append(["---"] * len(rows[0]))
    for trial in sorted(trials, key=lambda trial: -trial.by_seed[seed].value("val_loss")):
        values = trial.by_seed[seed].value
        losses: list[str] = []
        for key in ("val_loss", "val_loss_owt"):
            less = "-" if trial is adamw else str(difference(trial, adamw, key, [seed]))
            losses += [f"{values(key):.4f}", less]
        decay = trial.config.optim.weight_decay
        decay_or_dash = "-" if trial.config.optim.optimizer == ADAMWN else f"{decay:.3f}"
        rest = [f"{values('loss'):.4f}", f"{values('ratio'):.2f}", f"{values('gain'):.2f}"]
        rows.append([trial.arm, decay_or_dash, *losses, *rest])
    return table(rows)


def course(found: Evidence, arm: str = ADAMWN) -> str:
    """An arm minus AdamW along the run, in the fresh seeds that both have."""
    rows = [["after step", f"{arm} minus AdamW", f"pairs in which {arm} is above"], ["---"] * 3]
    trials = chosen(found, arm), chosen(found, ADAMW)
    fresh = [s for s in trials[0].seeds if s and s in trials[1].by_seed]
    curves = [[t.by_seed[seed].curves["val_loss"] for seed in fresh] for t in trials]
    for place, step in enumerate(curves[0][0][0]):
        one, other = ([values[place] for _, values in some] for some in curves)
        above = sum(a > b for a, b in zip(one, other, strict=True))
        if step:
            rows.append([str(step), str(paired(one, other)), f"{above} of {len(one)}"])
    return table(rows)


def decays(found: Evidence) -> str:
    """What AdamWN's control amounted to: the constant decay of AdamW or AdamC that shrinks the
    weights as much over the run, and the decay at some steps, by seed."""
    trial = chosen(found, ADAMWN)
    at = [round(share * trial.config.run.steps) for share in (0.1, 0.2, 0.3, 0.5, 0.75, 1)]
    rows = [["seed", "AdamW's decay", "AdamC's decay", *(f"step {step}" for step in at)]]
    rows.append(["---"] * len(rows[0]))
    for cell, record in zip(trial.cells, trial.records, strict=True):
        if cell.seed in settle.SEEDS:
            steps, values = record.curves["decay"]
            rates = [lr_at(cell.config, step) for step in steps]
            shrunk = sum(lr * value for lr, value in zip(rates, values, strict=True))
            squares = sum(lr**2 for lr in rates) / cell.config.optim.lr
            numbers = (shrunk / sum(rates), shrunk / squares)
            there = dict(zip(steps, values, strict=True))
            row = [*numbers, *(there[step] for step in at)]
            rows.append([str(cell.seed), *(f"{number:.2f}" for number in row)])
    return table(rows)


def table(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def draw(found: Evidence, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for i, (arm, (colour, marker)) in enumerate(STYLES.items()):
        trial = chosen(found, arm)
        fresh = [seed for seed in trial.seeds if seed]
        where = [seed + 0.12 * (i - 1.5) for seed in fresh]
        left.plot(where, trial.values(seeds=fresh), marker, color=colour, label=arm, ms=5)
        left.axhline(statistics.fmean(trial.values(seeds=fresh)), color=colour, lw=0.8, alpha=0.6)
    left.set(xlabel="fresh seed", ylabel="validation loss")
    left.legend(fontsize=7, frameon=False)
    trial = chosen(found, ADAMWN)
    for cell, record in zip(trial.cells, trial.records, strict=True):
        if cell.seed in settle.SEEDS:
            steps, values = record.curves["decay"]
            right.plot(steps[4:], values[4:], color=STYLES[ADAMWN][0], lw=0.8)
    config = trial.config
    every = range(20, config.run.steps + 1)
    for arm in (ADAMW, ADAMC):
        o = chosen(found, arm).config
        power = int(arm == ADAMC)
        lines = [o.optim.weight_decay * (lr_at(o, s) / o.optim.lr) ** power for s in every]
        right.plot(every, lines, color=STYLES[arm][0], lw=1.2)
    right.set(xlabel="step", ylabel="decay: shrinkage / learning rate", ylim=(0, 1.3))
    figure.savefig(path, dpi=150)


def main() -> None:
    for folder in (TINY, RESULTS):
        found = evidence(folder)
        parts = [part(found) for part in (tuning, seeds, differences, course, decays)]
        print(folder.name, *parts, claims(folder), sep="\n\n", end="\n\n")
    print(confirmed(), muons(), causes(), claims(CAUSES), paper_model(), more_decay(), sep="\n\n")
    print(larger_model(), at_adamws_norm(MATCHED), at_adamws_norm(CATCHUP), sep="\n\n")
    print(at_adamws_norm(PREDICTED, predicted.ARMS, predicted.PREDICTED))
    draw(found, HERE / "settle.png")


if __name__ == "__main__":
    main()
