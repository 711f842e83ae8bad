"""The study `gpt2`: the paper's model, with settings that follow from what `settle` chose."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from fakes import FakeLedger, evidence_of, nothing_run, record

from normcontrol.lab.errors import LabError
from normcontrol.lab.studies import confirm, gpt2, growth, remarks, search, settle
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.studies.settled import ADAMC, ADAMW
from normcontrol.lab.study import verdict
from normcontrol.lab.study.comparison import choose
from normcontrol.lab.training.optimizers import target_at

ROOT = Path(__file__).parents[3]


def cells(scale):
    return gpt2.cells(scale, nothing_run())


def test_it_is_the_papers_model_on_200_million_tokens_from_its_own_start():
    for cell in cells("small"):
        m, d, r = cell.config.model, cell.config.data, cell.config.run
        assert (m.layers, m.heads, m.width, m.context) == (12, 12, 768, 1024)
        assert m.init_gain is None
        assert r.steps * d.tokens_per_step == pytest.approx(200e6, rel=1e-3)


@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_the_decays_keep_the_timescale_that_settle_chose(scale):
    found = evidence_of(open_folder(ROOT / f"results/settle-{scale}"))
    for arm in (ADAMW, ADAMC):
        chosen = choose(found.trials(arm)).trial.config
        mine = next(c for c in cells(scale) if c.arm == arm).config
        rule = [c.optim.lr * c.optim.weight_decay * c.run.steps for c in (chosen, mine)]
        assert rule[0] == pytest.approx(rule[1], rel=5e-3)


def test_the_papers_target_rises_over_a_twentieth_of_the_steps_to_twice_the_norm():
    cell = next(c for c in cells("small") if c.arm == gpt2.PAPERS)
    assert [target_at(cell.config, step) for step in (0, 76, 152, 3050)] == [1.0, 1.5, 2.0, 2.0]


def test_each_seed_has_all_planned_arms_and_none_was_run_before():
    planned = [c for c in cells("small") if c.part == "seeds"]
    assert Counter(c.seed for c in planned) == dict.fromkeys(gpt2.SEEDS, 4)
    before = [*settle.SEEDS, *settle.MORE, *confirm.SEEDS, *search.SEEDS, *growth.SEEDS]
    assert not {*before, *remarks.SEEDS} & set(gpt2.SEEDS)


def test_the_control_is_adamw_with_multiples_of_its_decay_in_one_seed_and_in_no_claim():
    adamw = next(c for c in cells("small") if c.arm == ADAMW)
    control = [c for c in cells("small") if c.part == "control"]
    for cell, factor in zip(control, (3, 6), strict=True):
        decay = adamw.config.optim.weight_decay * factor
        assert cell.config == adamw.config.with_(weight_decay=round(decay, 3))
        assert cell.seed == adamw.seed
        assert not any(cell.arm in claim.says for claim in gpt2.STUDY.claims)


def test_a_scale_without_a_plan_gets_a_sentence():
    with pytest.raises(LabError, match="gpt2 has no plan for the scale full"):
        cells("full")


@pytest.mark.parametrize(("lead", "outcome"), [(0.02, "supported"), (-0.02, "refuted")])
def test_the_claims_can_be_supported_and_refuted(lead, outcome):
    def loss(cell):
        return 4.0 + 0.01 * (cell.seed % 3) - (lead if "AdamWN" in cell.arm else 1e-4 * cell.seed)

    made = FakeLedger(gpt2.STUDY, lambda cell: record(cell, loss(cell)), "small")
    outcomes = {c.name: f.outcome for c, f in verdict.judge(made).findings}
    assert outcomes == dict.fromkeys(("the paper's target", "gain", "lower than AdamC"), outcome)
