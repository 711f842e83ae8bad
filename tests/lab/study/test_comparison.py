"""Which trial represents an arm, and by which seeds it is chosen and tested."""

from __future__ import annotations

import math

from fakes import record

from normcontrol.lab.study.cells import grid
from normcontrol.lab.study.comparison import Comparison, choose
from normcontrol.lab.study.evidence import Trial
from normcontrol.lab.training.config import Config


def trial(ratio, losses, arm="A"):
    """A trial with a loss for each seed."""
    cells = grid(arm, Config(), ratio=[ratio], seeds=list(losses))
    return Trial(arm, tuple(cells), tuple(map(record, cells, losses.values())))


def trials(*losses, seeds=range(9)):
    """Trials at ratios 1, 2, ...; losses by seed."""
    return [
        trial(float(i + 1), dict(zip(seeds, own, strict=False))) for i, own in enumerate(losses)
    ]


def test_a_trial_is_chosen_by_the_first_third_of_the_seeds_and_tested_by_the_others():
    lucky, good = [3.0, 3.0, 9.0, 9.0, 9.0, 9.0], [4.0] * 6
    found = choose(trials(lucky, good))
    assert (found.trial.setting("ratio"), found.seeds) == (1.0, {0, 1})
    assert Comparison(found, found).fresh == [2, 3, 4, 5]
    assert choose(trials([3.0, 9.0], [4.0, 4.0])).seeds == {0}
    assert choose([]) is None


def test_seeds_in_which_a_trial_beat_one_that_was_given_fewer_have_chosen_it():
    first = trials([4.0, 3.0, 3.0, 3.0, 3.0, 3.0], [4.0, 3.5, 3.5], [4.5])
    assert choose(first).seeds == {0, 1, 2}
    # The second trial was not dropped for what it did in these seeds.
    assert choose(trials([4.0, 3.5, 3.5, 3.5, 3.5], [4.0, 3.0, 3.0], [4.5])).seeds == {0}


def test_a_trial_that_diverged_in_a_later_seed_is_not_chosen():
    found = choose(trials([3.0, 3.0, math.inf], [4.0, 4.0, 4.0]))
    assert found.trial.setting("ratio") == 2.0


def test_one_trial_has_nothing_to_choose_and_is_tested_by_every_seed():
    found = choose(trials([3.0] * 3))
    assert (found.seeds, found.made, found.edges()) == (set(), 1, None)
    borrowed = choose(trials([3.0] * 3), made=12)  # its setting is the best of twelve
    assert borrowed.seeds == {0}


def test_seeds_by_which_either_arm_was_chosen_test_neither():
    one = choose(trials([3.0] * 6, [4.0] * 6))
    other = choose(trials([3.0] * 3, [4.0] * 3, seeds=[2, 3, 4]))
    both = Comparison(one, other)
    assert (both.used, both.common, both.fresh) == ({0, 1, 2}, [2, 3, 4], [3, 4])
    assert both.difference().n == 2


def test_trials_without_a_seed_in_common_have_used_all_of_theirs():
    found = choose([trial(1.0, {0: 3.0, 1: 3.0}), trial(2.0, {2: 4.0, 3: 4.0})])
    assert found.seeds == {0, 1}
    both = Comparison(found, found)
    assert (both.fresh, both.seeds) == ([], [0, 1])
    assert "every seed was used both to choose the settings and to test them" in both.unfair()


def test_the_best_is_at_an_edge_if_it_is_in_the_seeds_of_the_choice_or_in_all():
    inside = [[9.0, 9.0, 9.0], [3.0, 3.0, 3.0], [9.0, 9.0, 9.0]]
    assert choose(trials(*inside)).edges() == {}
    by_luck = [[9.0, 9.0, 9.0], [3.0, 3.0, 3.0], [2.0, 9.0, 9.0]]
    assert choose(trials(*by_luck)).edges() == {"ratio": 3.0}
    in_all = [[4.0, 1.0, 1.0], [3.0, 3.0, 3.0], [9.0, 9.0, 9.0]]
    assert choose(trials(*in_all)).edges() == {"ratio": 1.0}


def test_zero_is_no_edge_because_nothing_lies_below_it():
    best = {0.0: {0: 3.0}, 1.0: {0: 4.0}}
    assert choose([trial(ratio, losses) for ratio, losses in best.items()]).edges() == {}


def test_settings_that_are_no_numbers_have_no_edges():
    cells = [
        grid("A", Config(), scope=[scope], seeds=[0])[0] for scope in ("global", "tensor", "row")
    ]
    made = [Trial("A", (cell,), (record(cell, 3.0),)) for cell in cells]
    assert choose(made).edges() is None


def test_a_switch_has_no_edges():
    cells = grid("A", Config(), hidden_only=[False, True])
    made = [Trial("A", (cell,), (record(cell, 4.0 - i),)) for i, cell in enumerate(cells)]
    assert choose(made).trial.cells[0].config.optim.hidden_only
    assert choose(made).edges() is None
