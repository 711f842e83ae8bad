"""Cells: identified by what they compute, and grids of them with paired seeds."""

from __future__ import annotations

import numpy as np
import pytest

from normcontrol.lab.errors import LabError
from normcontrol.lab.study.cells import Data, grid, identity
from normcontrol.lab.training.config import Config

DATA = Data("digest")


def test_a_cell_is_what_it_computes_and_nothing_else():
    config = Config()
    same = config.with_(
        micro_batch=1, device="cpu", compile=False, checkpoint_every=0, data="elsewhere"
    )
    assert identity(config, DATA) == identity(same, DATA)
    others = [
        config.with_(lr=2e-3),
        config.with_(init_seed=1),
        config.with_(scope="tensor"),
        config.with_(eval_every=7),
    ]
    names = {
        identity(config, DATA),
        identity(config, Data("other")),
        identity(config, Data("digest", {"owt": "x"})),
    }
    assert len(names | {identity(other, DATA) for other in others}) == 7


def test_a_grid_is_every_combination_with_paired_seeds():
    cells = grid("A", Config(), lr=[1e-3, 2e-3], weight_decay=[0.1, 0.2], seeds=[0, 5])
    assert len({cell.label for cell in cells}) == 8
    assert all(c.config.model.init_seed == c.config.data.data_seed == c.seed for c in cells)


def test_numbers_of_numpy_are_those_of_python():
    numpy = grid(
        "A", Config(), seeds=np.arange(2), warmup=np.arange(1, 3), lr=np.array([0.5], "f4")
    )
    plain = grid("A", Config(), seeds=[0, 1], warmup=[1, 2], lr=[0.5])
    assert numpy == plain
    assert [identity(cell.config, DATA) for cell in numpy] == [
        identity(cell.config, DATA) for cell in plain
    ]


def test_an_axis_may_be_an_argument_of_the_optimizer():
    """It is then a number of the trial, of which a verdict knows the lowest and the highest."""
    base = Config().with_(optimizer="plans/mine.py:Lion(cautious=True)")
    cells = grid("Lion", base, momentum=[0.9, 0.95], lr=[1e-3])
    assert [cell.config.optim.optimizer for cell in cells] == [
        f"plans/mine.py:Lion(cautious=True, momentum={value})" for value in (0.9, 0.95)
    ]
    assert cells[0].settings == (("momentum", 0.9), ("lr", 1e-3))
    (cell,) = grid("SGD", base.with_(optimizer="SGD"), momentum=[0.9])
    assert cell.config.optim.optimizer == "SGD(momentum=0.9)"


def test_an_axis_that_is_neither_a_setting_nor_an_argument_is_refused():
    with pytest.raises(LabError, match=r"'lrr' is not a setting .+ AdamWN has no such .+ mean lr"):
        grid("A", Config(), lrr=[0.1])


@pytest.mark.parametrize("axis", [{"seeds": 3}, {"lr": 1e-3}, {"scope": "row"}])
def test_an_axis_that_is_one_value_is_refused(axis):
    with pytest.raises(LabError, match="is one value, and grid makes a cell for each value of a"):
        grid("A", Config(), **axis)


def test_values_may_come_from_an_iterator_and_are_combined_all_the_same():
    made = grid("A", Config(), lr=iter([1e-3, 2e-3]), seeds=(seed for seed in range(3)))
    assert made == grid("A", Config(), lr=[1e-3, 2e-3], seeds=[0, 1, 2])


@pytest.mark.parametrize("axis", [{"seeds": []}, {"lr": ()}])
def test_an_axis_without_a_value_is_refused(axis):
    with pytest.raises(LabError, match="has no values, so that grid would make no cell"):
        grid("A", Config(), **axis)


@pytest.mark.parametrize("name", ["init_seed", "data_seed", "dropout_seed"])
def test_a_seed_of_its_own_is_no_axis(name):
    with pytest.raises(LabError, match=rf"^{name} cannot be an axis: .* Give seeds=\[...\]\.$"):
        grid("A", Config(), **{name: [1, 2]})


def test_a_setting_that_cells_are_chosen_by_is_whole():
    """In an array of jobs, the one of seed 1 must not run seeds 10 and 11 too."""
    cells = grid("AdamW", Config(), lr=[0.1, 0.12], seeds=[1, 11], part="grid")

    def chosen(*texts):
        return [(dict(c.settings)["lr"], c.seed) for c in cells if c.matches(texts)]

    assert chosen("seed=1") == [(0.1, 1), (0.12, 1)]
    assert chosen("lr=0.1") == [(0.1, 1), (0.1, 11)]
    assert chosen("lr=0.12 seed=1") == [(0.12, 1)]
    assert chosen("lr=0.1 seed=1", "lr=0.12 seed=11") == [(0.1, 1), (0.12, 11)]
    for text in ("", "dam", "gri", "lr", "seed="):  # other texts may be in the middle of a word
        assert len(chosen(text)) == 4
    assert not chosen("seed=2")
