"""Tests of checkpoint files: atomic writing, the checksum, the error messages, and that loading
runs no code. No run is started."""

from __future__ import annotations

import os

import pytest
import torch
from fork_server import python

from normcontrol.lab.errors import LabError
from normcontrol.lab.training import checkpoint

CONTENT = {"weights": torch.arange(1000.0), "step": 3}


def test_what_was_saved_is_loaded(tmp_path):
    path = checkpoint.save(tmp_path, 3, CONTENT)
    assert torch.equal(checkpoint.load(path)["weights"], CONTENT["weights"])
    assert torch.load(path, weights_only=True)["step"] == 3  # a file that torch.load reads


def test_the_newest_two_are_kept(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, CONTENT)
    assert [path.name[:13] for path in checkpoint.found(tmp_path)] == [
        "step-00000002",
        "step-00000003",
    ]


@pytest.mark.parametrize("damage", ["truncated", "one bit", "emptied"])
def test_a_damaged_checkpoint_is_named_and_refused_and_the_last_good_one_offered(tmp_path, damage):
    good, bad = checkpoint.save(tmp_path, 1, CONTENT), checkpoint.save(tmp_path, 2, CONTENT)
    content = bytearray(bad.read_bytes())
    content[len(content) // 2] ^= 8
    bad.write_bytes({"truncated": content[:-100], "one bit": content, "emptied": b""}[damage])
    with pytest.raises(LabError) as error:
        checkpoint.load(bad)
    assert f"The checkpoint {bad} is damaged" in str(error.value)
    assert f"The last good one is {good.name}" in str(error.value)
    good.write_bytes(b"")
    with pytest.raises(LabError, match="There is no other checkpoint"):
        checkpoint.load(bad)


def test_a_half_written_file_is_not_taken_for_a_checkpoint(tmp_path):
    (tmp_path / "step-00000009.tmp").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) is None


def test_loading_a_file_from_elsewhere_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    path = checkpoint.save(tmp_path, 1, {"model": Evil()})
    with pytest.raises(LabError, match="contains Python objects other than tensors and plain data"):
        checkpoint.load(path)
    assert not (tmp_path / "ran").exists()


FULL_DISK = """
import resource, signal, sys, torch
from pathlib import Path
from normcontrol.lab.errors import LabError
from normcontrol.lab.training import checkpoint
folder = Path(sys.argv[1]) / "checkpoints"
checkpoint.save(folder, 1, {"weights": torch.zeros(10)})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoint.save(folder, 2, {"weights": torch.zeros(1_000_000)})
except LabError as error:
    print(error)
"""


def test_when_the_disk_is_full_the_earlier_checkpoint_is_intact(tmp_path):
    """A limit on the file size simulates a full disk: both make a write fail in the middle."""
    done = python("-c", FULL_DISK, tmp_path)
    assert "The checkpoint of step 2 could not be written" in done.out, done.err
    assert f"normcontrol train --resume {tmp_path}" in done.out
    [earlier] = (tmp_path / "checkpoints").iterdir()
    assert f"The earlier checkpoint {earlier.name} is intact" in done.out
    checkpoint.load(earlier)
