"""The claims of the study ``settle``, and the rules that decide them. Rules look at runs; they do
not choose them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from normcontrol.lab.study.claims import (
    NOT_RUN,
    NOT_SHOWN,
    ONE_SEED,
    Claim,
    Finding,
    decide,
    level_loss,
    lower_loss,
)
from normcontrol.lab.study.comparison import choose
from normcontrol.lab.study.evidence import Evidence, difference

ADAMW, ADAMC, SQRT = "AdamW", "AdamC", "AdamW, decay by the root of the learning rate"
ADAMWN, FAST = "AdamWN", "AdamWN, k = 1"
TENSOR, HIDDEN = "AdamWN, a norm for each tensor", "AdamWN, hidden matrices"
REPLAYED, ANGLE = "AdamW, AdamWN's decay replayed", "AdamW, AdamWN's relative steps"

MARGIN = 0.01
"""Losses that differ by less are level, in nats. It was stated before the runs."""


def level_untuned(arm: str, than: str) -> Callable[[Evidence], Finding]:
    """The rule of equivalence for an arm that is not tuned: it has the setting that was chosen for
    the other, so that the numbers of trials and the edges of the grid do not matter.

    The seeds are those by which the other's setting was not chosen.
    """

    def rule(evidence: Evidence) -> Finding:
        mine, theirs = evidence.trials(arm), choose(evidence.trials(than))
        if not mine or theirs is None:
            return Finding(NOT_RUN)
        seeds = [seed for seed in theirs.fresh if seed in mine[0].by_seed]
        found = difference(mine[0], theirs.trial, seeds=seeds)
        if found is None:
            return Finding(
                NOT_SHOWN, because=("no seed was run to its end in both arms, or a run diverged",)
            )
        numbers = f"{mine[0].name} minus {theirs.trial.name}: {found}, n = {found.n}"
        if found.error is None:
            return Finding(NOT_SHOWN, numbers, because=(ONE_SEED,))
        return decide(numbers, found.chance_within(MARGIN), found.chance_beyond(MARGIN))

    return rule


def _level_untuned(name: str, arm: str, than: str, says: str) -> Claim:
    return replace(level_loss(name, arm, than, MARGIN, says), rule=level_untuned(arm, than))


FEEDBACK = _level_untuned(
    "feedback",
    REPLAYED,
    ADAMWN,
    "Feedback does not matter: AdamW that replays the decay of AdamWN's run with another seed is "
    "level with AdamWN",
)

CLAIMS = (
    lower_loss("lower", ADAMWN, ADAMW),
    level_loss("level", ADAMWN, ADAMW, MARGIN, "AdamWN and AdamW are level"),
    FEEDBACK,
    lower_loss("lower than AdamC", ADAMWN, ADAMC),
    level_loss("level with AdamC", ADAMWN, ADAMC, MARGIN, "AdamWN and AdamC are level"),
    _level_untuned(
        "angle",
        ANGLE,
        ADAMWN,
        "Only the steps relative to the weights matter: AdamW with AdamWN's is level with AdamWN",
    ),
    level_loss(
        "rate",
        FAST,
        ADAMWN,
        MARGIN,
        "The rate does not matter: AdamWN with k = 1 and with k = 0.1 are level",
    ),
    level_loss(
        "root",
        ADAMWN,
        SQRT,
        MARGIN,
        "A schedule of the decay is enough: AdamW whose decay follows the root of the learning "
        "rate is level with AdamWN",
    ),
    lower_loss(
        "one norm",
        ADAMWN,
        TENSOR,
        "One norm for all matrices is better than one for each tensor.",
    ),
    lower_loss(
        "all matrices",
        ADAMWN,
        HIDDEN,
        "Control of all matrices is better than of the hidden ones alone.",
    ),
)
