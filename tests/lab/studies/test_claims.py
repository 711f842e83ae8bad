"""The claims study: which cells it wants, and in which order, given the finished ones."""

from __future__ import annotations

import math

import pytest

from normcontrol.lab.studies.opening import begin
from normcontrol.lab.study.cells import identity
from normcontrol.lab.study.records import summarise


class Pretended:
    """The claims study, at small scale by default, with results by a formula."""

    def __init__(self, corpus, tmp_path, best_decay=0.3, best_lr=2e-3, scale="small", control=None):
        self.ledger = begin(tmp_path / "out", "claims", scale, str(corpus))
        self.done = self.ledger.results()
        self.best_decay, self.best_lr, self.control = best_decay, best_lr, control or best_decay

    def cells(self, part):
        return [
            c for c in self.ledger.cells(self.done) if c.part == part and self.done.of(c) is None
        ]

    def run(self, cells):
        for cell in cells:
            o = cell.config.optim
            decay = (
                self.control
                if cell.arm in ("AdamW from scaled weights", "AdamC")
                else self.best_decay
            )
            away = (
                math.log(o.lr / self.best_lr),
                math.log(o.weight_decay / decay),
                math.log((o.ratio or 1.6) / 1.6),
            )
            lines = [
                {"step": 0, "val_loss": 10.0, "ratio": 1.0},
                {"step": 1500, "val_loss": 4 + 0.1 * sum(map(abs, away)), "ratio": 2.0},
            ]
            self.done.add(
                summarise(
                    identity(cell.config, self.ledger.data_of(cell.config)),
                    cell.config,
                    {},
                    lines,
                    70.0,
                )
            )


def test_the_claims_study_asks_for_equal_trials_then_seeds_of_the_best_and_its_controls(
    corpus, tmp_path
):
    study = Pretended(corpus, tmp_path)
    row = study.cells("grid")
    assert [c.arm for c in row] == ["AdamW"] * 3 + ["AdamWN"] * 3
    assert {c.config.optim.lr for c in row} == {2e-3}
    study.run(row)
    assert study.cells("edges") == []
    seeds = study.cells("seeds")
    arms = ("AdamW", "AdamWN", "AdamW from scaled weights", "AdamC")
    assert {(c.arm, c.seed) for c in seeds} == {(arm, s) for arm in arms for s in range(3)} - {
        ("AdamW", 0),
        ("AdamWN", 0),
    }
    scaled = next(c for c in seeds if c.arm == "AdamW from scaled weights")
    assert (scaled.config.model.init_scale, scaled.config.optim.weight_decay) == (1.6, 0.3)
    adamc = next(c for c in seeds if c.arm == "AdamC")
    assert adamc.config.optim.weight_decay == pytest.approx(0.3 * 0.55 / 0.404, rel=0.02)
    study.run(seeds)
    rest = study.cells("grid")
    assert [sum(c.arm == arm for c in rest) for arm in ("AdamW", "AdamWN")] == [6, 6]
    study.run(rest)
    assert study.cells("seeds") == []
    seconds = study.cells("seconds")
    assert [(c.arm, c.seed) for c in seconds] == [
        ("AdamW", 1),
        ("AdamW", 2),
        ("AdamWN", 1),
        ("AdamWN", 2),
    ]
    assert {(c.config.optim.lr, c.config.optim.ratio) for c in seconds if c.arm == "AdamWN"} == {
        (2e-3, 1.3)
    }
    assert {c.part for c in study.ledger.cells(study.done)} == {
        *(
            "grid",
            "seeds",
            "seconds",
            "rate",
            "start",
            "horizon",
            "controls",
            "scope",
            "layernorm",
            "offset",
        )
    }


def test_where_runs_are_cheap_every_trial_gets_every_seed_in_the_end(corpus, tmp_path):
    study = Pretended(corpus, tmp_path, scale="tiny", best_lr=3e-3, best_decay=1.0)
    while todo := [c for c in study.ledger.cells(study.done) if study.done.of(c) is None]:
        study.run(todo)
    trials = {c.trial: set() for c in study.ledger.cells(study.done) if c.part == "grid"}
    for cell in study.ledger.cells(study.done):
        if cell.trial in trials:
            trials[cell.trial].add(cell.seed)
    assert len(trials) == 18
    assert all(seeds == set(range(5)) for seeds in trials.values())


def test_a_best_value_at_the_edge_gives_each_arm_one_more_trial(corpus, tmp_path):
    study = Pretended(corpus, tmp_path, best_decay=0.05)
    study.run(study.cells("grid"))
    more = study.cells("edges")
    assert [(c.arm, c.settings[-1]) for c in more] == [
        ("AdamW", ("weight_decay", 0.0333)),
        ("AdamWN", ("ratio", 1.44)),
    ]
    study.run(more)
    assert (
        next(c for c in study.cells("seeds") if c.arm == "AdamW").config.optim.weight_decay
        == 0.0333
    )


def test_a_best_decay_at_the_edge_of_a_horizon_is_followed_twice(corpus, tmp_path):
    study = Pretended(corpus, tmp_path, best_decay=1e-4)
    while todo := [c for c in study.ledger.cells(study.done) if study.done.of(c) is None]:
        study.run(todo)
    tried = {}
    for cell in study.ledger.cells(study.done):
        if cell.part == "horizon":
            tried.setdefault(cell.arm, []).append(cell.settings[-1][1])
    assert (
        sorted(tried["AdamW"])
        == sorted(tried["AdamW, fewer steps"])
        == [0.0037, 0.0111, 0.0333, 0.1, 0.3, 1.0]
    )
    assert sorted(tried["AdamWN"]) == sorted(tried["AdamWN, fewer steps"])
    assert len(tried["AdamWN"]) == 6


def test_the_controls_are_tuned_beyond_an_edge_and_their_best_gets_every_seed(corpus, tmp_path):
    study = Pretended(corpus, tmp_path, control=2.7)
    while todo := [c for c in study.ledger.cells(study.done) if study.done.of(c) is None]:
        study.run(todo)
    seeds = {}
    for cell in study.ledger.cells(study.done):
        if cell.arm == "AdamW from scaled weights":
            seeds.setdefault(round(cell.config.optim.weight_decay, 6), set()).add(cell.seed)
    assert seeds == {0.1: {0}, 0.3: {0, 1, 2}, 0.9: {0}, 2.7: {0, 1, 2}, 8.1: {0}}


def test_another_learning_rate_that_is_better_gets_its_seeds_too(corpus, tmp_path):
    study = Pretended(corpus, tmp_path, best_lr=1e-3)
    for part in ("grid", "seeds", "grid"):
        study.run(study.cells(part))
    assert {c.config.optim.lr for c in study.cells("seeds")} == {1e-3}


def test_no_two_runs_of_the_claims_study_have_the_same_name(corpus, tmp_path):
    study = Pretended(corpus, tmp_path, best_lr=1e-3, best_decay=0.05)
    for _ in range(6):
        study.run([c for c in study.ledger.cells(study.done) if study.done.of(c) is None])
    names = {}
    for cell in study.ledger.cells(study.done):
        names.setdefault(cell.label, set()).add(
            identity(cell.config, study.ledger.data_of(cell.config))
        )
    assert len(names) > 50
    assert {label: ids for label, ids in names.items() if len(ids) > 1} == {}
