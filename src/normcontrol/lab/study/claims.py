"""A claim, and the rule that decides it. Both are written before the runs are made.

A rule is a function of the evidence and returns a finding. "Not shown" is one of the outcomes, and
the usual one when there are few seeds. The claims themselves belong to the studies that test them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from normcontrol.lab.study.evidence import Evidence, difference

SUPPORTED, REFUTED, NOT_SHOWN, NOT_RUN = "supported", "refuted", "not shown", "not run"


@dataclass(frozen=True)
class Finding:
    """The outcome of a claim, and the numbers behind it."""

    outcome: str
    numbers: str = ""


@dataclass(frozen=True)
class Claim:
    """A statement that may be false, and the rule that decides it."""

    name: str
    says: str
    refuted_if: str
    rule: Callable[[Evidence], Finding]


def lower(arm: str, than: str, same: str | None = None) -> Callable[[Evidence], Finding]:
    """The rule of most claims: supported if the interval of the paired difference lies below zero,
    refuted if it lies above.

    If a trial of the other arm with fewer seeds did better, that one must be beaten as well.
    ``same`` names a setting that must have the same value in both arms: the first arm is then
    represented by its trial with the other arm's value.
    """

    def rule(evidence: Evidence) -> Finding:
        other = evidence.chosen(than)
        one = other and evidence.chosen(arm, **({same: other.setting(same)} if same else {}))
        if one is None or other is None:
            return Finding(NOT_RUN)
        found = difference(one, other)
        if found is None:
            return Finding(NOT_SHOWN, "no seed was run to its end in both arms")
        numbers = f"{one.name} minus {other.name}: {found}, n = {found.n}"
        if found.half is None:
            return Finding(NOT_SHOWN, numbers + ": one seed has no interval")
        if found.below and (better := evidence.better(other)):
            trial, _ = better
            against = difference(one, trial)
            numbers += (
                f"; but minus {trial.settings}: {against}, n = {against.n}" if against else ""
            )
            return Finding(SUPPORTED if against and against.below else NOT_SHOWN, numbers)
        return Finding(SUPPORTED if found.below else REFUTED if found.above else NOT_SHOWN, numbers)

    return rule
