"""The study `horizon`: the search at two other lengths of run, and how the difference changes."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from fakes import FakeLedger, record

from normcontrol.lab.studies import horizon, search
from normcontrol.lab.studies.settled import ADAMW
from normcontrol.lab.study import verdict


def judged(lead, diverged=None):
    """The outcomes, given how far AdamWN is below AdamW in runs of a number of steps, and the seed
    in which its long run diverged."""

    def loss(cell):
        if cell.seed == diverged and cell.arm == horizon.LONG.name(search.RISING):
            return math.inf
        tuned = 0.1 * abs(cell.config.optim.lr - 8.5e-3) + 0.003 * (-1) ** cell.seed
        own = lead[cell.config.run.steps] if search.RISING in cell.arm else 0.0
        return 4.3 + tuned - own * (1 + 0.01 * (cell.seed % 3))

    made = FakeLedger(horizon.STUDY, lambda cell: record(cell, loss(cell)), "tiny")
    return {c.name: f for c, f in verdict.judge(made).findings}, made.cells(made.results())


def test_four_arms_with_equal_trials_of_two_lengths():
    _, cells = judged({200: 0.0, 1800: 0.0})
    assert Counter((c.arm, c.config.run.steps) for c in cells) == {
        (protocol.name(arm), steps): 88
        for protocol, steps in ((horizon.SHORT, 200), (horizon.LONG, 1800))
        for arm in (ADAMW, search.RISING)
    }


@pytest.mark.parametrize("protocol", [horizon.SHORT, horizon.LONG])
def test_what_is_a_share_of_the_steps_follows_them(protocol):
    stretch = protocol.stretch
    whole, other = (
        search.trial("tiny", search.RISING, (5, 5, 3, 2), 0, "search", p).config
        for p in (search.USUAL, protocol)
    )
    for name in ("warmup", "ramp"):
        assert getattr(other.optim, name) == getattr(whole.optim, name) * stretch
    for name in ("steps", "eval_every", "log_every"):
        assert getattr(other.run, name) == getattr(whole.run, name) * stretch


@pytest.mark.parametrize(
    ("short", "long", "outcomes"),
    [
        (0.01, 0.03, ("supported", "refuted", "supported")),
        (0.03, -0.03, ("refuted", "refuted", "refuted")),
        (-0.03, 0.001, ("supported", "supported", "supported")),
    ],
)
def test_the_claims(short, long, outcomes):
    findings, _ = judged({200: short, 1800: long})
    assert tuple(f.outcome for f in findings.values()) == outcomes


def test_the_growth_is_the_change_of_the_difference_of_a_seed():
    findings, _ = judged({200: 0.01, 1800: 0.03})
    change = findings["better with more steps"].numbers.split("): ")[-1]
    # by hand: -(0.03 - 0.01) times the mean of 1 + 0.01 * (seed % 3) over seeds 71 to 90
    mean = -0.02 * sum(1 + 0.01 * (seed % 3) for seed in range(71, 91)) / 20
    assert change.startswith(f"{mean:+.4f}")


def test_a_run_that_diverged_leaves_no_change_and_the_p_values_of_the_others():
    findings, _ = judged({200: 0.01, 1800: 0.03}, diverged=75)
    assert findings["better with more steps"].text() == (
        f"Not shown because {horizon.LONG.name(search.RISING)} diverged in seed 75"
    )
    assert [f.chance for f in findings.values()] == [None] * 3
