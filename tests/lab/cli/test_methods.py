"""``normcontrol methods``: what it prints about a method."""

from __future__ import annotations

import pytest

from normcontrol.lab.cli.main import main
from normcontrol.methods import METHODS


@pytest.mark.parametrize("name", METHODS)
def test_the_explanation_of_a_method_has_neither_types_nor_the_markup_of_the_pages(name, capsys):
    assert main(["methods", name]) == 0
    said = capsys.readouterr().out
    call, *explained = said.split("\n\n")
    assert call.startswith(f"{name}: normcontrol.methods.{METHODS[name].build.__name__}(")
    assert ": '" not in call
    assert "->" not in call
    assert explained
    assert "`" not in "".join(explained)


def test_lines_of_a_paragraph_are_joined_and_those_of_a_list_are_kept(capsys):
    assert main(["methods", "QK-Clip"]) == 0
    said = capsys.readouterr().out
    assert "W_q, W_k \\leftarrow W \\sqrt{t / S} for that head.\n" in said
    assert "Args:\n    params: groups" in said
