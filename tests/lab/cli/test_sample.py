"""``normcontrol sample``."""

import pytest

from normcontrol.lab.cli.main import main
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


def test_a_folder_without_a_run_has_no_text(tmp_path, capsys):
    assert main(["sample", str(tmp_path)]) == 1
    assert "contains no run" in capsys.readouterr().err
