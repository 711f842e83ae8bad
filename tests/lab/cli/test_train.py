"""``normcontrol train``: what it says at its end."""

from __future__ import annotations

from normcontrol.lab.cli.main import main
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
