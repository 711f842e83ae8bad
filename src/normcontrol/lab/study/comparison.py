"""The comparison of two arms that were tuned: which trial represents an arm, in which seeds the two
are tested, and what makes the comparison unfair.

A trial is chosen by some seeds and tested by others: the lowest of many losses is low by luck too,
and that luck does not repeat in other seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from normcontrol.lab.study.evidence import Trial, difference
from normcontrol.lab.study.statistics import Difference

FACTOR = 1.5
"""Arms whose numbers of trials differ by more than this factor are not tuned alike."""

BUDGET = ("steps", "tokens_per_step", "context", "layers", "heads", "width")
"""The settings that must be equal for arms to be compared. The data must be equal too."""

SAME_SEEDS = "every seed was used both to choose the settings and to test them"


@dataclass(frozen=True)
class Choice:
    """The trials of an arm, the one that represents it, and the seeds that it was chosen by."""

    trials: Sequence[Trial]
    trial: Trial
    seeds: frozenset[int]
    """Empty if there was nothing to choose."""
    made: int
    """From how many trials the setting was chosen."""

    @property
    def arm(self) -> str:
        return self.trial.arm

    @property
    def fresh(self) -> list[int]:
        """The seeds of the chosen trial that it was not chosen by."""
        return [seed for seed in self.trial.seeds if seed not in self.seeds]

    def singly(self) -> list[float]:
        """The loss of each trial in one seed: the first that all of them have, or its own first one
        if they have none in common."""
        shared = _shared(self.trials)
        return [t.values(seeds=shared[:1] or t.seeds[:1])[0] for t in self.trials]

    def ahead(self, seeds: Sequence[int]) -> tuple[Trial, list[int], Difference] | None:
        """The trial that is furthest below the chosen one in those of the seeds that it has (in all
        it has if it has none of these), these seeds, and its difference to the chosen one."""
        found = []
        for trial in self.trials:
            where = [seed for seed in seeds if seed in trial.by_seed] or trial.seeds
            less = difference(trial, self.trial, seeds=where)
            if less is not None and less.mean < 0:
                found.append((trial, where, less))
        return min(found, key=lambda one: one[2].mean, default=None)

    def edges(self) -> dict[str, float] | None:
        """The settings of the chosen trial, or of the best one in the seeds that all trials have,
        that are the lowest or highest value tried; None if no setting had several values.

        Zero is no edge: no setting goes below it."""
        shared = _shared(self.trials)
        best = min(self.trials, key=lambda t: statistics.fmean(t.values(seeds=shared or t.seeds)))
        grid = _grid(self.trials)
        found = {
            key: value
            for trial in (self.trial, best)
            for key, value in trial.cells[0].settings
            if key in grid and value in (grid[key][0], grid[key][-1]) and value != 0
        }
        return found if grid else None


def choose(trials: Sequence[Trial], made: int | None = None) -> Choice | None:
    """The trial that represents an arm: of those with the most seeds, the one with the lowest loss
    in the first third of the seeds that all trials have, at least one. A trial that diverged in any
    seed is not chosen if there are others.

    Seeds in which it did better than a trial that was given fewer seeds count as used for the
    choice too: they may be why the other was given no more.

    ``made`` is the number of trials behind the choice, where it is not that of these trials.
    """
    if not trials:
        return None
    shared = _shared(trials)
    first = shared[: max(1, len(shared) // 3)]
    most = max(len(t.seeds) for t in trials)
    trial = min(
        (t for t in trials if len(t.seeds) == most),
        key=lambda t: (math.isinf(t.mean()), statistics.fmean(t.values(seeds=first or t.seeds))),
    )
    count = len(trials) if made is None else made
    used = () if count == 1 else _dropped(trials, trial).union(first) or trial.seeds
    return Choice(trials, trial, frozenset(used), count)


@dataclass(frozen=True)
class Comparison:
    """One arm against another, each by its chosen trial."""

    one: Choice
    other: Choice

    @property
    def common(self) -> list[int]:
        """The seeds of both chosen trials."""
        return [seed for seed in self.one.trial.seeds if seed in self.other.trial.by_seed]

    @property
    def used(self) -> frozenset[int]:
        """The seeds by which one of the two was chosen."""
        return self.one.seeds | self.other.seeds

    @property
    def fresh(self) -> list[int]:
        """The seeds of both chosen trials by which neither was chosen."""
        return [seed for seed in self.common if seed not in self.used]

    @property
    def seeds(self) -> list[int]:
        """The seeds of the test; those of the choice where there are no others."""
        return self.fresh or self.common

    def difference(self, key: str = "val_loss") -> Difference | None:
        """The paired difference; None for one of the reasons in :meth:`untested`."""
        return difference(self.one.trial, self.other.trial, key, self.seeds)

    def untested(self) -> str:
        """In words, why there is no difference."""
        if not self.seeds:
            return f"{self.one.arm} and {self.other.arm} have no seed in common"
        return " and ".join(
            f"{side.arm} {' and '.join(statuses)} in {seeds_in_words(bad)}"
            for side in (self.one, self.other)
            if (bad := [s for s in self.seeds if not side.trial.by_seed[s].good])
            and (statuses := dict.fromkeys(side.trial.by_seed[s].status for s in bad))
        )

    def swapped(self) -> Comparison:
        return Comparison(self.other, self.one)

    def ahead(self) -> tuple[Trial, Difference] | None:
        """The trial of the other arm that did better than its chosen one where the two arms are
        tested, and the difference of the first arm to it."""
        found = self.other.ahead(self.seeds)
        if found is None:
            return None
        trial, seeds, _ = found
        against = difference(self.one.trial, trial, seeds=seeds)
        return None if against is None else (trial, against)

    def unfair(self) -> list[str]:
        """In words, why nothing follows from the difference: another budget or other data, a best
        value at the edge of its grid, unequal numbers of trials, or no seeds but those of the
        choice."""
        unequal = differing(self.one.trial, self.other.trial)
        found = [f"the arms differ in more than the method: {unequal}"] if unequal else []
        found += [
            f"the best of {side.arm} is at the edge of its grid ({in_words(edges)}), and may lie "
            "beyond"
            for side in (self.one, self.other)
            if (edges := side.edges())
        ]
        counts = (self.one.made, self.other.made)
        if max(counts) > FACTOR * min(counts):
            found.append(
                f"{self.one.arm} had {_trials(counts[0])} and {self.other.arm} {counts[1]}, more "
                f"than a factor of {FACTOR:g} apart"
            )
        if self.common and not self.fresh:
            found.append(SAME_SEEDS)
        return found


def differing(trial: Trial, base: Trial) -> str:
    """In words, what differs between two arms beside the method: their budget or their data."""
    mine, theirs = trial.config.flat(), base.config.flat()
    found = [
        f"{key} {mine[key]} against {theirs[key]}" for key in BUDGET if mine[key] != theirs[key]
    ]
    digests = [  # a run that failed before its data was read has no environment
        {r.environment["data"]["digest"] for r in t.records if r.environment} for t in (trial, base)
    ]
    if all(digests) and digests[0] != digests[1]:
        found.append("other data")
    return ", ".join(found)


def seeds_in_words(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def in_words(settings: dict[str, float]) -> str:
    return ", ".join(f"{key}={value:g}" for key, value in settings.items())


def _trials(count: int) -> str:
    return f"{count} trial{'s' * (count > 1)}"


def _shared(trials: Iterable[Trial]) -> list[int]:
    """The seeds that all trials have."""
    return sorted(set.intersection(*(set(t.seeds) for t in trials)))


def _dropped(trials: Iterable[Trial], chosen: Trial) -> set[int]:
    """The seeds of the trials with fewer seeds than the chosen one, which did better in them."""
    found: set[int] = set()
    for trial in trials:
        seeds = [seed for seed in trial.seeds if seed in chosen.by_seed]
        if len(trial.seeds) < len(chosen.seeds) and seeds:
            mine, its = chosen.values(seeds=seeds), trial.values(seeds=seeds)
            found.update(seeds if statistics.fmean(mine) <= statistics.fmean(its) else ())
    return found


def _grid(trials: Iterable[Trial]) -> dict[str, list[float]]:
    """The settings of which several numbers were tried, with the numbers in order. A switch is no
    number, though Python counts True as 1: nothing lies beyond it."""
    tried: dict[str, set[float]] = {}
    for trial in trials:
        for key, value in trial.cells[0].settings:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and math.isfinite(value):
                tried.setdefault(key, set()).add(value)
    return {key: sorted(values) for key, values in tried.items() if len(values) > 1}


def named(arms: Sequence[str], one: str = "", several: str = "") -> str:
    """One arm by its name, several by their number and the first of them."""
    if len(arms) == 1:
        return f"{arms[0]} {one}".rstrip()
    return f"{len(arms)} arms ({arms[0]}, ...) {several}".rstrip()
