"""The tutorial notebook runs from top to bottom, and is committed with its outputs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs/tutorial.ipynb"
sys.path.insert(0, str(ROOT / "tools"))
import notebook  # noqa: E402

STEPS = "STEPS = 200"


@pytest.fixture(autouse=True)
def _threads():
    """The notebook sets the number of threads of the process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_it_runs_from_top_to_bottom_with_few_steps():
    outputs, names = notebook.run(TUTORIAL, replace=(STEPS, "STEPS = 4"))
    assert names["STEPS"] == 4
    assert len(names["losses"]) == 9
    images = [o for found in outputs for o in found if o["output_type"] == "display_data"]
    assert len(images) == 2


@pytest.mark.slow
def test_the_norm_ends_at_the_target_at_every_learning_rate():
    _, names = notebook.run(TUTORIAL)
    ratios = [line.get_ydata()[-1] for line in names["ax"].lines]
    assert ratios == pytest.approx([names["target"].end] * 4, rel=0.01)


def test_it_is_committed_with_the_outputs_of_a_whole_run_and_is_small():
    assert TUTORIAL.stat().st_size < 150_000
    code = [cell for cell in notebook.cells(TUTORIAL) if cell["cell_type"] == "code"]
    assert STEPS in notebook.source(code[0])
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    printed = [bool(cell["outputs"]) for cell in code]
    assert printed == [False] + [True] * (len(code) - 1)
    assert "error" not in {o["output_type"] for cell in code for o in cell["outputs"]}
    assert json.loads(TUTORIAL.read_text())["nbformat"] == 4


def test_a_cell_gives_its_text_its_last_value_and_an_error_is_not_hidden():
    pyplot.figure()  # of another program, and not an output of the cell
    names: dict = {}
    (output,) = notebook.run_cell("x = 2\nprint('two')\nx + 1", names)
    assert "".join(output["text"]) == "two\n3\n"
    assert notebook.run_cell("y = x", names) == []
    with pytest.raises(ZeroDivisionError):
        notebook.run_cell("1 / 0", names)
