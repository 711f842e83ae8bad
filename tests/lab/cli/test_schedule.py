"""``normcontrol schedule``."""

from normcontrol.lab.cli.main import main


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
