"""What the tests on several processes do when a rank ends in a way that it should not."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import Crashed, run


def crash(folder: str, times: int) -> str:
    """Rank 1 reads at address 0, the first ``times`` times that it is started."""
    before = len(list(Path(folder).iterdir()))
    dist.barrier()
    if dist.get_rank() == 1 and before < times:
        Path(folder, str(before)).touch()
        ctypes.string_at(0)
    return "done"


def test_a_crash_is_tried_once_more_and_told(tmp_path):
    with pytest.warns(UserWarning, match=r"Rank 1 died with exit code -11(.|\n)*in crash"):
        assert run(crash, 2, str(tmp_path), 1) == ["done", "done"]


@pytest.mark.filterwarnings("ignore:Rank 1 died")
def test_two_crashes_are_an_error(tmp_path):
    with pytest.raises(Crashed, match="Rank 1 died with exit code -11"):
        run(crash, 2, str(tmp_path), 2)
