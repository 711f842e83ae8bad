"""The study `search`: every arm has the same trials, and the seeds of the test choose nothing."""

from __future__ import annotations

from collections import Counter

import pytest
from fakes import FakeLedger, nothing_run, record

from normcontrol.lab.studies import budget, confirm, muon, search, settle
from normcontrol.lab.studies.settled import ADAMW, ADAMWN
from normcontrol.lab.study import verdict

INSIDE = (5, 4, 3, 2)
"""A point that lies at no edge."""


def distance(cell):
    """How far from INSIDE a cell is, by the squares of places: a loss with one minimum."""
    settings = [value for _, value in cell.settings]
    lists = (
        [search.LR["tiny"] * rate for rate in search.RATES],
        search.KINDS[cell.arm].values,
        [round(share * 600) for share in search.WARMUPS],
        search.FINALS,
    )
    return sum(
        abs(one.index(value) - i) for one, value, i in zip(lists, settings, INSIDE, strict=True)
    )


def run(loss):
    """All cells of the study, with records of these losses."""
    return FakeLedger(search.STUDY, lambda cell: record(cell, loss(cell)), "tiny")


@pytest.fixture(scope="module")
def every():
    ledger = run(lambda cell: 4.0 + 0.01 * distance(cell) + 0.001 * (cell.seed % 3))
    return ledger.cells(ledger.results())


def test_the_points_that_are_drawn_use_all_values_equally_often():
    points = search.drawn()
    assert len(set(points)) == search.DRAWN
    for column, size in zip(zip(*points, strict=True), search.SIZES, strict=True):
        counts = Counter(column)
        assert set(counts) <= set(range(size))
        assert max(counts.values()) - min(counts.values()) <= 1


def test_neighbours_are_one_place_away_and_new():
    best = [(5, 4, 3, 2), (0, 0, 0, 0)]
    found = search.beside(best, search.drawn())
    assert len({*found, *search.drawn()}) == search.BESIDE + search.DRAWN
    for point in found:
        assert any(all(abs(a - b) <= 1 for a, b in zip(point, one, strict=True)) for one in best)


def test_every_arm_has_the_same_number_of_runs_in_each_part(every):
    counts = Counter((cell.arm, cell.part) for cell in every)
    expected = {"search": 48, "choice": 20, "test": 20}
    assert counts == {(arm, part): count for arm in search.ARMS for part, count in expected.items()}


def test_the_seeds_of_the_test_were_never_used(every):
    tested = {cell.seed for cell in every if cell.part == "test"}
    used = {*settle.SEEDS, *settle.MORE, *confirm.SEEDS, *budget.SEEDS, *muon.SEEDS}
    assert tested == set(search.SEEDS)
    assert not tested & (used | set(search.CHOSEN_BY))
    assert {cell.seed for cell in every if cell.part != "test"} == set(search.CHOSEN_BY)


def test_the_best_of_the_search_is_what_is_tested(every):
    for arm in search.ARMS:
        cells = [cell for cell in every if cell.arm == arm]
        (tested,) = {cell.settings for cell in cells if cell.part == "test"}
        best = min(distance(cell) for cell in cells)
        assert distance(next(cell for cell in cells if cell.settings == tested)) == best


def test_a_stopped_search_names_only_what_it_can():
    first = search.cells("tiny", nothing_run())
    assert Counter(cell.arm for cell in first) == dict.fromkeys(search.ARMS, search.DRAWN)


@pytest.mark.parametrize(
    ("better", "lower", "level"),
    [
        (0.03, "supported", "refuted"),
        (0.0, "not shown", "supported"),
        (-0.03, "refuted", "refuted"),
    ],
)
def test_the_claims_are_decided_in_the_seeds_of_the_test(better, lower, level):
    def loss(cell):
        noise = 0.003 * (-1) ** cell.seed if cell.arm == ADAMWN else 0.0
        fresh = better if cell.arm == ADAMWN and cell.seed in search.SEEDS else 0.0
        return 4.3 + 0.01 * distance(cell) - fresh + noise

    judged = verdict.judge(run(loss))
    outcomes = {claim.name: finding for claim, finding in judged.findings}
    assert (outcomes["lower"].outcome, outcomes["level"].outcome) == (lower, level)
    assert "n = 20" in outcomes["lower"].numbers


def test_nothing_is_shown_when_a_best_lies_at_an_edge():
    def loss(cell):
        place = search.KINDS[cell.arm].values.index(dict(cell.settings)[search.KINDS[cell.arm].key])
        lead = 0.1 if cell.arm == ADAMWN else 0.0
        return 4.3 + 0.01 * (place if cell.arm == ADAMW else distance(cell)) - lead

    judged = verdict.judge(run(loss))
    (found,) = [finding for claim, finding in judged.findings if claim.name == "lower"]
    assert found.outcome == "not shown"
    assert "the best of AdamW is at the edge of its grid (weight_decay=0.02" in found.text()
