"""A claim, and the rule that decides it. Both are written before the runs are made.

A rule is a function of the evidence and returns a finding. "Not shown" is one of the outcomes, and
the usual one when there are few seeds. Several claims of a study are tested together: their
p-values are corrected by Holm. The claims themselves belong to the studies that test them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from normcontrol.lab.study.comparison import FACTOR, Choice, Comparison, choose, seeds_in_words
from normcontrol.lab.study.evidence import Evidence, Trial
from normcontrol.lab.study.statistics import LEVEL, Difference, any_of, holm

SUPPORTED, REFUTED, NOT_SHOWN, NOT_RUN = "supported", "refuted", "not shown", "not run"

ONE_SEED = "one seed has no interval"

HOW = (
    "Settings are chosen by some seeds and tested by the others. Nothing is shown about tuned arms "
    "where a best value is at the edge of its grid, or where the numbers of trials differ by more "
    f"than a factor of {FACTOR:g}. The claims of a study are tested together: p-values are "
    "corrected by Holm for all of its claims, also those that could not be tested."
)
"""How claims are decided, in words."""


@dataclass(frozen=True)
class Finding:
    """The outcome of a claim, and the numbers behind it."""

    outcome: str
    numbers: str = ""
    chance: float | None = None
    """The two-sided p-value of the test; None if nothing could be tested."""
    because: tuple[str, ...] = ()
    """In words, why nothing is shown whatever the p-value is."""

    def text(self) -> str:
        """The numbers, and why nothing is shown if there is a reason beside them."""
        reasons = f"Not shown because {'; and because '.join(self.because)}"
        return ". ".join(filter(None, (self.numbers, reasons if self.because else "")))


@dataclass(frozen=True)
class Claim:
    """A statement that may be false, and the rule that decides it."""

    name: str
    says: str
    refuted_if: str
    rule: Callable[[Evidence], Finding]


def decide(numbers: str, supports: float, refutes: float, because: Sequence[str] = ()) -> Finding:
    """The finding of two one-sided tests, given their p-values. With a reason why the comparison
    is unfair, neither is shown."""
    chance = min(1.0, 2 * min(supports, refutes))
    outcome = NOT_SHOWN
    if chance <= LEVEL and not because:
        outcome = SUPPORTED if supports < refutes else REFUTED
    return Finding(outcome, numbers, chance, tuple(because))


def together(claims: Sequence[Claim], evidence: Evidence) -> list[tuple[Claim, Finding]]:
    """The findings of all claims of a study. What is shown by itself is shown only if it holds
    after the correction for the number of tests."""
    return list(zip(claims, corrected([c.rule(evidence) for c in claims]), strict=True))


def corrected(findings: Sequence[Finding]) -> list[Finding]:
    """Findings of tests that are made together, by Holm. A claim that cannot be tested yet counts
    as one that is not shown, so that a study that stops early has no easier tests."""
    chances = holm([1.0 if f.chance is None else f.chance for f in findings])
    return [
        f if f.chance is None else _corrected(f, chance, len(findings))
        for f, chance in zip(findings, chances, strict=True)
    ]


def _corrected(found: Finding, chance: float, tests: int) -> Finding:
    words = f"p = {found.chance:.2g}"
    if tests > 1:
        words += f", {chance:.2g} after Holm's correction for {tests} claims"
    found = replace(found, numbers=f"{found.numbers}; {words}")
    if found.outcome == NOT_SHOWN or chance <= LEVEL:
        return found
    lost = f"it is {found.outcome} by itself, but not among {tests} claims that are tested together"
    return replace(found, outcome=NOT_SHOWN, because=(lost,))


def lower(arm: str, than: str, same: str | None = None) -> Callable[[Evidence], Finding]:
    """The rule of most claims: supported if the interval of the paired difference lies below zero,
    refuted if it lies above, in the seeds by which neither arm was chosen.

    If another trial of an arm did better there, it must be beaten as well. ``same``
    names a setting that the first arm may have only at values that the other arm tried too, so that
    both have the same freedom.
    """

    def rule(evidence: Evidence) -> Finding:
        compared = arms(evidence, arm, than, same)
        return Finding(NOT_RUN) if compared is None else is_lower(compared)

    return rule


def lower_loss(name: str, arm: str, than: str, says: str = "") -> Claim:
    """The claim that an arm has a lower loss than another, by the rule :func:`lower`."""
    return Claim(
        name,
        says or f"{arm} has a lower validation loss than {than}.",
        f"the 95 % interval of the paired difference, {arm} minus {than}, lies above zero",
        lower(arm, than),
    )


def level(
    arm: str, than: str, margin: float, same: str | None = None
) -> Callable[[Evidence], Finding]:
    """The rule of equivalence, by two one-sided tests: supported if the interval lies within the
    margin, refuted if it lies beyond the margin on one side."""

    def rule(evidence: Evidence) -> Finding:
        compared = arms(evidence, arm, than, same)
        if compared is None:
            return Finding(NOT_RUN)
        found = compared.difference()
        if found is None or found.error is None:
            return _untested(compared, found)
        within, beyond = found.chance_within(margin), found.chance_beyond(margin)
        return decide(in_numbers(compared, found), within, beyond, compared.unfair())

    return rule


def level_loss(name: str, arm: str, than: str, margin: float, says: str = "") -> Claim:
    """The claim that an arm is level with another, by the rule :func:`level`. ``says`` is followed
    by the margin."""
    return Claim(
        name,
        f"{says or f'{arm} is level with {than}'}, within {margin:g}.",
        f"the interval of {arm} minus {than} lies beyond {margin:g} on one side",
        level(arm, than, margin),
    )


def all_within(numbers: str, found: Sequence[Difference | None], margin: float) -> Finding:
    """The finding of several paired differences that must all lie within a margin: refuted if one
    lies beyond it, or is None because a run diverged."""
    known = [d for d in found if d is not None]
    if len(known) < len(found):
        return Finding(REFUTED, numbers)
    if any(d.error is None for d in known):
        return Finding(NOT_SHOWN, numbers, because=(ONE_SEED,))
    return decide(
        f"{numbers}; n = {known[0].n}",
        max(d.chance_within(margin) for d in known),
        any_of([d.chance_beyond(margin) for d in known]),
    )


def run_in_all(trials: Sequence[Trial], seeds: Iterable[int]) -> list[int]:
    """Those of the seeds that all of the trials were run with, to the end or until they diverged. A
    run that failed will be run again."""
    return [
        seed
        for seed in seeds
        if all(seed in t.by_seed and t.by_seed[seed].status != "failed" for t in trials)
    ]


def arms(evidence: Evidence, arm: str, than: str, same: str | None = None) -> Comparison | None:
    """Two arms to compare; None if one of them was not run."""
    every, theirs = evidence.trials(arm), evidence.trials(than)
    mine = every
    if same is not None:
        tried = {trial.config.flat()[same] for trial in theirs}
        mine = [trial for trial in every if trial.config.flat()[same] in tried]
    # The setting of an arm with a single trial was found by tuning the other: all of that counts.
    one = choose(mine, made=len(every) if len(theirs) == 1 else None)
    return compared(one, choose(theirs))


def compared(one: Choice | None, other: Choice | None) -> Comparison | None:
    return None if one is None or other is None else Comparison(one, other)


def is_lower(compared: Comparison) -> Finding:
    """Whether the first arm has the lower loss."""
    found = compared.difference()
    if found is None or found.error is None:
        return _untested(compared, found)
    numbers = in_numbers(compared, found)
    below, above = found.chance_below(), found.chance_above()
    if ahead := compared.ahead():
        trial, against = ahead
        numbers += f"; minus {trial.settings}, which did better there: {against}, n = {against.n}"
        below = max(below, against.chance_below())
    if ahead := compared.swapped().ahead():
        above = max(above, ahead[1].chance_below())
    return decide(numbers, below, above, compared.unfair())


def _untested(compared: Comparison, found: Difference | None) -> Finding:
    """The finding of two arms without an interval."""
    if found is None:
        return Finding(NOT_SHOWN, because=(compared.untested(),))
    return Finding(NOT_SHOWN, in_numbers(compared, found), because=(ONE_SEED, *compared.unfair()))


def in_numbers(compared: Comparison, found: Difference) -> str:
    """The two trials, their difference, and the seeds that they were chosen by."""
    return (
        f"{compared.one.trial.name} minus {compared.other.trial.name}: {found}, n = {found.n}"
        f"{chosen_by(compared)}"
    )


def chosen_by(compared: Comparison) -> str:
    """In words, by which seeds the trials were chosen."""
    used = sorted(compared.used & set(compared.common))
    if not used or not compared.fresh:
        return ""
    return f", chosen by {seeds_in_words(used)} and tested by others"
