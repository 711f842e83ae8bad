"""``normcontrol sample``."""

import pytest

from normcontrol.lab.cli.main import main
from normcontrol.lab.errors import LabError
from normcontrol.lab.training import sample
from normcontrol.lab.training.loop import train


@pytest.fixture
def trained(config, tmp_path):
    assert train(
        config.with_(steps=120, lr=2e-2, eval_every=120, checkpoint_every=120), tmp_path / "run"
    )
    return tmp_path / "run"


def test_text_from_a_checkpoint(trained, capsys):
    assert (
        main(
            [
                "sample",
                str(trained),
                "--prompt",
                "the square",
                "--tokens",
                "20",
                "--temperature",
                "0",
                "--device",
                "cpu",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert said.startswith("the square")
    assert len(said) > 15
    model, words = sample.load(trained, "cpu")
    again = [
        "".join(sample.generate(model, words, "the ", 30, 1.0, 50, seed)) for seed in (0, 0, 1)
    ]
    assert again[0] == again[1] != again[2]
    coldest = "".join(sample.generate(model, words, "the ", 30, 5e-324, 0, 0))
    assert coldest == "".join(sample.generate(model, words, "the ", 30, 0.0, 0, 0))
    with pytest.raises(LabError, match=r"The prompt has the lone surrogate U\+DCFF at character 1"):
        next(sample.generate(model, words, "a\udcff", 30, 1.0, 0, 0))
    for wrong in ({"temperature": float("nan")}, {"tokens": -1}, {"top_k": -1}):
        options = {"tokens": 1, "temperature": 1.0, "top_k": 0, "seed": 0, **wrong}
        with pytest.raises(LabError, match=f"{next(iter(wrong))}=.*: it must be"):
            next(sample.generate(model, words, "a", **options))


def test_numbers_that_cannot_be_are_refused_before_the_run_is_read(tmp_path, capsys):
    assert main(["sample", str(tmp_path), "--temperature", "nan"]) == 1
    assert "temperature=nan: it must be 0 or more and finite." in capsys.readouterr().err


def test_a_folder_without_a_run_has_no_text(tmp_path, capsys):
    assert main(["sample", str(tmp_path)]) == 1
    assert "contains no run" in capsys.readouterr().err
