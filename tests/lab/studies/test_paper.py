"""The paper's figures: its settings at full scale, and its numbers beside ours."""

from __future__ import annotations

import pytest
from fakes import FakeLedger, record

from normcontrol.lab.studies import STUDIES
from normcontrol.lab.study.verdict import judge
from normcontrol.lab.study.verdict_text import lines


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
