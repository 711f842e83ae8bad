"""The rules of the claims: supported and refuted where they must be, with results by a formula."""

from __future__ import annotations

import math

import pytest
from fakes import NOISE, FakeLedger, record

from normcontrol.lab.studies import STUDIES, claims_rules
from normcontrol.lab.study.claims import NOT_RUN, NOT_SHOWN, REFUTED, SUPPORTED
from normcontrol.lab.study.verdict import judge

SCATTER = (0.0, 1.0, -1.0, 0.5, -0.5)
"""For each seed, how far it is from the mean of all."""


def claims_outcome(**more):
    """The claims study with results as the paper would have them, some of them changed."""
    effects = {
        claims_rules.ADAMWN: -0.05,
        claims_rules.SCALED_ADAMWN: -0.07,
        claims_rules.SCALED: -0.02,
        claims_rules.ADAMC: -0.03,
        claims_rules.TENSOR: -0.03,
        claims_rules.LAYERNORM: 0.0,
        claims_rules.RATE: -0.05,
        **more,
    }

    def of(cell):
        o = cell.config.optim
        half = claims_rules.FEWER in cell.arm
        loss = 4 + (math.log2(o.lr / 3e-3)) ** 2 + NOISE[cell.seed] + half
        loss += (
            effects.get(cell.arm.removesuffix(claims_rules.FEWER), 0.0)
            + 0.1 * NOISE[cell.seed] * len(cell.arm) / 10
        )
        best_decay = more.get("best_decay", 1.5) if half else 1.0
        if o.optimizer == "AdamW":
            loss += 0.1 * math.log(o.weight_decay / best_decay + 1e-3 * cell.seed) ** 2
        elif o.optimizer == "AdamWN":
            loss += 0.1 * math.log((o.ratio or 1) / 5) ** 2
        if cell.arm == claims_rules.RATE:
            loss += more.get("rate_effect", 0.0) * abs(math.log10(o.rate / 0.1))
        ratio = (o.ratio or 1) if o.optimizer == "AdamWN" else 3 * math.sqrt(o.lr / 8e-3)
        if cell.arm == claims_rules.OFFSET:
            square = claims_rules.initial_square(record(cell, loss))
            noise = more.get("noise", lambda o: 1.0)(o)
            noise *= 1 + more.get("scatter", 0.0) * SCATTER[cell.seed] * (o.rate < 0.05)
            x = ratio  # solve the balance of noise and control by iteration
            before = math.inf
            while abs(x - before) > 1e-15 * x:
                noisy = math.sqrt(x**2 + noise * o.lr**2 / square)
                before, x = x, (1 - o.rate) * noisy + o.rate * ratio
            made = record(cell, loss, ratio=x, points=7)
            steps, values = made.curves["ratio"]
            made.curves["ratio"] = (steps, [x] * len(values))
            return made
        if o.optimizer == "AdamWN":
            drift = more.get("drift", 0.0) + more.get("scatter", 0.0) * SCATTER[cell.seed] / 3
            ratio *= 1 + drift * math.log2(o.lr / 3e-3)
        return record(cell, loss, ratio=ratio)

    return of


def findings(**more):
    verdict = judge(FakeLedger(STUDIES["claims"], claims_outcome(**more)))
    return {claim.name: finding for claim, finding in verdict.findings}


def test_claims_that_hold_are_supported():
    found = findings()
    outcomes = {name: f.outcome for name, f in found.items()}
    assert outcomes.pop("only the start") == REFUTED  # the contrary of "not the start"
    assert outcomes == dict.fromkeys(outcomes, SUPPORTED)
    assert len(outcomes) == len(claims_rules.CLAIMS) - 1
    assert "C = 1.00" in found["offset"].numbers


def test_the_start_explains_it_if_the_control_is_level_within_the_margin():
    found = findings(**{claims_rules.SCALED: -0.049})
    assert found["only the start"].outcome == SUPPORTED
    assert "minus AdamW from scaled weights" in found["only the start"].numbers


@pytest.mark.parametrize(
    ("claim", "change"),
    [
        ("tuned", {claims_rules.ADAMWN: 0.05}),
        ("not the start", {claims_rules.SCALED: -0.09}),
        ("not AdamC", {claims_rules.ADAMC: -0.09}),
        ("same freedom", {claims_rules.SCALED_ADAMWN: 0.0}),
        ("norm and learning rate", {"drift": 0.1}),
        ("rate", {"rate_effect": 0.1}),
        ("one norm", {claims_rules.TENSOR: -0.2}),
        ("LayerNorm", {claims_rules.LAYERNORM: -0.2}),
        ("offset", {"noise": lambda o: o.rate}),
    ],
)
def test_claims_that_do_not_hold_are_refuted(claim, change):
    assert findings(**change)[claim].outcome == REFUTED


def test_a_best_decay_at_the_edge_of_the_grid_says_nothing_about_the_horizon():
    assert findings(best_decay=10.0)["horizon"].outcome == SUPPORTED  # lower decays are tried
    found = findings(best_decay=1000.0)["horizon"]
    assert found.outcome == NOT_SHOWN
    assert "a best weight_decay is at the edge of those tried" in found.text()


def test_claims_without_runs_are_not_run_and_with_one_seed_not_shown():
    verdict = judge(FakeLedger(STUDIES["claims"], lambda cell: None))
    assert {finding.outcome for _, finding in verdict.findings} == {NOT_RUN}
    small = judge(FakeLedger(STUDIES["claims"], claims_outcome(), scale="small"))
    by = {claim.name: finding for claim, finding in small.findings}
    assert by["rate"].outcome == by["horizon"].outcome == NOT_SHOWN
    assert by["norm and learning rate"].outcome == by["offset"].outcome == NOT_SHOWN
    for name in ("rate", "horizon", "norm and learning rate", "offset"):
        assert "one seed has no interval" in by[name].text()


def test_a_threshold_is_passed_by_an_interval_and_not_by_a_mean():
    """The constants of the law, and the norms, scatter so much that their means decide nothing."""
    scattered = findings(noise=lambda o: 1.0 if o.rate > 0.05 else 1.6)["offset"]
    assert scattered.outcome == SUPPORTED
    unclear = findings(noise=lambda o: 1.0 if o.rate > 0.05 else 1.9, scatter=0.2)["offset"]
    assert unclear.outcome == NOT_SHOWN
    assert "±" in unclear.numbers
    drifting = findings(drift=0.014, scatter=0.02)["norm and learning rate"]
    assert drifting.outcome == NOT_SHOWN
    assert " to " in drifting.numbers


def test_a_rate_that_has_not_the_seeds_of_the_test_yet_refutes_nothing():
    """Until then there is no difference, as there is none of a run that diverged."""
    of = claims_outcome()

    def so_far(cell):
        o = cell.config.optim
        return None if cell.arm == claims_rules.RATE and o.rate > 0.5 and cell.seed else of(cell)

    verdict = judge(FakeLedger(STUDIES["claims"], so_far))
    found = {claim.name: finding for claim, finding in verdict.findings}
    assert found["rate"].outcome == NOT_RUN
