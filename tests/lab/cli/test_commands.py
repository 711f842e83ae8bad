"""sample and schedule."""

import pytest

from normcontrol.lab.cli.main import main
from normcontrol.lab.report import schedule as plan
from normcontrol.lab.training import sample
from normcontrol.lab.training.config import preset
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
    assert "holds no run" in capsys.readouterr().err


def test_a_plan_is_drawn_before_it_is_run(tmp_path, capsys):
    out = tmp_path / "plan.png"
    assert (
        main(
            [
                "schedule",
                "--preset",
                "gpt2",
                "--ratio",
                "2.415",
                "--steps",
                "50000",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "2,500" in capsys.readouterr().out


def test_a_plan_holds_what_the_optimizer_will_do():
    gpt2 = preset("gpt2")
    assert plan.values(gpt2.with_(ratio=2.4), 1250) == (
        1e-3 * 1250 / 2000,
        pytest.approx(1.7),
        1e-2,
    )
    assert plan.values(gpt2.with_(optimizer="AdamW", weight_decay=0.1), 2000) == (
        1e-3,
        0.0,
        pytest.approx(1e-4),
    )
    assert plan.values(gpt2.with_(optimizer="AdamC", weight_decay=0.1), 1000) == (
        5e-4,
        0.0,
        pytest.approx(0.1 * 2.5e-7 / 1e-3),
    )
    assert plan.values(gpt2.with_(optimizer="SGD"), 2000) == (1e-3, None, None)
