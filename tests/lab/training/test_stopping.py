"""Tests of runs in processes of their own that are interrupted or killed, and then resumed: they
end in the same bits as an uninterrupted run."""

from __future__ import annotations

import signal
import time

import kills
import pytest

from normcontrol.lab.errors import LabError
from normcontrol.lab.training import checkpoint, metrics
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.signals import interruptible


@pytest.fixture
def longer(config):
    return config.with_(steps=400, optimizer="AdamWN", eval_every=50, checkpoint_every=7)


def test_a_run_killed_at_random_moments_and_resumed_is_bit_equal(longer, tmp_path):
    assert train(longer, tmp_path / "whole")
    kills.killed_and_resumed(
        longer, tmp_path / "killed", 2, kills.progress(tmp_path / "whole"), seed=time.time_ns()
    )
    assert kills.differences(tmp_path / "whole", tmp_path / "killed") == []


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_a_checkpoint_and_prints_how_to_resume(longer, tmp_path, stop):
    out = tmp_path / "run"
    process = kills.start(longer.with_(steps=100_000, checkpoint_every=100_000), out)
    process.wait_for(lambda: len(metrics.read(out)) >= 20)
    process.signal(stop)
    ended = process.end()
    assert f"Stopped, and saved. To continue:\n  normcontrol train --resume {out}" in ended.out
    assert ended.status == 130
    state = checkpoint.load(checkpoint.latest(out / "checkpoints"))
    assert metrics.read(out)[-1]["step"] == state["step"]


def test_a_run_stops_also_if_ctrl_c_came_before_it_began(longer, tmp_path):
    with interruptible() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        assert not train(longer, tmp_path / "run")
    assert metrics.read(tmp_path / "run")[-1]["step"] == 1
    with interruptible() as interrupted:
        assert not interrupted()


def test_a_damaged_newest_checkpoint_is_refused_until_it_is_deleted(config, tmp_path):
    assert train(config, tmp_path / "run")
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(LabError, match="is damaged"):
        train(config, tmp_path / "run", resume=True)
    newest.unlink()
    assert train(config, tmp_path / "run", resume=True)
    assert train(config, tmp_path / "whole")
    assert kills.differences(tmp_path / "whole", tmp_path / "run") == []
