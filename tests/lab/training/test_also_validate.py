"""Other data to validate on after the last step."""

from __future__ import annotations

import numpy as np
import pytest

from normcontrol.lab.errors import LabError
from normcontrol.lab.training import metrics
from normcontrol.lab.training.loop import train


def test_other_data_is_validated_on_at_the_end(config, corpus, tmp_path):
    assert train(config.with_(also_validate=(str(corpus),)), tmp_path / "run")
    last = metrics.read(tmp_path / "run")[-1]
    assert last["val_loss_data"] == pytest.approx(last["val_loss"], abs=1e-12)
    (tmp_path / "other").mkdir()
    np.arange(100).astype("<u2").tofile(tmp_path / "other/val.bin")
    with pytest.raises(
        LabError, match=r"contains tokens of gpt2, and the model is trained on tokens of bytes"
    ):
        train(config.with_(also_validate=(str(tmp_path / "other"),)), tmp_path / "two")
    with pytest.raises(LabError, match=r"There is no manifest.json and no val.bin in"):
        train(config.with_(also_validate=(str(tmp_path),)), tmp_path / "three")
