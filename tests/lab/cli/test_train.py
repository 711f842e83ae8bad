"""``normcontrol train``: what it says at its end."""

from __future__ import annotations

import pytest

from normcontrol.lab.cli.main import main
from normcontrol.lab.errors import LabError
from normcontrol.lab.training import metrics
from normcontrol.lab.training.loop import train


def test_a_run_ends_with_its_final_validation_loss(config, corpus, tmp_path, capsys):
    statuses = []
    other = config.with_(also_validate=(str(corpus),), eval_every=5)
    assert train(other, tmp_path / "run", display=statuses.append)
    *_, before, last = [line for line in metrics.read(tmp_path / "run") if "val_loss" in line]
    assert last["val_loss"] != before["val_loss"]
    assert statuses[-1].val_loss == last["val_loss"]
    assert statuses[-3].val_loss == before["val_loss"]
    # A finished run that is resumed has nothing to do, and says the same.
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == (
        f"Done: {tmp_path / 'run'}, with a validation loss of {last['val_loss']:.4f} and a "
        f"validation loss on data of {last['val_loss_data']:.4f}. Text from it with:\n"
        f"  normcontrol sample {tmp_path / 'run'}\n"
    )


def test_a_resumed_run_says_after_which_step_it_continues(config, tmp_path, capsys):
    run = tmp_path / "run"
    stopping = config.with_(steps=6, checkpoint_every=4)

    def stop(status):
        if status.step == 5:
            raise KeyboardInterrupt  # between two checkpoints, as a kill would

    with pytest.raises(KeyboardInterrupt):
        train(stopping, run, display=stop)
    assert main(["train", "--resume", str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"{run} continues after step 4 of 6.\n")


def test_a_run_that_was_stopped_before_its_first_checkpoint_says_that_it_starts_again(
    config, tmp_path, capsys
):
    run = tmp_path / "run"
    train(config.with_(steps=4), run)
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    assert main(["train", "--resume", str(run)]) == 0
    assert capsys.readouterr().out.startswith(
        f"{run} has no checkpoint: it was stopped before the first one, and starts again. "
        "--checkpoint-every N writes more of them.\n"
    )


def test_a_command_that_is_suggested_can_be_copied_if_the_folder_has_spaces(
    config, tmp_path, capsys
):
    run = tmp_path / "a run"
    train(config, run)
    assert main(["train", "--resume", str(run)]) == 0
    assert capsys.readouterr().out.endswith(f"  normcontrol sample '{run}'\n")
    with pytest.raises(LabError, match=f"normcontrol train --resume '{run}'`"):
        train(config, run)


def test_a_run_without_checkpoints_offers_no_text(config, tmp_path, capsys):
    run = tmp_path / "run"
    train(config.with_(steps=4, checkpoint_every=0), run)
    assert main(["train", "--resume", str(run)]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"Done: {run}, with a validation loss of")
    assert "sample" not in said
    assert main(["sample", str(run)]) == 1
    assert "has no checkpoint. A run writes one every --checkpoint-every" in capsys.readouterr().err


def test_a_run_that_cannot_be_continued_like_this_is_not_said_to_continue(config, tmp_path, capsys):
    run = tmp_path / "run"
    train(config, run)
    assert main(["train", "--resume", str(run), "--steps", "20"]) == 1
    said = capsys.readouterr()
    assert "steps was 12 when" in said.err
    assert not said.out


def test_a_run_in_the_working_directory_is_shown_by_the_name_of_the_folder(
    config, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    train(config.with_(steps=4, checkpoint_every=2), run)
    for path in (run / "checkpoints").glob("step-00000004-*"):
        path.unlink()
    monkeypatch.chdir(run)
    assert main(["train", "--resume", "."]) == 0
    assert "\nrun  4/4  " in capsys.readouterr().out
