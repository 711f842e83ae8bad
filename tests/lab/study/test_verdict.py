"""The verdict says what the runs allow, and names everything that weakens it."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from fakes import NOISE, FakeLedger, record
from matplotlib.figure import Figure

from normcontrol.lab.report import panels
from normcontrol.lab.report.study_page import curve, drawn, tables
from normcontrol.lab.study.cells import Study, grid
from normcontrol.lab.study.claims import NOT_SHOWN, SUPPORTED, Claim, level, lower
from normcontrol.lab.study.records import Record
from normcontrol.lab.study.verdict import judge
from normcontrol.lab.study.verdict_text import lines
from normcontrol.lab.training.config import Config


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
    assert first.endswith("n = 2 paired seeds, chosen by seed 0 and tested by others): shown.")
    assert (
        second
        == "Each had 3 trials; the best of AdamWN is inside its grid, that of AdamW inside its "
        "grid."
    )
    row = dict(zip(verdict.headings(), verdict.table()[1], strict=True))
    assert (row["n"], row["pairs"]) == ("3", "2")
    assert row["s.d."] == f"{statistics.stdev(0.9 * NOISE[seed] for seed in range(3)):.4f}"
    assert row["loss on owt"] == "3.9797"
    assert row["difference on owt"].startswith("-0.0200 ±")
    # The curve is a straight line down to 2.98, which passes 3.00 near its end.
    assert row["steps to baseline"] == "100%"
    assert not verdict.flags


def test_beside_claims_a_difference_is_shown_by_itself_only():
    claim = Claim("c", "It is lower.", "it is higher", lower("AdamWN", "AdamW"))
    study = Study("s", two_arms, baseline="AdamW", claims=(claim,))
    first, *_ = judge(FakeLedger(study, outcome())).sentences()
    assert first.endswith("tested by others): shown by itself.")


def test_arms_with_unequal_trials_are_not_shown_to_differ():
    def cells(scale, done):
        others = [c for c in two_arms(scale, done) if c.arm == "AdamW" or c.trial == "lr=0.002"]
        return others + grid("AdamWN from the start", Config().with_(lr=5e-3), seeds=[0, 1, 2])

    verdict = judge(FakeLedger(Study("s", cells, baseline="AdamW"), outcome()))
    assert verdict.sentences()[0].endswith(
        ": not shown, because AdamWN had 1 trial and AdamW 3, more than a factor of 1.5 apart."
    )
    assert verdict.rows[2].inside == "not tuned"


def test_a_trial_of_fewer_seeds_that_did_better_is_named():
    def cells(scale, done):
        # The best trial has one seed.
        return [c for c in two_arms(scale, done) if c.seed == 0 or c.config.optim.lr != 2e-3]

    def of(cell):
        worse = 1.0 if cell.arm == "AdamWN" and cell.config.optim.lr == 2e-3 else 0.0
        return record(cell, outcome()(cell).value() + worse)

    flags = judge(FakeLedger(Study("s", cells, baseline="AdamW"), of)).flags
    assert [flag for flag in flags if "is compared by" in flag] == [
        "AdamW is compared by lr=0.001, with 3 seeds; lr=0.002, with 1, ended 1.0000 lower in "
        "seed 0."
    ]


def test_whether_an_optimum_is_inside_its_grid_is_judged_by_the_seeds_that_all_trials_have():
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
    """With a seed missing in one arm, a difference of means would contain that seed's noise too."""

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
    assert list(panels.mean(differences).values())[-1] == -0.5
    axes = Figure().subplots()
    panels.val_difference(axes, [adamw, adamwn])
    assert [line.get_ydata()[-1] for line in axes.lines] == [0.0, -0.5]


def test_a_difference_within_the_noise_is_not_shown_and_says_what_could_have_been():
    def noisy(cell):
        return record(cell, 3 + NOISE[cell.seed] * (1 if cell.arm == "AdamW" else -1))

    sentence = judge(FakeLedger(Study("s", two_arms), noisy)).sentences()[0]
    # 12.7 standard errors for the interval of two seeds, 16.3 for what four of five studies show.
    assert "± 0.0889" in sentence
    assert "not shown; 0.1143 would have been detected in four of five such studies" in sentence


def test_one_seed_has_no_interval_and_says_so():
    def cells(scale, done):
        return [c for c in two_arms(scale, done) if c.seed == 0]

    verdict = judge(FakeLedger(Study("s", cells), outcome()))
    assert verdict.sentences()[0].endswith(
        "one pair of runs, so not shown; every seed was used both to choose the settings and to "
        "test them)."
    )
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
    assert any(flag.startswith("1 run diverged or failed; it is counted") for flag in verdict.flags)
    assert verdict.rows[1].inside == "at the edge: lr=0.002"  # the higher one of two
    assert verdict.sentences()[0].endswith(
        "not shown, because the best of AdamWN is at the edge of its grid (lr=0.002), and may lie "
        "beyond."
    )

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
        "Left out: 1 file in results/fake of other settings"
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


@pytest.mark.parametrize(("trials", "counts"), [(1, []), (2, "12"), (3, "123"), (7, "1236")])
def test_the_expected_best_is_shown_for_numbers_of_trials_that_there_are(trials, counts):
    def arms(scale, done):
        rates = [1e-3 * 2**i for i in range(trials)]
        return grid("AdamW", Config(), lr=rates[:1]) + grid("AdamWN", Config(), lr=rates)

    verdict = judge(FakeLedger(Study("s", arms), outcome()))
    said = [line for line in lines(verdict) if line.startswith("expected best of k trials")]
    assert [word for line in said for word in line.split() if word.isdigit()] == [*counts]
    shown = [table for table in tables(verdict) if table.title == "Expected best of k trials"]
    assert [word for t in shown for word in t.headings[1:]] == [f"k = {k}" for k in counts]


def test_a_run_that_failed_is_not_said_to_have_diverged():
    """A disk or a memory that was full says nothing about a method."""

    def of(cell):
        made = outcome()(cell)
        return replace(made, status="failed", final={}) if cell.arm == "AdamW" else made

    verdict = judge(FakeLedger(Study("s", two_arms), of))
    assert verdict.sentences() == [
        "AdamW lr=0.001 failed; no other arm can be compared with it yet."
    ]
    row = dict(zip(verdict.headings(), verdict.table()[0], strict=True))
    assert (row["val loss"], row["loss on owt"], row["ratio"]) == ("failed",) * 3
    assert verdict.best_of()[0] == ["AdamW", *("failed",) * 3]


def test_nothing_run_is_said():
    assert judge(FakeLedger(Study("s", two_arms), lambda cell: None)).sentences() == [
        "Nothing was run yet."
    ]


def two_runs(scale, done, steps=600):
    adamw = Config().with_(optimizer="AdamW", steps=600)
    return [
        *grid("AdamW", adamw, seeds=[0, 1, 2]),
        *grid("AdamWN", Config().with_(steps=steps), seeds=[0, 1, 2]),
    ]


def test_nothing_is_measured_against_a_baseline_that_diverged():
    verdict = judge(FakeLedger(Study("s", two_runs), outcome(worst="AdamW seed=1")))
    assert verdict.sentences()[0].startswith("AdamW diverged; no other arm can be compared")
    row = dict(zip(verdict.headings(), verdict.table()[1], strict=True))
    assert row["steps to baseline"] == row["minus baseline"] == "-"
    assert "AdamWN is not compared with AdamW: AdamW diverged in seed 1." in verdict.flags


def test_arms_without_a_seed_in_common_are_named():
    def cells(scale, done):
        return [c for c in two_runs(scale, done) if (c.arm == "AdamW") == (c.seed < 2)]

    verdict = judge(FakeLedger(Study("s", cells), outcome()))
    assert (
        "AdamWN is not compared with AdamW: AdamWN and AdamW have no seed in common."
        in verdict.flags
    )


def test_the_expected_best_of_an_unfinished_study_is_of_one_seed_for_all_trials():
    def cells(scale, done):
        adamw = Config().with_(optimizer="AdamW")
        return grid("AdamW", adamw, lr=[1e-3, 2e-3, 4e-3], seeds=[0, 1])

    def of(cell):  # the losses of all trials are the same, but for the noise of the seed
        if cell.seed == 0 and cell.config.optim.lr > 1e-3:
            return None
        return record(cell, 3.0 + cell.seed)

    (row,) = judge(FakeLedger(Study("s", cells), of)).best_of()
    assert row == ["AdamW", "4.0000", "4.0000", "4.0000"]


def test_an_arm_of_which_a_run_failed_before_it_had_data_is_not_called_one_of_other_data():
    def of(cell):
        made = outcome()(cell)
        if "AdamWN seed=1" not in cell.label:
            return made
        return Record(made.id, made.config, {}, "failed", error="the disk is full")

    flags = judge(FakeLedger(Study("s", two_runs), of)).flags
    assert flags[0] == "AdamWN is not compared with AdamW: AdamWN failed in seed 1."


@pytest.mark.parametrize("rule", [lower("AdamWN", "AdamW"), level("AdamWN", "AdamW", 0.1)])
def test_a_claim_about_arms_with_other_budgets_is_not_shown(rule):
    """As the table, in which such arms are not compared."""
    claims = (Claim("c", "It is lower.", "it is higher", rule),)

    def found(steps):
        study = Study("s", lambda *given: two_runs(*given, steps=steps), claims=claims)
        ((_, finding),) = judge(FakeLedger(study, outcome())).findings
        return finding

    assert found(600).outcome == SUPPORTED
    assert found(1200).outcome == NOT_SHOWN
    assert (
        found(1200)
        .text()
        .endswith(
            "Not shown because the arms differ in more than the method: steps 1200 against 600"
        )
    )


def test_a_claim_says_which_run_diverged():
    claims = (Claim("c", "It is lower.", "it is higher", lower("AdamWN", "AdamW")),)
    study = Study("s", two_runs, claims=claims)
    ((_, finding),) = judge(FakeLedger(study, outcome(worst="AdamWN seed=1"))).findings
    assert finding.text() == "Not shown because AdamWN diverged in seed 1"
