"""The verdict says what the runs allow, and names everything that weakens it."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from fakes import FakeLedger, record
from matplotlib.figure import Figure

from normcontrol.lab.report import figures as charts
from normcontrol.lab.report.study import curve, drawn
from normcontrol.lab.studies import STUDIES, rules
from normcontrol.lab.study import statistics as stats
from normcontrol.lab.study.cells import Study, grid
from normcontrol.lab.study.claims import NOT_RUN, NOT_SHOWN, REFUTED, SUPPORTED, Claim, lower
from normcontrol.lab.study.verdict import judge, lines
from normcontrol.lab.training.config import Config

NOISE = {0: 0.0, 1: 0.003, 2: -0.004, 3: 0.001, 4: 0.002}


def two_arms(scale, done):
    adamw = grid("AdamW", Config().with_(optimizer="AdamW"), lr=[1e-3, 2e-3, 4e-3], seeds=[0, 1, 2])
    return adamw + grid("AdamWN", Config(), lr=[1e-3, 2e-3, 4e-3], seeds=[0, 1, 2])


def outcome(gain=0.02, worst=None):
    def of(cell):
        away = abs(math.log2(cell.config.optim.lr / 2e-3))
        better = gain + 0.1 * NOISE[cell.seed] if cell.arm == "AdamWN" else 0.0
        loss = math.inf if worst and worst in cell.label else 3 + away + NOISE[cell.seed] - better
        return record(cell, loss, owt=loss + 1)

    return of


def test_a_difference_that_is_there_is_shown_with_its_interval_and_the_tuning():
    verdict = judge(FakeLedger(Study("s", two_arms, baseline="AdamW"), outcome()))
    first, second = verdict.sentences()
    assert (
        "AdamWN lr=0.002 ended at a validation loss 0.0200 lower than AdamW lr=0.002 (-0.0200 ± "
        "0.00" in first
    )
    assert first.endswith("n = 3 paired seeds): shown.")
    assert (
        second
        == "Each had 3 trials; the best of AdamWN is inside its grid, that of AdamW inside its "
        "grid."
    )
    row = dict(zip(verdict.headings(), verdict.table()[1], strict=True))
    assert row["n"] == "3"
    assert row["s.d."] == f"{statistics.stdev(0.9 * NOISE[seed] for seed in range(3)):.4f}"
    assert row["loss on owt"] == "3.9797"
    assert row["difference on owt"].startswith("-0.0200 ±")
    assert (
        row["steps to baseline"] == "100%"
    )  # a straight line down to 2.98 passes 3.00 in the last thousandth
    assert not verdict.flags


def test_a_trial_of_fewer_seeds_that_did_better_is_named():
    def cells(scale, done):
        return [
            c for c in two_arms(scale, done) if c.seed == 0 or c.config.optim.lr != 2e-3
        ]  # the best has one seed

    def of(cell):
        worse = 1.0 if cell.arm == "AdamWN" and cell.config.optim.lr == 2e-3 else 0.0
        return record(cell, outcome()(cell).value() + worse)

    flags = judge(FakeLedger(Study("s", cells, baseline="AdamW"), of)).flags
    assert [flag for flag in flags if "is compared by" in flag] == [
        "AdamW is compared by lr=0.001, which has the most seeds (3); lr=0.002 ended 1.0000 lower "
        "with the 1 it has."
    ]


def test_whether_an_optimum_is_inside_its_grid_is_told_by_the_seeds_that_all_trials_have():
    def cells(scale, done):
        return [
            c
            for c in two_arms(scale, done)
            if c.arm == "AdamW" and (c.seed == 0 or c.config.optim.lr == 2e-3)
        ]

    def of(cell):  # the middle one is best with seed 0, and has bad luck with the others
        return record(cell, 3 + cell.seed + 0.1 * abs(math.log2(cell.config.optim.lr / 2e-3)))

    assert judge(FakeLedger(Study("s", cells, baseline="AdamW"), of)).rows[0].inside == "inside"


def test_the_picture_pairs_seeds_as_the_table_does():
    """With a seed missing in one arm, a difference of means would hold that seed's noise too."""

    def cells(scale, done):
        return [
            c
            for c in two_arms(scale, done)
            if c.config.optim.lr == 2e-3 and (c.arm, c.seed) != ("AdamWN", 2)
        ]

    def of(cell):
        return record(cell, 3 + cell.seed - (0.5 if cell.arm == "AdamWN" else 0.0))

    adamw, adamwn = (
        curve(trial) for trial in drawn(judge(FakeLedger(Study("s", cells, baseline="AdamW"), of)))
    )
    differences = adamwn.less(adamw)
    assert [list(run.values())[-1] for run in differences] == [-0.5, -0.5]
    assert list(charts.mean(differences).values())[-1] == -0.5
    axes = Figure().subplots()
    charts.val_difference(axes, [adamw, adamwn])
    assert [line.get_ydata()[-1] for line in axes.lines] == [0.0, -0.5]


def test_a_difference_within_the_noise_is_not_shown_and_says_what_could_have_been():
    def noisy(cell):
        return record(cell, 3 + NOISE[cell.seed] * (1 if cell.arm == "AdamW" else -1))

    sentence = judge(FakeLedger(Study("s", two_arms), noisy)).sentences()[0]
    assert "not shown; 0.0" in sentence
    assert "would have been detected in four of five such studies" in sentence


def test_one_seed_has_no_interval_and_says_so():
    def cells(scale, done):
        return [c for c in two_arms(scale, done) if c.seed == 0]

    verdict = judge(FakeLedger(Study("s", cells), outcome()))
    assert "one pair of runs, so not shown" in verdict.sentences()[0]
    assert "One seed gives no interval: differences are of single runs." in verdict.flags


def test_arms_with_another_budget_or_other_data_are_flagged_and_not_compared():
    def cells(scale, done):
        return (
            two_arms(scale, done)
            + grid("longer", Config().with_(steps=200_000), seeds=[0, 1])
            + grid("other", Config().with_(lr=7e-3))
        )

    def of(cell):
        return record(cell, 3.0, digest="another" if cell.arm == "other" else "digest")

    verdict = judge(FakeLedger(Study("s", cells, baseline="AdamW"), of))
    assert "longer is not compared with AdamW: steps 200000 against 100000." in verdict.flags
    assert "other is not compared with AdamW: other data." in verdict.flags
    assert [bool(row.differences) for row in verdict.rows] == [False, True, False, False]


def test_unequal_trials_diverged_runs_and_an_optimum_at_the_edge_are_said():
    def cells(scale, done):
        return [
            c
            for c in two_arms(scale, done)
            if not (c.arm == "AdamWN" and c.config.optim.lr == 4e-3)
        ]

    verdict = judge(FakeLedger(Study("s", cells), outcome(worst="AdamW lr=0.004 seed=1")))
    assert "Trials are not equal: AdamW had 3, AdamWN 2." in verdict.flags
    assert any(flag.startswith("1 runs diverged or failed") for flag in verdict.flags)
    assert verdict.rows[1].inside == "not tuned"

    def low(cell):
        return record(cell, 3 + cell.config.optim.lr)

    edge = judge(FakeLedger(Study("s", two_arms), low))
    assert edge.rows[0].inside == "at the edge: lr=0.001"


def test_missing_corrupt_and_foreign_files_are_named():
    of = outcome()
    ledger = FakeLedger(
        Study("s", two_arms),
        lambda c: None if c.seed == 2 else of(c),
        problems=["x.jsonl cannot be read"],
    )
    verdict = judge(ledger)
    assert verdict.flags[:2] == ["x.jsonl cannot be read", "6 cells are not run yet."]

    class WithForeign(FakeLedger):
        def results(self):
            done = super().results()
            done.add(record(grid("x", Config().with_(lr=9.0))[0], 3.0))
            return done

    assert (
        "1 files in results/fake are of other settings"
        in judge(WithForeign(Study("s", two_arms), of)).flags[0]
    )


def test_runs_of_several_devices_or_revisions_are_said():
    def of(cell):
        made = outcome()(cell)
        made.environment.update({"revision": "1" * 40, "device": "another"} if cell.seed else {})
        return made

    flags = judge(FakeLedger(Study("s", two_arms), of)).flags
    assert flags[0] == "The runs are of 2 devices: a device, another."
    assert flags[1].startswith("The runs are of 2 revisions of the source: 000000000000")


def test_nothing_run_is_said():
    assert judge(FakeLedger(Study("s", two_arms), lambda cell: None)).sentences() == [
        "Nothing was run yet."
    ]


def claims_outcome(**more):
    """The claims study with results as the paper would have them, some of them changed."""
    effects = {
        rules.ADAMWN: -0.05,
        rules.HELD: -0.07,
        rules.SCALED: -0.02,
        rules.ADAMC: -0.03,
        rules.TENSOR: -0.03,
        rules.LAYERNORM: 0.0,
        rules.RATE: -0.05,
        **more,
    }

    def of(cell):
        o = cell.config.optim
        half = rules.FEWER in cell.arm
        loss = 4 + (math.log2(o.lr / 3e-3)) ** 2 + NOISE[cell.seed] + half
        loss += (
            effects.get(cell.arm.removesuffix(rules.FEWER), 0.0)
            + 0.1 * NOISE[cell.seed] * len(cell.arm) / 10
        )
        best_decay = more.get("best_decay", 1.5) if half else 1.0
        if o.optimizer == "AdamW":
            loss += 0.1 * math.log(o.weight_decay / best_decay + 1e-3 * cell.seed) ** 2
        elif o.optimizer == "AdamWN":
            loss += 0.1 * math.log((o.ratio or 1) / 5) ** 2
        if cell.arm == rules.RATE:
            loss += more.get("rate_effect", 0.0) * abs(math.log10(o.rate / 0.1))
        ratio = (o.ratio or 1) if o.optimizer == "AdamWN" else 3 * math.sqrt(o.lr / 8e-3)
        if cell.arm == rules.OFFSET:
            square = rules.initial_square(record(cell, loss))
            noise = more.get("noise", lambda o: 1.0)(o)
            x = ratio  # solve the balance of noise and control by iteration
            for _ in range(20_000):
                x = (1 - o.rate) * math.sqrt(x**2 + noise * o.lr**2 / square) + o.rate * ratio
            made = record(cell, loss, ratio=x, points=7)
            steps, values = made.curves["ratio"]
            made.curves["ratio"] = (steps, [x] * len(values))
            return made
        if o.optimizer == "AdamWN":
            ratio *= 1 + more.get("drift", 0.0) * math.log2(o.lr / 3e-3)
        return record(cell, loss, ratio=ratio)

    return of


def findings(**more):
    verdict = judge(FakeLedger(STUDIES["claims"], claims_outcome(**more)))
    return {claim.name: finding for claim, finding in verdict.findings}


def test_claims_that_hold_are_supported():
    found = findings()
    assert {name: f.outcome for name, f in found.items()} == dict.fromkeys(
        (c.name for c in rules.CLAIMS), SUPPORTED
    )
    assert "C = 1.00" in found["offset"].numbers


@pytest.mark.parametrize(
    ("claim", "change"),
    [
        ("tuned", {rules.ADAMWN: 0.05}),
        ("not the start", {rules.SCALED: -0.09}),
        ("not AdamC", {rules.ADAMC: -0.09}),
        ("same freedom", {rules.HELD: 0.0}),
        ("norm and learning rate", {"drift": 0.1}),
        ("rate", {"rate_effect": 0.1}),
        ("one norm", {rules.TENSOR: -0.2}),
        ("LayerNorm", {rules.LAYERNORM: -0.2}),
        ("offset", {"noise": lambda o: o.rate}),
    ],
)
def test_claims_that_do_not_hold_are_refuted(claim, change):
    assert findings(**change)[claim].outcome == REFUTED


def test_a_best_decay_at_the_edge_of_the_grid_says_nothing_about_the_horizon():
    assert findings(best_decay=10.0)["horizon"].outcome == SUPPORTED  # followed there
    found = findings(best_decay=1000.0)["horizon"]
    assert found.outcome == NOT_SHOWN
    assert "a best weight_decay is at the edge of those tried" in found.numbers


def test_a_claim_about_the_same_setting_compares_trials_that_share_it():
    def cells(scale, done):
        return grid("A", Config(), ratio=[1.0, 2.0], seeds=[0, 1]) + grid(
            "B", Config().with_(scope="tensor"), ratio=[1.0], seeds=[0, 1]
        )

    def of(cell):
        return record(
            cell,
            3
            - 0.1 * cell.settings[-1][1]
            + (0.05 if cell.arm == "B" else 0.0)
            + 0.001 * cell.seed * len(cell.label),
        )

    claim = Claim("same", "A is better than B", "it is not", lower("A", "B", same="ratio"))
    (_, found), (_, other) = judge(
        FakeLedger(Study("s", cells, claims=(claim, replace(claim, rule=lower("A", "B")))), of)
    ).findings
    assert found.numbers.startswith("A ratio=1 minus B ratio=1: -0.05")
    assert other.numbers.startswith("A ratio=2 minus B ratio=1: -0.15")


@pytest.mark.parametrize(
    ("seeds", "lead", "outcome"),
    [([0], 0.05, NOT_SHOWN), ([0, 1], 0.05, SUPPORTED), ([0, 1], -0.05, NOT_SHOWN)],
)
def test_a_claim_is_not_supported_against_less_than_the_best_of_the_other_arm(seeds, lead, outcome):
    """B has three seeds at lr 1e-3, and fewer at 2e-3, where it is better. A leads by 0.2 over the
    first, by ``lead`` over the second."""

    def cells(scale, done):
        b = Config().with_(scope="tensor")
        return (
            grid("A", Config(), lr=[1e-3], seeds=range(3))
            + grid("B", b, lr=[1e-3], seeds=range(3))
            + grid("B", b, lr=[2e-3], seeds=seeds)
        )

    def of(cell):
        above = 0.0 if cell.arm == "A" else 0.2 if cell.config.optim.lr == 1e-3 else lead
        return record(cell, 3 + above + 0.001 * cell.seed * len(cell.label) * (above + 1))

    claim = Claim("best", "A is better than B", "it is not", lower("A", "B"))
    ((_, found),) = judge(FakeLedger(Study("s", cells, claims=(claim,)), of)).findings
    assert found.outcome == outcome
    assert f"but minus lr=0.002: {-lead:+.2f}" in found.numbers


def test_claims_without_runs_or_with_one_seed_are_not_called_anything_else():
    verdict = judge(FakeLedger(STUDIES["claims"], lambda cell: None))
    assert {finding.outcome for _, finding in verdict.findings} == {NOT_RUN}
    small = judge(FakeLedger(STUDIES["claims"], claims_outcome(), scale="small"))
    by = {claim.name: finding for claim, finding in small.findings}
    assert by["rate"].outcome == by["horizon"].outcome == NOT_SHOWN
    assert "one seed has no interval" in by["rate"].numbers


def test_the_papers_numbers_stand_beside_ours_with_what_differs():
    def of(cell):
        return record(cell, 3.0, ratio=2.5)

    verdict = judge(FakeLedger(STUDIES["figure2"], of))
    text = "\n".join(lines(verdict))
    assert "AdamW's final norm ratio  2.415  2.5000" in text
    assert "What differs here: a GPT of 0.17 M weights" in text
    assert [row.arm for row in verdict.rows] == ["AdamW wd 0.1", "AdamWN at its norm"]
    assert verdict.sentences()[1] == "Neither was tuned: each had one trial."
    assert (
        judge(FakeLedger(STUDIES["figure3"], of)).sentences()[0].startswith("AdamWN r 2 ended at")
    )
    ratios = {
        cell.config.optim.ratio
        for cell in STUDIES["figure2"].cells(
            "full", FakeLedger(STUDIES["figure2"], of, "full").results()
        )
    }
    assert ratios == {None, 2.5}


def test_the_figures_have_the_papers_settings_at_full_scale():
    full = STUDIES["figure3"].cells("full", None)
    assert [c.config.optim.weight_decay for c in full[:3]] == [0.05, 0.1, 0.15]
    assert [c.config.optim.ratio for c in full[3:]] == [2.0, 2.4, 2.8]
    c = full[3].config
    assert (
        c.run.steps,
        c.data.tokens_per_step,
        c.optim.lr,
        c.optim.rate,
        c.optim.ramp,
        c.optim.warmup,
        c.optim.betas,
    ) == (
        100_000,
        491_520,
        1e-3,
        1e-2,
        2500,
        2000,
        (0.9, 0.95),
    )
    for scale in ("tiny", "small"):
        for cell, shrunk in zip(full, STUDIES["figure3"].cells(scale, None), strict=True):
            (a, T), (b, t) = ((x.config.optim, x.config.run.steps) for x in (cell, shrunk))
            assert b.lr * b.weight_decay * t == pytest.approx(a.lr * a.weight_decay * T)
            assert b.lr / b.weight_decay == pytest.approx(a.lr / a.weight_decay)
    assert all(c.config.optim.norm_layers for c in STUDIES["figure4"].cells("full", None)[1:])
    assert STUDIES["figure4"].cells("full", None)[0].config.run.steps == 200_000


def test_statistics_by_hand():
    d = stats.paired([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert d.half == pytest.approx(4.303 / 3**0.5)
    assert d.detectable == pytest.approx((4.303 + 1.061) / 3**0.5)
    assert len(stats.T975) == len(stats.T80) == 30
    assert stats.steps_to([0, 10], [5.0, 4.0], 3.0) is None
    assert stats.best_of([1.0, math.inf])[1] == 1.0
    assert stats.best_of([1.0, math.inf])[0] == math.inf
